"""Experiments on the router and its store between mock workers."""
