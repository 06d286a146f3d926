"""Comparison with other servers on the same cores: installation, model, start and measurement."""
