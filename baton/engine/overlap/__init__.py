"""Overlap scheduling: a step is scheduled and started while the one before it runs."""
