"""Bytes of the host tier."""
