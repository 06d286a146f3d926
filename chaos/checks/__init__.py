"""Checks of a run: answers, histories, and resource growth."""
