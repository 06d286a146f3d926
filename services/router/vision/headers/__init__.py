"""Reads what an image file says about itself before its pixels: format and size, by its own bytes."""
