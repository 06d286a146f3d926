"""The decode worker: reserves pages, pulls the KV of prefilled prompts, validates it and runs continuous batching."""
