"""Why a model directory cannot be served. Raised while a worker starts, never while it serves."""

from __future__ import annotations

from typing import ClassVar

from baton.domain.errors import BatonError


class UnsupportedModel(BatonError):
    """The model would not run, or would run and be wrong. The message says what, why, and how to mend it."""

    code: ClassVar[str] = "unsupported_model"


class UnreadableModel(BatonError):
    """The directory is not there, or what is in it is not a whole model."""

    code: ClassVar[str] = "unreadable_model"
