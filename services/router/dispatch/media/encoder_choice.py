"""Chooses the encode workers of an image. Pure.

Rendezvous hashing (Thaler and Ravishankar, 1998): every router ranks the workers of an identity alike. So an image is
encoded once whichever prefill worker needs it, and a worker that leaves moves its own images only. One whose queue is
longer than the shortest by more than `MAX_EXTRA_ROWS` comes behind the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from baton.domain.worker import EMBEDDINGS, NO_TOWER, WorkerRecord, WorkerRole

MAX_EXTRA_ROWS = 4096
"""Rows that may wait at the first worker of an image beyond those that wait at the idlest one."""


def makes_embeddings(encoder: WorkerRecord, prefill: WorkerRecord) -> bool:
    """True for an encode worker of the embeddings that a prefill worker pulls."""
    is_encoder = encoder.role is WorkerRole.ENCODE and EMBEDDINGS in prefill.capabilities
    return is_encoder and (encoder.vision, encoder.processor) == (prefill.vision, prefill.processor)


def has_tower(prefill: WorkerRecord) -> bool:
    """True for a prefill worker that encodes images itself, if it serves any."""
    return NO_TOWER not in prefill.capabilities


def rank_encoders(encoders: Iterable[WorkerRecord], identity: bytes) -> list[WorkerRecord]:
    """The workers for an image, best first."""
    found = list(encoders)
    least = min((one.load.waiting_tokens for one in found), default=0)

    def rank(worker: WorkerRecord) -> tuple[bool, bytes]:
        is_busy = worker.load.waiting_tokens > least + MAX_EXTRA_ROWS
        return is_busy, blake2b(identity + worker.id.encode(), digest_size=8).digest()

    return sorted(found, key=rank)
