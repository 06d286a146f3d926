"""The contract of `baton.transfer.base`, checked against the fake, the stream and NIXL.

Sources of `stream` and `nixl` run in their own processes; `nixl` copies through CMA if the kernel allows it. "Staged":
the puller's pages are accessed like GPU memory (see `tests.staged_memory`), the source's pages are not.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.kv.memory import PageMemory, PoolMemory
from baton.kv.page_tags import PURPOSE, PageTag, PoolTagger
from baton.transfer.base import Pull, PullOutcome
from baton.transfer.digest import digest_pages
from baton.transfer.probe import probe_bandwidth
from baton.transfer.puller import ThreadedPuller
from tests.unit.transfer.rigs import ENVIRONMENTS, TRUST, WAIT_S, EventLog, Rig, RunningSource, needs_nixl, page_ids
from tests.unit.transfer.source_process import SourceSpec, filled_memory

pytestmark = pytest.mark.slow

NUM_PAGES = 256
PAGE_BYTES = 64 * 1024
SEED = 20
PREFILL = WorkerId("prefill-0")
LONG_S = 20.0


@dataclass
class Side:
    """A puller with its pool and its events."""

    puller: ThreadedPuller
    memory: PoolMemory
    events: EventLog
    pulls: list[Pull] = field(default_factory=list)

    def pull(self, remote, local, digests=None, deadline_s=LONG_S, source=PREFILL, tags=None, num_parts=None) -> Pull:
        pull = Pull(len(self.pulls), source, page_ids(remote), page_ids(local), digests, deadline_s, tags, num_parts)
        self.pulls.append(pull)
        self.puller.submit(pull)
        return pull


@pytest.fixture(
    scope="module",
    params=[
        *("fake", "fake-staged", "stream", "stream-staged", "stream-calls"),
        *(pytest.param(name, marks=needs_nixl) for name in ("nixl", "nixl-staged", "nixl-tcp")),
    ],
)
def kind(request) -> Iterator[str]:
    """Name of a transport. UCX reads `UCX_TLS` for each agent, so one process can test both kinds of NIXL."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENTS.get(request.param, {}).items():
            patch.setenv(name, value)
        yield request.param


@pytest.fixture(scope="module")
def shared(kind) -> Iterator[tuple[Rig, RunningSource]]:
    """A source for tests that leave it intact."""
    rig = Rig(kind)
    try:
        yield rig, rig.source(spec())
    finally:
        rig.close()


@pytest.fixture(scope="module")
def expected() -> PageMemory:
    return filled_memory(NUM_PAGES, PAGE_BYTES, SEED)


@pytest.fixture
def rig(kind) -> Iterator[Rig]:
    """Starts sources that a test kills."""
    rig = Rig(kind)
    try:
        yield rig
    finally:
        rig.close()


def spec(incarnation: int = 1) -> SourceSpec:
    return SourceSpec("", PREFILL, Incarnation(incarnation), NUM_PAGES, PAGE_BYTES, SEED, {})


def new_side(rig: Rig, part_ends: tuple[int, ...] = ()) -> Side:
    memory, events = rig.memory(NUM_PAGES, PAGE_BYTES, part_ends), EventLog()
    return Side(rig.puller(memory, events), memory, events)


@pytest.fixture
def side(shared) -> Iterator[Side]:
    """A puller linked to the shared source."""
    rig, source = shared
    side = new_side(rig)
    side.puller.connect(source.info)
    try:
        yield side
        side.events.assert_orderly()
    finally:
        side.puller.close()


def same(side: Side, expected: PageMemory, pull: Pull) -> bool:
    pairs = zip(pull.remote_pages, pull.local_pages, strict=True)
    return all(side.memory.read([local]) == [expected.page(remote)] for remote, local in pairs)


def test_bytes_arrive_in_the_pages_asked_for(side, expected):
    dice = random.Random(1)
    for num_pages in (1, 2, 15, 16, 17, 100, NUM_PAGES):
        remote, local = (dice.sample(range(NUM_PAGES), num_pages) for _ in range(2))
        pull = side.pull(remote, local, digest_pages(expected, page_ids(remote)))
        event = side.events.terminal(pull)
        assert (event.outcome, event.reason) == (PullOutcome.DONE, "")
        assert event.num_bytes == num_pages * PAGE_BYTES
        assert 0 < event.seconds < LONG_S
        assert same(side, expected, pull)


