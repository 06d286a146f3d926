"""What a router with the secret has stored, and Redis as a stranger has it. `conftest` has the fixture `stage`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from baton.domain.ids import AttemptId, OwnerId, RequestId
from baton.domain.lifecycle import RequestState
from baton.domain.request import OutputToken
from baton.domain.trust import ClusterTrust
from baton.store.redis.keys import RedisKeys
from baton.store.store import CallRecord, CallStatus, JournalEntry, SequenceRecord, StateStore
from tests.contract.stores import journal_entry

OURS, THEIRS = OwnerId("router-0/a1"), OwnerId("router-1/b2")
PROMPT = b'{"prompt": "the diary of a client"}'


def call(id: str = "c", tenant: str = "acme", body: bytes = PROMPT, created_s: int | None = None) -> CallRecord:
    created_s = int(time.time()) if created_s is None else created_s
    sequence_ids = (RequestId(f"{id}-0"),)
    return CallRecord(
        RequestId(id), OURS, 1, CallStatus.OPEN, "/v1/completions", body, tenant, created_s, 7, sequence_ids
    )


def sequence(id: str = "c-0", fingerprint: str = "print-a") -> SequenceRecord:
    return SequenceRecord(RequestId(id), 1, RequestState.RECEIVED, "router-0", "tiny", 7, fingerprint=fingerprint)


def entry(first: int, end: int, id: str = "c-0", **end_of_it: Any) -> JournalEntry:
    tokens = [OutputToken(index, 1000 + index) for index in range(first, end)]
    return journal_entry(AttemptId(RequestId(id), 1), tokens, **end_of_it)


@dataclass(frozen=True)
class Stage:
    """The router's store, and Redis as the adversary has it."""

    store: StateStore
    redis: Redis
    keys: RedisKeys
    open_as: Callable[[ClusterTrust], Any]

    def call_key(self, id: str) -> str:
        return self.keys.call(RequestId(id))

    def journal_key(self, id: str) -> str:
        return self.keys.journal(RequestId(id))

    async def tokens(self, id: str) -> list[int]:
        part = await self.store.read_journal(RequestId(id), 0, 0.0)
        return [token.token for token in part.tokens]
