"""Loading a model: reading it, choosing how it is computed, and checking it before it serves."""
