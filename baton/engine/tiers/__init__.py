"""Tiers below the pool of an engine: the part that joins policy, prefix cache, and files or host memory."""
