"""Commands to the encode engine, sent through its mailbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.engine.media.exported_embedding import ExportedEmbedding
from baton.engine.media.store import HeldMedia, MediaKey
from baton.engine.reply import Reply
from baton.worker.media.media_receiver import MediaCommand


@dataclass(frozen=True, slots=True)
class OpenPull:
    """Asks for an embedding, within `deadline_s` from when the engine takes the command. `lease`: its number."""

    lease: int
    key: MediaKey
    deadline_s: float
    reply: Reply[HeldMedia[Any, ExportedEmbedding]]


@dataclass(frozen=True, slots=True)
class ClosePull:
    """The pull has ended: its image may be evicted."""

    lease: int


EncodeCommand = MediaCommand | OpenPull | ClosePull
