"""The reception book: which requests there are and which workers live. Redis, or its in-memory twin."""
