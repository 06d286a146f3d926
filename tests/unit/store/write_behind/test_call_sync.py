"""A call with another end keeps all its other fields."""

from __future__ import annotations

from dataclasses import fields, replace

from baton.domain.ids import OwnerId, RequestId
from baton.store.store import CallRecord, CallStatus
from baton.store.write_behind.call_sync import changed_call

CALL = CallRecord(
    RequestId("c"), OwnerId("router-0/1"), 2, CallStatus.OPEN, "/v1/completions", b"{}", "tenant", 5, 7,
    (RequestId("c-0"), RequestId("c-1")), b"before", 9, True, "text", "prompt",
)  # fmt: skip


def test_a_changed_call_keeps_its_other_fields() -> None:
    assert all(getattr(CALL, each.name) != each.default for each in fields(CALL)), "each field has a value of its own"
    changed = changed_call(CALL, CallStatus.ABANDONED, b"trace", b"")
    assert changed == replace(CALL, status=CallStatus.ABANDONED, trace=b"trace", body=b"")
