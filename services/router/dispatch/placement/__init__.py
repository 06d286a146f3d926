"""Placement: the pair of workers that computes a prompt and continues it. Called by `workers`; pure."""
