"""Images that come to a prefill worker: their upload, and their decoding in a process with limits."""
