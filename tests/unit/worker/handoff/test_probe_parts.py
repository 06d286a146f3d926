"""A probe of a link reads whole pages, unless window parts may be without a slot here or there."""

from __future__ import annotations

import pytest

from baton.domain.fingerprint import Fingerprint
from baton.domain.ids import Incarnation, WorkerId
from baton.transfer.base import SourceInfo
from baton.worker.handoff.links import LinkIdentity


@pytest.mark.parametrize(
    ("num_leading_parts", "has_slots_here", "window_bytes", "wanted"),
    [(2, False, 0, None), (2, True, 0, 2), (2, False, 64, 2), (2, True, 64, 2), (None, False, 0, None)],
)
def test_leading_parts_are_read_where_slots_are(
    num_leading_parts: int | None, has_slots_here: bool, window_bytes: int, wanted: int | None
):
    identity = LinkIdentity(
        WorkerId("decode-0"), Incarnation(1), "m", Fingerprint(()), 256, 1.0,
        num_leading_parts=num_leading_parts, has_window_slots=has_slots_here,
    )  # fmt: skip
    source = SourceInfo(
        WorkerId("prefill-0"), Incarnation(2), "a:1", "stream", b"", 0, 8, 256 - window_bytes, window_bytes=window_bytes
    )
    assert identity.probe_parts(source) == wanted
