"""What a chat asks of the model's reasoning: `reader` reads the fields, `phases` puts it before a constraint."""
