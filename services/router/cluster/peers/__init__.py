"""The requests of the other routers, for the live view."""
