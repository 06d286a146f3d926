"""Ownership of calls in the state store, and takeover of calls whose router or client is gone."""
