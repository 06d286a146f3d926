"""Transfer over TCP, for machines without NIXL: page connections, or gRPC streams where those cannot be opened."""

TRANSPORT = "stream"
PAGES_PATH, CALLS_PATH = "stream/tcp", "stream/grpc"
"""How pages came: on page connections, or as answers of calls. `TRANSPORT` alone before the first page."""
