"""The HTTP client of the load generator: connections, server-sent events and answer times."""
