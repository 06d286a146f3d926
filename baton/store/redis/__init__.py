"""The state store on a Redis server."""
