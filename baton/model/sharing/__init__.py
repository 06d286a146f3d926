"""Loads a model on weights that the workers of a host share. On top of `baton.model.loading`."""
