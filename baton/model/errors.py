"""Reasons why a model directory cannot be served. Raised while a worker starts, never while it serves."""

from __future__ import annotations

from typing import ClassVar

from baton.domain.errors import BatonError


class UnsupportedModel(BatonError):
    """The model would not run, or would give wrong tokens. The message names the reason and a fix."""

    code: ClassVar[str] = "unsupported_model"


class UnreadableModel(BatonError):
    """The directory is missing or holds no complete model."""

    code: ClassVar[str] = "unreadable_model"
