"""Media spans on the wire."""
