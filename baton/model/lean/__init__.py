"""A hand-written decoder for the families most people run, with the weights of a stock model and checked against it."""
