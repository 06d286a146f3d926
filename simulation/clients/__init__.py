"""Simulated clients: their connections, and what they received."""
