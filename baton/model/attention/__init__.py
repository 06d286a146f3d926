"""Attention over pages: one hook into stock modelling code, and its backends."""
