"""The decode worker: reserves room, pulls handed-off pages, validates them, and runs continuous batching."""
