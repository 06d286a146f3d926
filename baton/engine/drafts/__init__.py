"""Drafters propose tokens that a decode step verifies: their interface, registry, budget and implementations."""
