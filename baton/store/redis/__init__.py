"""State store on a Redis server."""
