"""Metrics that every request adds to."""
