"""Series with bounded labels: by tenant, and of the workers that a router knows."""
