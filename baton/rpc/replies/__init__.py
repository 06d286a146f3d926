"""Replies: proof of who sent them."""
