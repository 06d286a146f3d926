"""Shared values and helpers of the contract tests. `conftest` has the fixtures that open stores."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

from baton.domain.ids import AttemptId, Incarnation, WorkerId
from baton.domain.request import OutputToken
from baton.domain.trust import ClusterTrust
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.store.options import StoreOptions
from baton.store.store import JournalEntry, StateStore

OpenStore = Callable[[StoreOptions], Awaitable[StateStore]]
DEADLINE_S = 10.0
TRUST = ClusterTrust(b"the secret of the contract tests")
RARE = StoreOptions(
    heartbeat_s=60.0, worker_ttl_s=60.0, owner_ttl_s=60.0, timeout_s=5.0
)  # only changes wake a listener
WORKER = WorkerRecord(
    WorkerId("decode-0"), WorkerRole.DECODE, Incarnation(2**63 - 1), "10.0.0.1:7", "tiny", "f00d", 16, 4096, 32000
)  # fmt: skip


@contextlib.asynccontextmanager
async def listening(store: StateStore) -> AsyncIterator[AsyncIterator[None]]:
    """`changes()` with a deadline over all of it, and a clean end."""
    async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(cast(AsyncGenerator[None], store.changes())) as changes:
        yield changes


def journal_entry(id: AttemptId, tokens: Sequence[OutputToken], **fields: Any) -> JournalEntry:
    """Builds the entry of consecutive tokens."""
    logprobs = tuple(token.logprobs for token in tokens)
    return JournalEntry(
        id,
        tokens[0].index if tokens else 0,
        tuple(token.token for token in tokens),
        logprobs=logprobs if any(logprobs) else (),
        **fields,
    )
