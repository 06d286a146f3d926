"""Images of the simulation: files that are names, and an encoder that is a function of their identity."""
