"""The worker's end of sessions with routers."""
