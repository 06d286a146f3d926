"""A router claims no call of another tokenizer, also when a client asks for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.domain.ids import OwnerId, RequestId
from baton.store.store import CallRecord, CallStatus
from services.router.takeover.takeover import TakeoverContext, Takeovers


@pytest.mark.parametrize(
    ("ours", "theirs", "claimed"),
    [("ours", "theirs", False), ("ours", "ours", True), ("ours", "", True), ("", "theirs", True)],
)
def test_only_calls_of_the_own_tokenizer_are_claimed(ours: str, theirs: str, claimed: bool):
    claims: list[RequestId] = []

    async def claim_call(id: RequestId, *_: object, **__: object) -> None:
        claims.append(id)

    ownership = SimpleNamespace(owner=OwnerId("r/1"), owner_tag=1, holds=lambda id: False)
    context: Any = SimpleNamespace(
        store=SimpleNamespace(claim_call=claim_call),
        call_ownership=ownership,
        text=SimpleNamespace(digest=ours),
        patience_s=2.0,
    )
    record = CallRecord(
        RequestId("c"), OwnerId("r/0"), 1, CallStatus.ABANDONED, "/", b"{}", "", 0, 0, (), text_digest=theirs
    )
    takeovers = Takeovers(cast(TakeoverContext, context))

    async def follow() -> None:
        takeovers.add_reader(record.id, record, None)
        assert not await takeovers.attend(record.id, record)

    asyncio.run(follow())
    assert claims == ([record.id] if claimed else [])
