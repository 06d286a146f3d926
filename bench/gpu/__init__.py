"""Experiments that need a GPU: prompts, and handoffs from and into its memory."""
