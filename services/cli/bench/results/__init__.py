"""The rows of a run, their file, and the figures computed from them."""
