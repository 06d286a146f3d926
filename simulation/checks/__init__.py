"""Checks during a run and at its end."""
