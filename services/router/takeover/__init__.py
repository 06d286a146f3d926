"""Ownership of calls in the state store, and the takeover of calls whose router or client is gone."""
