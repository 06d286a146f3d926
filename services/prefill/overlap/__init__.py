"""Prefill with a step in flight while the next one is scheduled and started."""
