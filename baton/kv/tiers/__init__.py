"""Policy of the tiers below the pool, in files and host memory: which pages have copies, which goes first. Pure."""
