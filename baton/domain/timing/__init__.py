"""Durations: where the time of an attempt went, and how long a step will take."""
