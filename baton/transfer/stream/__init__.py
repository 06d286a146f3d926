"""Transfer over TCP, for machines without NIXL: page connections, or gRPC streams where those cannot be opened."""

TRANSPORT = "stream"
