"""How values are made."""