def test_other_pages_stay_untouched(side):
    pull = side.pull([3, 4], [10, 20])
    assert side.events.terminal(pull).outcome is PullOutcome.DONE
    zero = bytes(PAGE_BYTES)
    assert [page for page in range(NUM_PAGES) if side.memory.read([page]) != [zero]] == [10, 20]


def test_many_pulls_at_once(side, expected):
    remote, local = (random.Random(seed).sample(range(NUM_PAGES), NUM_PAGES) for seed in (2, 3))
    parts = [slice(start, start + 4) for start in range(0, NUM_PAGES, 4)]
    pulls = [side.pull(remote[part], local[part], digest_pages(expected, page_ids(remote[part]))) for part in parts]
    assert {side.events.terminal(pull).outcome for pull in pulls} == {PullOutcome.DONE}
    assert all(same(side, expected, pull) for pull in pulls)


def test_any_thread_may_submit(side, expected):
    def submit(first: int) -> None:
        side.pull(range(first, first + 8), range(first, first + 8))

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(0, 64, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(side.pulls) == 8
    assert {side.events.terminal(pull).outcome for pull in side.pulls} == {PullOutcome.DONE}
    assert all(same(side, expected, pull) for pull in side.pulls)


def test_a_flipped_bit_is_found_and_named(shared, side, expected):
    _, source = shared
    remote = random.Random(4).sample(range(NUM_PAGES), 40)
    digests = digest_pages(expected, page_ids(remote))
    source.flip(remote[33], PAGE_BYTES - 1)
    try:
        event = side.events.terminal(side.pull(remote, range(40), digests))
    finally:
        source.flip(remote[33], PAGE_BYTES - 1)
    assert (event.outcome, event.corrupt) == (PullOutcome.CORRUPT, (33,))
    assert side.events.terminal(side.pull(remote, range(40), digests)).outcome is PullOutcome.DONE


def test_a_tag_authenticates_bytes_and_identity(shared, side, expected):
    """A forger who can compute digests cannot make a tag, and a valid tag fits its own page only."""
    _, source = shared
    pages, identities = page_ids(range(20)), [bytes([page]) for page in range(20)]
    key = TRUST.key(PURPOSE)
    assert key is not None
    made = PoolTagger(expected, key, Incarnation(1)).tags(pages, identities)
    tags = [PageTag(*one) for one in zip(identities, made, strict=True)]
    assert side.events.terminal(side.pull(pages, pages, None, tags=tags)).outcome is PullOutcome.DONE
    replayed = [*tags[:7], replace(tags[7], identity=identities[8]), *tags[8:]]
    event = side.events.terminal(side.pull(pages, pages, digest_pages(expected, pages), tags=replayed))
    assert (event.outcome, event.corrupt) == (PullOutcome.CORRUPT, (7,))
    forged = PageMemory(NUM_PAGES, PAGE_BYTES)
    forged.buffer[:] = expected.buffer
    forged.page(11)[5] ^= 1
    source.flip(11, 5)
    try:
        event = side.events.terminal(side.pull(pages, pages, digest_pages(forged, pages), tags=tags))
    finally:
        source.flip(11, 5)
    assert (event.outcome, event.corrupt) == (PullOutcome.CORRUPT, (11,))


def test_an_unknown_source_is_a_failure(side):
    event = side.events.terminal(side.pull([0], [0], source=WorkerId("nobody")))
    assert event.outcome is PullOutcome.FAILED
    assert "nobody" in event.reason


@pytest.mark.parametrize(
    ("remote", "local", "digests"),
    [([NUM_PAGES], [0], None), ([0], [NUM_PAGES], None), ([0, 1], [0], None), ([0], [0], (1, 2))],
    ids=["remote page", "local page", "lengths", "digests"],
)
def test_an_impossible_pull_is_a_failure_and_harms_no_other(side, remote, local, digests):
    wrong, right = side.pull(remote, local, digests), side.pull([0], [1])
    assert side.events.terminal(wrong).outcome is PullOutcome.FAILED
    assert side.events.terminal(right).outcome is PullOutcome.DONE


def test_an_empty_pull_is_done(side):
    event = side.events.terminal(side.pull([], [], ()))
    assert (event.outcome, event.num_bytes) == (PullOutcome.DONE, 0)


def test_a_source_of_another_shape_is_refused(shared, side):
    _, source = shared
    with pytest.raises(LinkBroken, match="pages of 4096 bytes"):
        side.puller.connect(replace(source.info, page_bytes=4096))
    with pytest.raises(LinkBroken, match="speaks pigeon"):
        side.puller.connect(replace(source.info, transport="pigeon"))
    assert side.events.terminal(side.pull([0], [0])).outcome is PullOutcome.DONE


def test_disconnect_lets_reads_end_and_can_be_repeated(shared, side, expected):
    _, source = shared
    before = side.pull(range(NUM_PAGES), range(NUM_PAGES))
    side.puller.disconnect(PREFILL)
    side.puller.disconnect(PREFILL)
    side.puller.disconnect(WorkerId("nobody"))
    after = side.pull([0], [0])
    assert side.events.terminal(after).outcome is PullOutcome.FAILED
    assert side.events.terminal(before).outcome is PullOutcome.DONE
    assert same(side, expected, before)
    side.puller.connect(source.info)
    assert side.events.terminal(side.pull([0], [0])).outcome is PullOutcome.DONE


def test_reconnecting_during_a_read(shared, side, expected):
    _, source = shared
    pulls = [side.pull(range(NUM_PAGES), range(NUM_PAGES)) for _ in range(4)]
    side.puller.connect(source.info)
    assert {side.events.terminal(pull).outcome for pull in pulls} == {PullOutcome.DONE}
    assert side.events.terminal(side.pull([1], [0])).outcome is PullOutcome.DONE


def test_close_ends_every_thread_and_can_be_repeated(shared):
    rig, source = shared
    before = set(threading.enumerate())
    side = new_side(rig)
    side.puller.connect(source.info)
    side.pull(range(NUM_PAGES), range(NUM_PAGES))
    side.puller.close()
    side.puller.close()
    for thread in set(threading.enumerate()) - before:  # gRPC's own threads are stopped but not joined
        assert not thread.name.startswith("baton")
        thread.join(WAIT_S)
        assert not thread.is_alive()
    told = len(side.events.of(side.pulls[0]))
    side.pull([0], [0])
    side.puller.disconnect(PREFILL)
    assert len(side.events.of(side.pulls[0])) == told
    assert side.events.of(side.pulls[1]) == []
    with pytest.raises(LinkBroken, match="closed"):
        side.puller.connect(source.info)


def test_the_probe_measures_real_bytes(shared, side):
    _, source = shared
    free = threading.Event()
    num_bytes, seconds = probe_bandwidth(side.puller, source.info, page_ids(range(32)), 32, on_pages_free=free.set)
    assert num_bytes in [pages * PAGE_BYTES for pages in range(1, 33)]  # as many as the measurement took
    assert 0 < seconds < LONG_S
    assert free.is_set()


def test_a_source_that_died_before_the_first_read(rig):
    source, side = rig.source(spec()), new_side(rig)
    source.kill()
    free = threading.Event()
    try:
        side.puller.connect(source.info)
    except LinkBroken:
        return  # even better
    event = side.events.terminal(side.pull(range(8), range(8)))
    assert event.outcome is PullOutcome.FAILED
    assert event.seconds < 5.0
    with pytest.raises(LinkBroken):
        probe_bandwidth(side.puller, source.info, page_ids([0]), 1, on_pages_free=free.set)
    assert free.is_set()


def test_a_source_killed_while_idle_comes_back_as_another_incarnation(rig, expected):
    source, side = rig.source(spec()), new_side(rig)
    side.puller.connect(source.info)
    assert side.events.terminal(side.pull([0], [0])).outcome is PullOutcome.DONE
    source.kill()
    event = side.events.terminal(side.pull(range(8), range(8)))
    assert event.outcome is PullOutcome.FAILED
    assert event.seconds < 5.0
    side.puller.connect(rig.source(spec(incarnation=2)).info)
    pull = side.pull(range(8), range(8), digest_pages(expected, page_ids(range(8))))
    assert side.events.terminal(pull).outcome is PullOutcome.DONE
    side.events.assert_orderly()


def test_a_source_killed_during_a_pull_fails_it(rig, expected):
    source, side = rig.source(spec()), new_side(rig)
    side.puller.connect(source.info)
    digests = digest_pages(expected, page_ids(range(NUM_PAGES)))
    pulls = [side.pull(range(NUM_PAGES), range(NUM_PAGES), digests) for _ in range(60)]
    side.events.terminal(pulls[0])
    source.kill()
    outcomes = [side.events.terminal(pull).outcome for pull in pulls]
    assert set(outcomes) <= {PullOutcome.DONE, PullOutcome.FAILED}
    assert outcomes[0] is PullOutcome.DONE
    if rig.transport != "fake":  # one turn copies everything
        assert outcomes[-1] is PullOutcome.FAILED
    side.puller.connect(rig.source(spec(incarnation=2)).info)
    assert side.events.terminal(side.pull([5], [6])).outcome is PullOutcome.DONE
    side.events.assert_orderly()


def test_a_pull_from_a_stopped_source_ends_when_the_source_goes_on(rig, expected):
    source, side = rig.source(spec()), new_side(rig)
    side.puller.connect(source.info)
    assert side.events.terminal(side.pull([0], [0])).outcome is PullOutcome.DONE
    source.pause()
    pull = side.pull(range(NUM_PAGES), range(NUM_PAGES), deadline_s=0.3)
    first = side.events.first(pull)
    if rig.name in ("nixl", "nixl-staged") and first.outcome is PullOutcome.DONE:
        assert first.seconds <= 0.3  # over CMA the kernel copies; the source need not run
    else:
        assert first.outcome is PullOutcome.LATE
        assert first.seconds >= 0.3
    source.resume()
    assert side.events.terminal(pull).outcome in {PullOutcome.FAILED, first.outcome}
    again = side.pull([7], [8])
    assert side.events.terminal(again).outcome is PullOutcome.DONE
    assert same(side, expected, again)
    side.events.assert_orderly()


def test_a_stopped_source_holds_up_no_other(rig):
    stopped, side = rig.source(spec()), new_side(rig)
    other = rig.source(replace(spec(), worker_id=WorkerId("prefill-1")))
    for source in (stopped, other):
        side.puller.connect(source.info)
        probe_bandwidth(side.puller, source.info, page_ids([0]), 1, on_pages_free=lambda: None)
    stopped.pause()
    stuck = [side.pull(range(NUM_PAGES), range(NUM_PAGES), deadline_s=0.2) for _ in range(8)]
    assert {side.events.first(pull).outcome for pull in stuck} <= {PullOutcome.LATE, PullOutcome.DONE}
    event = side.events.terminal(side.pull([1], [2], source=WorkerId("prefill-1")))
    assert event.outcome is PullOutcome.DONE
    stopped.resume()
    assert all(side.events.terminal(pull).outcome in {PullOutcome.FAILED, PullOutcome.DONE} for pull in stuck)
    side.events.assert_orderly()


def test_closing_while_a_source_hangs_is_quick(rig):
    source, side = rig.source(spec()), new_side(rig)
    side.puller.connect(source.info)
    assert side.events.terminal(side.pull([0], [0])).outcome is PullOutcome.DONE
    source.pause()
    stuck = side.pull(range(NUM_PAGES), range(NUM_PAGES), deadline_s=0.1)
    side.events.first(stuck)
    started = time.monotonic()
    side.puller.close()
    assert time.monotonic() - started < LONG_S
    if rig.name == "nixl-tcp":
        # UCX aborts a process that wakes up to a queued read of a vanished reader; a supervisor restarts it.
        source.kill()
        return
    source.resume()
    other = new_side(rig)
    other.puller.connect(source.info)
    assert other.events.terminal(other.pull([1], [2])).outcome is PullOutcome.DONE
