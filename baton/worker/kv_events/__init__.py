"""Cache events for routers of other projects: their wire format, and a publisher over ZeroMQ."""
