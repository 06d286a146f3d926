"""Attention over pages: ratios of one core's time in one run."""
