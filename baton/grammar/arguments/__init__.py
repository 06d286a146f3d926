"""How each format writes the arguments of a call: rules of a grammar for a JSON Schema."""
