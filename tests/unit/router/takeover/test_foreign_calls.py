"""A router claims no call of another tokenizer, also when a client asks for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.domain.ids import OwnerId, RequestId
from baton.services.router.edge.http_errors import ForeignCall, error_response
from baton.services.router.streaming.sse_stream import HEADER_GRACE_S
from baton.services.router.takeover.takeover import FOREIGN_WAIT_S, TakeoverContext, Takeovers
from baton.store.store import CallRecord, CallStatus

RECORD = CallRecord(RequestId("c"), OwnerId("r/0"), 1, CallStatus.ABANDONED, "/", b"{}", "", 0, 0, ())


def made(ours: str, claims: list[RequestId], later: CallStatus = CallStatus.OPEN) -> Takeovers:
    """Takeovers of a router with the tokenizer `ours`. `later`: the status of the call in the store."""

    async def claim_call(id: RequestId, *_: object, **__: object) -> None:
        claims.append(id)

    async def get_call(id: RequestId) -> CallRecord:
        return replace(RECORD, status=later)

    context: Any = SimpleNamespace(
        store=SimpleNamespace(claim_call=claim_call, get_call=get_call),
        call_ownership=SimpleNamespace(owner=OwnerId("r/1"), owner_tag=1, holds=lambda id: False),
        text=SimpleNamespace(digest=ours),
        patience_s=2.0,
    )
    return Takeovers(cast(TakeoverContext, context))


@pytest.mark.parametrize(
    ("ours", "theirs", "claimed"),
    [("ours", "theirs", False), ("ours", "ours", True), ("ours", "", True), ("", "theirs", True)],
)
def test_only_calls_of_the_own_tokenizer_are_claimed(ours: str, theirs: str, claimed: bool):
    claims: list[RequestId] = []
    takeovers, record = made(ours, claims), replace(RECORD, text_digest=theirs)

    async def follow() -> None:
        takeovers.add_reader(record.id, record, None)
        assert not await takeovers.attend(record.id, record)

    asyncio.run(follow())
    assert claims == ([record.id] if claimed else [])


async def attended(status: CallStatus, later: CallStatus) -> bool:
    """The answer to a reader that finds the call in a status, and a moment later in another one."""
    takeovers, record = made("ours", [], later), replace(RECORD, text_digest="theirs", status=status)
    takeovers.add_reader(record.id, record, None)
    return await takeovers.attend(record.id, record)


async def test_an_abandoned_call_of_another_tokenizer_ends_with_503():
    with pytest.raises(ForeignCall) as raised:
        await attended(CallStatus.ABANDONED, CallStatus.ABANDONED)
    assert FOREIGN_WAIT_S < HEADER_GRACE_S, "a status, not an event"
    response = error_response(raised.value)
    assert (response.status, response.body.code) == (503, "other_tokenizer")
    assert response.headers["retry-after"] == "1"


async def test_a_call_of_another_tokenizer_that_is_answered_is_followed():
    assert not await attended(CallStatus.OPEN, CallStatus.OPEN)
    assert not await attended(CallStatus.ABANDONED, CallStatus.OPEN), "a router of its tokenizer has claimed it"
    assert await attended(CallStatus.ENDED, CallStatus.ENDED)
