"""The router's end of sessions with decode workers."""
