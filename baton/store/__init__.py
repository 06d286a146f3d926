"""The state store: sequences, client calls and their journals, live workers. Redis, or memory in one process."""
