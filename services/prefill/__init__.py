"""The prefill worker: chunked prefill with a radix cache, and the source's side of every handoff."""
