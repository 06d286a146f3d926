"""gRPC between processes: generated stubs, translation to the domain, channels, servers and shutdown."""
