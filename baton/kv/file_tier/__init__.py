"""Policy of the file tier: which pages have copies in files, and which copy goes first. Pure."""
