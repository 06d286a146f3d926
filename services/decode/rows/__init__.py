"""Rows of the decode batch: which one gives way, and what decides about all of them."""
