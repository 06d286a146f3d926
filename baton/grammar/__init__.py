"""Grammars that constrain output, with llguidance. Routers check them, workers apply them. Knows the domain only.

sources (request fields -> grammar text) -> compiler (limits, cache) -> matcher (tokens -> allowed tokens); tokenizer.
"""
