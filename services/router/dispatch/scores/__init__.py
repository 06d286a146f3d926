"""Scores of prompts, as they come from a worker."""
