"""The view of several routers: their requests together, within bounds, and word of every one that is missing."""

from __future__ import annotations

import math

import msgspec
import pytest

from baton.domain.ids import OwnerId
from baton.services.router.cluster.peers.peer_routers import SILENT_S
from baton.services.router.cluster.peers.share import MAX_SHARED_ENDS, RouterShare, SharedRow, encode_share
from baton.services.router.cluster.snapshot import MAX_EVENTS, MAX_RECENT, MAX_REQUESTS, ClusterEvent, RouterRow
from baton.services.router.cluster.view import MAX_FOREIGN_EVENTS
from baton.store.views.view_store import MAX_VIEW_BYTES, StoredView
from baton.telemetry.request_trace import Outcome
from tests.unit.router.cluster.peers.views import UNIX_S, ViewWorld, open_request


@pytest.fixture
def own() -> ViewWorld:
    return ViewWorld("a")


@pytest.fixture
def other() -> ViewWorld:
    return ViewWorld("b")


def statuses(world: ViewWorld) -> dict[str, str]:
    return {row.id: row.status for row in world.view.snapshot().routers}


def listed(world: ViewWorld, tenant: str | None = None) -> list[tuple[str, str]]:
    return [(row.id, row.router) for row in world.view.snapshot(tenant).requests]


def test_requests_counts_ends_and_events_of_all_routers_are_one_view(own: ViewWorld, other: ViewWorld):
    own.open, other.open = [open_request("1")], [open_request("2"), open_request("3")]
    own.end("4")
    other.now += 5
    other.end("5", Outcome.FAILED)
    own.now += 10
    own.view.take_peers([other.stored()])
    snapshot = own.view.snapshot()
    assert listed(own) == [("1", "a"), ("2", "b"), ("3", "b")]
    assert (snapshot.num_requests, snapshot.counts["decoding"]) == (3, 3)
    assert [row.id for row in snapshot.routers] == ["a", "b"]
    assert [row.open for row in snapshot.routers] == [1, 2]
    assert [(row.id, row.router) for row in snapshot.recent] == [("5", "b"), ("4", "a")], "newest first"
    assert [(event.kind, event.request, event.router) for event in snapshot.events] == [("failed", "5", "b")]
    assert (snapshot.window.requests, snapshot.window.failed, snapshot.window.error_ratio) == (2, 1, 0.5)


def test_a_quantile_is_that_of_all_requests_together(own: ViewWorld, other: ViewWorld):
    window = other.view._window_now(other.now)
    slow = msgspec.structs.replace(window, requests=3, ttft_us=[9_000_000, 8_000_000, 7_000_000])
    own.view.take_peers([other.stored(window=slow)])
    assert own.view.snapshot().window.ttft_p95_ms == 9000.0


def test_events_and_ends_of_a_router_are_told_once(own: ViewWorld, other: ViewWorld):
    other.end("5", Outcome.FAILED)
    own.view.take_peers([other.stored()])
    seq, count = own.view.events.last_seq, own.view.ends.count
    own.view.take_peers([other.stored()])
    assert (own.view.events.after(seq), own.view.ends.after(count, None)) == ([], [])
    other.end("6", Outcome.FAILED)
    own.view.take_peers([other.stored()])
    assert [event.request for event in own.view.events.after(seq)] == ["6"]
    assert [row.id for row in own.view.ends.after(count, None)] == ["6"]


def test_what_a_router_told_is_no_news_after_the_store_was_away(own: ViewWorld, other: ViewWorld):
    other.end("5", Outcome.FAILED)
    old = other.stored()
    own.view.take_peers([old])
    seq, count = own.view.events.last_seq, own.view.ends.count
    own.view.take_peers([])
    assert statuses(own) == {"a": "ready"}
    own.view.take_peers([old])
    assert statuses(own)["b"] == "unread", "an old share, played again"
    own.view.take_peers([other.stored()])
    assert (own.view.events.after(seq), own.view.ends.after(count, None)) == ([], [])
    assert statuses(own) == {"a": "ready", "b": "ready"}


def test_a_tenant_sees_its_requests_on_all_routers_and_no_others(own: ViewWorld, other: ViewWorld):
    other.open = [open_request("1", "red"), open_request("2", "blue")]
    for id, tenant in (("3", "red"), ("4", "blue")):
        other.end(id, Outcome.FAILED, tenant=tenant)
    own.view.take_peers([other.stored()])
    snapshot = own.view.snapshot("red")
    assert listed(own, "red") == [("1", "b")]
    assert snapshot.num_requests == 1
    assert [row.id for row in snapshot.recent] == ["3"]
    assert [event.request for event in snapshot.events] == ["3"]


def test_nothing_of_a_private_call_is_shared_but_its_number(other: ViewWorld):
    other.open = [open_request("secret-open", private=True), open_request("shown")]
    other.end("secret-end", Outcome.FAILED, private=True)
    other.end("shown-end", Outcome.FAILED)
    data = other.view.share()
    assert b"secret" not in data
    assert b"shown" in data
    assert b"shown-end" in data
    assert decoded(other).num_requests == 2


def test_a_router_that_hangs_is_named_and_its_requests_are_gone(own: ViewWorld, other: ViewWorld):
    own.open, other.open = [open_request("1")], [open_request("2")]
    hung = other.stored()
    own.view.take_peers([hung])
    assert listed(own) == [("1", "a"), ("2", "b")]
    for _ in range(5):
        own.now += SILENT_S / 4
        own.view.take_peers([hung])
    assert listed(own) == [("1", "a")], "the same share again is no sign of life"
    assert own.view.snapshot().routers[1] == RouterRow("b", "silent")
    assert own.view.snapshot().num_requests == 1
    own.view.take_peers([other.stored()])
    assert statuses(own) == {"a": "ready", "b": "ready"}


