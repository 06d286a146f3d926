"""Shared values and helpers of the contract tests. `conftest` has the fixtures that open stores."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from baton.domain.ids import AttemptId
from baton.domain.request import OutputToken
from baton.domain.trust import ClusterTrust
from baton.store.options import StoreOptions
from baton.store.store import JournalEntry, StateStore

OpenStore = Callable[[StoreOptions], Awaitable[StateStore]]
DEADLINE_S = 10.0
TRUST = ClusterTrust(b"the secret of the contract tests")
RARE = StoreOptions(
    heartbeat_s=60.0, worker_ttl_s=60.0, owner_ttl_s=60.0, timeout_s=5.0
)  # only changes wake a listener


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
