"""Prompts that are cut to a number of tokens."""
