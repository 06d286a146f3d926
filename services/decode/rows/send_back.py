"""Reasons to send a row back to the router."""

from __future__ import annotations

import enum


class SendBackReason(enum.StrEnum):
    """Why a row was sent back to the router."""

    NO_MEMORY = "no_memory"
    DAMAGED_COPY = "damaged_copy"
