"""A worker's id, the name of its container, and the address that it announces."""
