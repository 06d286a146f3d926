"""Health checks and reflection of a worker's gRPC server, as the standard protocols of gRPC define them."""
