"""What a run sends and when: prompts, arrivals and public traces."""
