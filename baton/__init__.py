"""Baton: LLM serving with prefill and decode in separate services. The library the services share."""

__version__ = "0.1.0"
