"""The prefill worker: chunked prefill with a prefix cache, and the source side of every handoff."""
