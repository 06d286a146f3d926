"""Loads a model: reads it, chooses how to compute it, and checks it before it serves."""
