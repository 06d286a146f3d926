"""Prefill, transfer and decode in one process and one thread: the split engine in a debugger."""
