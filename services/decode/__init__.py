"""The decode worker: promises room, pulls handed-off pages, validates them, and runs continuous batching."""
