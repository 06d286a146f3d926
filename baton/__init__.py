"""Baton: LLM serving with prefill and decode in separate services. The library the services share."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`from baton import LLM` loads `baton.services.local.llm`, and torch with it, only when the name is read."""
    if name == "LLM":
        return import_module("baton.services.local.llm").LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
