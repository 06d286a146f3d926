"""Speculative decoding: what drafts give and cost."""
