"""The memory of a worker's pool."""
