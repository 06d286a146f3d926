"""The requests of a run: prompts, arrivals and public traces."""
