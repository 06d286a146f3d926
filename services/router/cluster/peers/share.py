"""What one router tells the others of its requests: values, codec and bounds. Pure; no text of a request.

A share is untrusted input: `decode_share` returns only what is within the bounds of this router's own view.
"""

from __future__ import annotations

import math

import msgspec

from baton.domain.lifecycle import RequestState
from baton.services.router.cluster.snapshot import (
    MAX_EVENTS,
    MAX_REQUESTS,
    ClusterEvent,
    OpenRequestRow,
    RecentRequest,
    RouterRow,
)
from baton.services.router.cluster.window import MAX_REQUESTS as MAX_WINDOW_REQUESTS
from baton.services.router.cluster.window import WindowTotals

VERSION = 1
MAX_SHARED_ENDS = 64
MAX_NAME_CHARS = 256
MAX_NUMBER = 10**15
_STATES = frozenset(state.value for state in RequestState if not state.terminal)
_STATUSES = frozenset({"ready", "draining"})


class ShareUnreadable(Exception):
    """A share that must not be shown; the text says why."""


class SharedRow(msgspec.Struct, frozen=True, array_like=True):
    """An open sequence of `tenant`."""

    tenant: str
    row: OpenRequestRow


class SharedEnd(msgspec.Struct, frozen=True, array_like=True):
    """A request of `tenant` that ended. `number` counts those of its router."""

    number: int
    tenant: str
    row: RecentRequest


class RouterShare(msgspec.Struct, frozen=True, array_like=True):
    """One router's view of its own requests. `number` grows by one a share. Lists are bounded; totals count all."""

    v: int
    number: int
    row: RouterRow
    counts: dict[str, int]
    num_requests: int
    window: WindowTotals
    rows: list[SharedRow]
    ends: list[SharedEnd]
    events: list[ClusterEvent]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RouterShare).decode


def encode_share(share: RouterShare, max_bytes: int) -> bytes:
    """msgpack of at most `max_bytes`: what does not fit is left out, rows first, then ends and events."""
    data = _encode(share)
    while len(data) > max_bytes:
        rows, ends, events = share.rows[: len(share.rows) // 2], share.ends, share.events
        if not share.rows:
            ends, events = ends[(len(ends) + 1) // 2 :], events[(len(events) + 1) // 2 :]
        window = share.window
        if not (share.rows or share.ends or share.events):
            window = msgspec.structs.replace(window, ttft_us=window.ttft_us[(len(window.ttft_us) + 1) // 2 :])
        share = msgspec.structs.replace(share, rows=rows, ends=ends, events=events, window=window)
        data = _encode(share)
    return data


def decode_share(data: bytes, router: str, num_itl_buckets: int) -> RouterShare:
    """A share of `router`, which is the name that its rows get. Raises `ShareUnreadable`."""
    try:
        share = _decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ShareUnreadable(f"another version's form: {error}") from None
    if share.v != VERSION:
        raise ShareUnreadable(f"version {share.v}, not {VERSION}")
    window = share.window
    figures: list[float | None] = [share.number, share.num_requests, *share.counts.values()]
    figures += [window.requests, window.failed, window.refused, window.replayed, window.output_tok_s]
    figures += [*window.ttft_us, *window.itl_counts]
    figures += [share.row.open, share.row.queued, share.row.queued_tokens, share.row.output_tok_s]
    if not all(number is not None and math.isfinite(number) and 0 <= number <= MAX_NUMBER for number in figures):
        raise ShareUnreadable("a number is out of its bounds")
    if len(window.ttft_us) > MAX_WINDOW_REQUESTS or len(window.itl_counts) not in (0, num_itl_buckets):
        raise ShareUnreadable("the window has another form")
    if share.row.status not in _STATUSES or not share.counts.keys() <= _STATES:
        raise ShareUnreadable("a state is unknown")
    return msgspec.structs.replace(
        share,
        row=msgspec.structs.replace(share.row, id=router),
        rows=[_row_of(router, each) for each in share.rows[:MAX_REQUESTS] if _is_shown(each)],
        ends=[_end_of(router, each) for each in share.ends[-MAX_SHARED_ENDS:]],
        events=share.events[-MAX_EVENTS:],
    )


def _is_shown(shared: SharedRow) -> bool:
    row = shared.row
    return row.state in _STATES and max(map(len, (row.id, row.prefill, row.decode))) <= MAX_NAME_CHARS


def _row_of(router: str, shared: SharedRow) -> SharedRow:
    return SharedRow(shared.tenant, msgspec.structs.replace(shared.row, router=router))


def _end_of(router: str, shared: SharedEnd) -> SharedEnd:
    return SharedEnd(shared.number, shared.tenant, msgspec.structs.replace(shared.row, router=router))
