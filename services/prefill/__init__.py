"""The prefill worker: chunked prefill with a prefix cache, and the source's side of every handoff."""
