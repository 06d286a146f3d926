"""Media spans of a request, and the positions that follow from them."""
