"""Parts around an engine in a worker process: lifecycle, registration, drain, request checks and event streams."""
