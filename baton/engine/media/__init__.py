"""Images in a step of an engine."""
