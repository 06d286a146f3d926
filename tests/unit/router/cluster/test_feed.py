"""The feed: frames for all viewers at once, a snapshot for one that is too slow, nothing without viewers."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest

from baton.domain.lifecycle import RequestState
from baton.services.router.cluster import feed as feed_module
from baton.services.router.cluster.feed import MAX_VIEWERS, ClusterFeed, TooManyViewers
from baton.services.router.cluster.snapshot import MAX_REQUESTS, MAX_WORKERS, ClusterSnapshot
from baton.services.router.cluster.source import KnownWorker, OpenRequest, RouterLoad
from baton.services.router.cluster.view import ClusterView, ViewIdentity
from baton.telemetry.request_traces import RequestTraces
from tests.unit.router.cluster.worker_records import known, record

TIMEOUT_S = 10.0
MAX_FRAME_BYTES = 64 * 1024


class FakeSource:
    """A router whose state the test sets."""

    def __init__(self) -> None:
        self.known: list[KnownWorker] = [known(record("prefill-0", 1))]
        self.open: list[OpenRequest] = []

    def workers(self):
        return self.known

    def breakers(self):
        return {}

    def requests(self):
        return self.open

    def load(self) -> RouterLoad:
        return RouterLoad(len(self.open), 0, 0, 0, False)

    def degraded(self) -> tuple[str, ...]:
        return ()


class CountedView(ClusterView):
    """Counts the snapshots that are built."""

    num_builds = 0

    def snapshot(self, tenant: str | None = None) -> ClusterSnapshot:
        self.num_builds += 1
        return super().snapshot(tenant)


def open_request(n: int, tenant: str = "") -> OpenRequest:
    id = f"chatcmpl-{n:024x}"
    return OpenRequest(id, id, tenant, RequestState.DECODING, "prefill-0", "decode-0", 8000, 512, 900 + n, 12.5, 1)


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
async def feed(source: FakeSource):
    view = ClusterView(ViewIdentity("r", "m", "1"), source, RequestTraces("r", "m"))
    made = ClusterFeed(view, interval_s=0.01)
    yield made
    await made.close()


def parts(message: bytes) -> list[tuple[str, dict]]:
    """Kind and content of each event in a message."""
    events = [block.split("\n") for block in message.decode().strip().split("\n\n")]
    return [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in events]


async def read(messages) -> list[tuple[str, dict]]:
    async with asyncio.timeout(TIMEOUT_S):
        return parts(await anext(messages))


async def test_a_frame_holds_only_the_parts_that_changed(feed: ClusterFeed, source: FakeSource):
    async with aclosing(feed.follow(None)) as messages:
        [(kind, first)] = await read(messages)
        assert (kind, first["requests"]) == ("snapshot", [])
        while not any("workers" in content for kind, content in await read(messages) if kind == "snapshot"):
            pass  # the snapshot of the first frame
        source.open = [open_request(1)]
        while True:
            frames = [content for kind, content in await read(messages) if kind == "frame" and "requests" in content]
            if frames:
                break
        assert frames[0].keys() == {"now_ms", "routers", "counts", "num_requests", "requests"}
        assert frames[0]["requests"][0][:3] == [open_request(1).id, "r", "decoding"]


async def test_a_slow_viewer_gets_a_snapshot_and_not_a_queue(feed: ClusterFeed, source: FakeSource):
    async with aclosing(feed.follow(None)) as slow, aclosing(feed.follow(None)) as quick:
        await read(slow), await read(quick)
        for n in range(20):
            source.open = [open_request(n)]
            seen = 0
            while seen != n:
                rows = [c["requests"] for _, c in await read(quick) if c.get("requests")]
                seen = rows[-1][0][7] - 900 if rows else seen
        [(kind, content)] = await read(slow)
        assert kind == "snapshot"
        assert content["requests"][0][7] == 919, "the newest state, not the oldest frame"


async def test_snapshots_and_frames_are_built_once_for_all(source: FakeSource):
    now, view = [100.0], CountedView(ViewIdentity("r", "m", "1"), source, RequestTraces("r", "m"))
    feed = ClusterFeed(view, interval_s=60.0, clock=lambda: now[0])  # its task makes no frame in this test
    async with aclosing(feed.follow(None)) as one, aclosing(feed.follow(None)) as two:
        await read(one), await read(two)
        feed.snapshot(None)
        assert view.num_builds == 1, "viewers and readers that poll share one snapshot an interval"
        now[0] += 60.0
        feed.snapshot(None), feed.snapshot(None)
        assert view.num_builds == 2, "the next interval has its own"
        feed._send(feed_module._FeedState(view))
        assert await read(one) == await read(two)
        assert view.num_builds == 3, "viewers share a frame"
    await feed.close()


async def test_a_viewer_that_joins_behind_a_frame_misses_nothing(source: FakeSource):
    """Its first snapshot, shared for an interval, is older than the last frame."""
    view = ClusterView(ViewIdentity("r", "m", "1"), source, RequestTraces("r", "m"))
    feed = ClusterFeed(view, interval_s=60.0)  # its task makes no frame in this test
    async with aclosing(feed.follow(None)) as first:
        await read(first)
        frames = feed_module._FeedState(view)
        feed._send(frames)
        view.events.add("joined", "good", "told before")
        feed._send(frames)
        async with aclosing(feed.follow(None)) as second:
            assert await shown_after(second, []) == []
            feed._send(frames)
            assert await shown_after(second, []) == ["told before"]
    await feed.close()


async def test_a_viewer_that_joins_before_a_frame_is_told_once(source: FakeSource):
    """Its first snapshot is newer than the last frame."""
    now, view = [100.0], ClusterView(ViewIdentity("r", "m", "1"), source, RequestTraces("r", "m"))
    feed = ClusterFeed(view, interval_s=10.0, clock=lambda: now[0])  # nor here
    async with aclosing(feed.follow(None)) as first:
        await read(first)
        frames = feed_module._FeedState(view)
        feed._send(frames)
        view.events.add("joined", "good", "in both")
        now[0] += 10.0
        async with aclosing(feed.follow(None)) as second:
            shown = await shown_after(second, [])
            assert shown == ["in both"]
            feed._send(frames)
            assert await shown_after(second, shown) == ["in both"]
    await feed.close()


async def shown_after(messages, shown: list[str]) -> list[str]:
    """Texts of the events that a page shows after the next message."""
    for kind, content in await read(messages):
        if kind == "snapshot":
            shown = [event["text"] for event in content["events"]]
        elif kind == "event":
            shown = [*shown, content["text"]]
    return shown


async def test_frames_are_made_only_for_viewers(feed: ClusterFeed):
    assert not feed.running
    async with aclosing(feed.follow(None)) as viewer:
        await read(viewer)
        task = feed._task
        assert task is not None
    await asyncio.wait_for(task, TIMEOUT_S)
    assert not feed.running, "no viewer, no work"


async def test_places_are_bounded_and_given_back(feed: ClusterFeed):
    viewers = [feed.follow(None) for _ in range(MAX_VIEWERS)]
    for viewer in viewers:
        await read(viewer)
    with pytest.raises(TooManyViewers):
        await anext(feed.follow(None))
    await viewers.pop().aclose()
    viewers.append(feed.follow(None))
    await read(viewers[-1])
    assert feed.num_viewers == MAX_VIEWERS
    for viewer in viewers:
        await viewer.aclose()


async def test_closing_ends_every_viewer(feed: ClusterFeed):
    messages = feed.follow(None)
    await read(messages)
    await feed.close()
    async with asyncio.timeout(TIMEOUT_S):
        rest = [message async for message in messages]
    assert len(rest) <= 1


async def test_a_frame_of_a_large_cluster_is_bounded(feed: ClusterFeed, source: FakeSource):
    source.known = [known(record(f"decode-{n:03}", n)) for n in range(1, 4 * MAX_WORKERS)]
    source.open = [open_request(n) for n in range(3000)]
    snapshot = json.loads(feed.snapshot(None))
    assert (len(snapshot["requests"]), len(snapshot["workers"])) == (MAX_REQUESTS, MAX_WORKERS)
    assert (snapshot["num_requests"], snapshot["num_workers"]) == (3000, 4 * MAX_WORKERS - 1)
    assert snapshot["counts"]["decoding"] == 3000
    assert len(feed.snapshot(None)) < MAX_FRAME_BYTES


async def test_a_frame_that_fails_is_skipped(feed: ClusterFeed, source: FakeSource, monkeypatch: pytest.MonkeyPatch):
    async with aclosing(feed.follow(None)) as messages:
        await read(messages)
        monkeypatch.setattr(source, "breakers", lambda: 1 / 0)
        await asyncio.sleep(0.05)  # several frames that fail: no wait for anything
        monkeypatch.undo()
        source.open = [open_request(7)]
        while not any(content.get("requests") for _, content in await read(messages)):
            pass
    assert feed_module.FRAME_INTERVAL_S == 0.25
