"""Tools that a chat may call: `reader` reads the fields and makes the constraint of the calls."""