def test_an_old_share_played_again_does_not_come_back(own: ViewWorld, other: ViewWorld):
    other.open = [open_request("old")]
    old = other.stored()
    other.open = [open_request("new")]
    own.view.take_peers([other.stored()])
    own.view.take_peers([old])
    assert listed(own) == [("new", "b")]


def test_a_router_is_unread_until_it_shares_and_silent_when_it_does_not(own: ViewWorld, other: ViewWorld):
    present = StoredView(other.owner, 0.0)
    for _ in range(9):
        own.view.take_peers([present], watching=False)
        own.now += 1.0
    own.view.take_peers([present], watching=False)
    assert statuses(own)["b"] == "unread"
    own.now += SILENT_S
    own.view.take_peers([present])
    assert statuses(own)["b"] == "silent"
    own.view.take_peers([])
    assert statuses(own) == {"a": "ready"}, "one that left is not missing"


def test_a_router_that_was_started_again_is_shown_once(own: ViewWorld, other: ViewWorld):
    dead = StoredView(OwnerId("b/0"), 20.0)
    self_before = StoredView(OwnerId("a/0"), 20.0)
    own.view.take_peers([dead, self_before, other.stored()])
    assert statuses(own) == {"a": "ready", "b": "ready"}


def decoded(world: ViewWorld) -> RouterShare:
    return msgspec.msgpack.decode(world.view.share(), type=RouterShare)


def lies(share: RouterShare):
    row, window = share.row, share.window
    change = msgspec.structs.replace
    yield "nan", {"row": change(row, output_tok_s=math.nan)}
    yield "infinite", {"window": change(window, output_tok_s=math.inf)}
    yield "negative", {"window": change(window, failed=-1)}
    yield "absent", {"row": RouterRow("b", "ready")}
    yield "huge", {"num_requests": 10**18}
    yield "other buckets", {"window": change(window, itl_counts=[1, 2, 3])}
    yield "too many", {"window": change(window, ttft_us=[1] * 4097)}
    yield "unknown status", {"row": change(row, status="silent")}
    yield "unknown state", {"counts": {"finished": 3}}
    yield "another version", {"v": 99}


@pytest.mark.parametrize("lie", [name for name, _ in lies(decoded(ViewWorld("b")))])
def test_a_router_that_lies_loses_its_own_rows_only(own: ViewWorld, other: ViewWorld, lie: str):
    honest = ViewWorld("c")
    own.open, other.open, honest.open = [open_request("1")], [open_request("2")], [open_request("3")]
    changes = dict(lies(decoded(other)))[lie]
    own.view.take_peers([other.stored(**changes), honest.stored()])
    assert listed(own) == [("1", "a"), ("3", "c")]
    assert statuses(own) == {"a": "ready", "b": "unreadable", "c": "ready"}
    assert own.view.snapshot().window.error_ratio == 0.0


@pytest.mark.parametrize("data", [b"\xc1", b"\x00", b"\x93\x01\x02\x03", b"[]"])
def test_bytes_that_are_no_share_are_named(own: ViewWorld, other: ViewWorld, data: bytes):
    own.view.take_peers([StoredView(other.owner, 0.0, data)])
    assert statuses(own)["b"] == "unreadable"


def test_a_router_cannot_speak_for_another_one_nor_push_out_its_rows(own: ViewWorld, other: ViewWorld):
    """It floods all lists, under another router's name, from the future."""
    own.open = [open_request(f"own-{n}") for n in range(MAX_REQUESTS)]
    own.end("own-end", Outcome.FAILED)
    future_ms = round(1000 * (UNIX_S + 10**6))
    row = SharedRow("", msgspec.structs.replace(_row(other), router="a"))
    events = [ClusterEvent(n, future_ms, "lost", "fatal", "x" * 10**3, worker="w", router="a") for n in range(1, 100)]
    other.end("flood", Outcome.FAILED)
    end = other.view.ends.shared()[0]
    forged = msgspec.structs.replace(end.row, at_ms=future_ms, router="a")
    ends = [msgspec.structs.replace(end, number=n, row=forged) for n in range(1, 500)]
    own.now += 1
    own.view.take_peers([other.stored(rows=[row] * 1000, events=events, ends=ends)])
    snapshot = own.view.snapshot()
    assert len(snapshot.requests) == MAX_REQUESTS
    assert sum(row.router == "a" for row in snapshot.requests) == MAX_REQUESTS // 2
    assert "own-end" in [row.id for row in snapshot.recent]
    assert len(snapshot.recent) == MAX_RECENT
    assert max(row.at_ms for row in snapshot.recent) <= snapshot.now_ms
    assert "own-end" in [event.request for event in snapshot.events]
    foreign = [event for event in snapshot.events if event.router == "b"]
    assert len(foreign) == MAX_FOREIGN_EVENTS < MAX_EVENTS
    assert {(event.level, event.worker, len(event.text)) for event in foreign} == {("info", "", 240)}
    assert len(own.view.ends.foreign(None)) == MAX_SHARED_ENDS


def test_a_share_fits_whatever_it_holds(other: ViewWorld):
    other.open = [open_request(f"{n:0250d}") for n in range(MAX_REQUESTS)]
    for n in range(80):
        other.end(f"{n:0250d}", Outcome.FAILED)
    assert len(other.view.share()) <= MAX_VIEW_BYTES
    whole = decoded(other)
    least = msgspec.msgpack.decode(encode_share(whole, 600), type=RouterShare)
    assert (least.rows, least.num_requests) == ([], MAX_REQUESTS), "totals count what is left out"


def _row(world: ViewWorld):
    world.open = [open_request("x")]
    return decoded(world).rows[0].row
