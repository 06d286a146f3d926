"""The router's end of sessions with its workers."""
