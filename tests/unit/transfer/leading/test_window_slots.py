"""Reads from and into pools whose window parts have slots of their own, over every transport, with and without them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import pytest

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.kv.memory import PageMemory, PoolMemory, write_leading
from baton.kv.page_digests import ABSENT_DIGEST, PART_BITS
from baton.kv.page_tags import PURPOSE, PageTag, PoolTagger
from baton.kv.pages import Hold, PagePool
from baton.kv.windows.memory import WindowedMemory
from baton.transfer.base import Pull, PullOutcome, SourceInfo, region_of, window_region_of
from baton.transfer.digest import digest_pages, page_digest
from baton.transfer.fake import FakeFabric, FakePuller, FakeSource
from baton.transfer.puller import ThreadedPuller
from baton.transfer.stream.mover import StreamPuller
from baton.transfer.stream.source import PageEndpoint, StreamSource
from tests.unit.transfer.rigs import ENVIRONMENTS, TRUST, EventLog, needs_nixl, page_ids

PART_ENDS = (4096, 8192, 20480)
NUM_PAGES = 24
PREFILL, DECODE, INCARNATION = WorkerId("prefill-0"), WorkerId("decode-0"), Incarnation(7)


def random_pool(seed: int, with_slots: Sequence[int] | None) -> PoolMemory:
    """Pages of random bytes; only those `with_slots` have a window part, in a random slot. None: it is in the page."""
    dice = random.Random(seed)
    if with_slots is None:
        memory: PageMemory | WindowedMemory = PageMemory(NUM_PAGES, PART_ENDS[-1], PART_ENDS)
    else:
        memory = WindowedMemory.allocate(NUM_PAGES, NUM_PAGES, PART_ENDS)
        pool = PagePool(NUM_PAGES)
        slots = memory.join(pool)
        assert pool.allocate(NUM_PAGES, Hold.LIVE) is not None
        assert slots.take(page_ids(dice.sample(list(with_slots), len(with_slots))))
    memory.write(range(NUM_PAGES), [memoryview(dice.randbytes(PART_ENDS[-1])) for _ in range(NUM_PAGES)])
    return memory


@dataclass
class Pair:
    source: PoolMemory
    local: PoolMemory
    info: SourceInfo
    puller: ThreadedPuller
    events: EventLog

    def pull(self, remote: Sequence[int], local: Sequence[int], num_parts: int | None) -> Pull:
        remote_ids = page_ids(list(remote))
        windows: tuple[int, ...] = ()
        if num_parts is None and isinstance(self.source, WindowedMemory):
            windows = tuple(self.source.slot_of[page] for page in remote)
        key = TRUST.key(PURPOSE)
        assert key is not None
        identities = [bytes([page]) for page in remote]
        tags = PoolTagger(self.source, key, INCARNATION).tags(remote_ids, identities)
        pull = Pull(
            1, PREFILL, remote_ids, page_ids(list(local)), digest_pages(self.source, remote_ids), 20.0,
            [PageTag(*one) for one in zip(identities, tags, strict=True)], num_parts, windows,
        )  # fmt: skip
        self.puller.submit(pull)
        return pull


@pytest.fixture(params=[(True, True), (True, False), (False, True)], ids=["both", "source", "puller"])
def pools(request: pytest.FixtureRequest) -> tuple[PoolMemory, PoolMemory]:
    """Of the source, and of the puller."""
    at_source, at_puller = request.param
    source = random_pool(1, [3, 4, 5, 9, 20] if at_source else None)
    return source, random_pool(2, [0, 7, 8, 11] if at_puller else None)


@pytest.fixture(params=["fake", "stream", pytest.param("nixl", marks=needs_nixl)])
def pair(request: pytest.FixtureRequest, pools: tuple[PoolMemory, PoolMemory]) -> Iterator[Pair]:
    (source, local), events = pools, EventLog()
    region, windows = region_of(source), window_region_of(source)
    info = SourceInfo(
        PREFILL, INCARNATION, "127.0.0.1:9", request.param, b"", region.address, region.num_pages, region.page_bytes
    )
    if windows is not None:
        info = replace(
            info,
            window_base_address=windows.address,
            num_window_slots=windows.num_pages,
            window_bytes=windows.page_bytes,
        )
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENTS.get(request.param, {}).items():
            patch.setenv(name, value)
        if request.param == "fake":
            fabric = FakeFabric()
            giver = FakeSource(fabric, PREFILL, INCARNATION, source)
            puller: ThreadedPuller = FakePuller(fabric, local, events, TRUST)
            metadata = giver.metadata()
        elif request.param == "stream":
            stream = stack.enter_context(closing(StreamSource(INCARNATION, source, TRUST, PageEndpoint())))
            puller, metadata = StreamPuller(local, events, TRUST), stream.metadata()
        else:
            from baton.transfer.nixl import NixlPuller, NixlSource

            one = stack.enter_context(closing(NixlSource(PREFILL, INCARNATION, source, TRUST)))
            puller, metadata = NixlPuller(DECODE, Incarnation(8), local, events, TRUST), one.metadata()
        stack.enter_context(closing(puller))
        puller.connect(replace(info, metadata=metadata))
        yield Pair(source, local, info, puller, events)


def test_whole_pages_come_with_their_window_parts(pair: Pair) -> None:
    pull = pair.pull([9, 3, 20], [8, 0, 11], None)
    event = pair.events.terminal(pull)
    assert (event.outcome, event.reason) == (PullOutcome.DONE, "")
    assert pair.local.read([8, 0, 11]) == pair.source.read([9, 3, 20])


def test_leading_parts_come_without_the_rest(pair: Pair) -> None:
    """Into pages without a slot, whose window part is absent from their digests, and into one that has one."""
    before = [bytes(page) for page in pair.local.read([1, 2, 7])]
    pull = pair.pull([9, 15, 16], [1, 2, 7], 2)
    event = pair.events.terminal(pull)
    assert (event.outcome, event.reason) == (PullOutcome.DONE, "")
    edge, contents = PART_ENDS[1], pair.source.read([9, 15, 16])
    assert pair.local.read([1, 2, 7]) == [
        bytes(new[:edge]) + old[edge:] for new, old in zip(contents, before, strict=True)
    ]
    assert event.found == digest_pages(pair.local, page_ids([1, 2, 7]))
    if isinstance(pair.local, WindowedMemory):
        assert [found >> 2 * PART_BITS == ABSENT_DIGEST for found in event.found] == [True, True, False]


def test_damage_in_a_window_part_is_found(pair: Pair) -> None:
    pull = pair.pull([3, 4], [0, 7], None)
    assert pair.events.terminal(pull).outcome is PullOutcome.DONE
    source, digests = pair.source, digest_pages(pair.source, page_ids([3, 4]))
    (content,) = source.read([4])
    damaged = bytearray(content)
    damaged[-1] ^= 1
    source.write([4], [memoryview(damaged)])
    again = replace(pull, id=2, digests=digests, tags=None)
    pair.puller.submit(again)
    event = pair.events.terminal(again)
    assert (event.outcome, event.corrupt) == (PullOutcome.CORRUPT, (1,))


def test_a_slot_outside_the_source_is_refused(pair: Pair) -> None:
    pull = replace(pair.pull([3], [0], None), id=2, remote_windows=(NUM_PAGES,))
    pair.puller.submit(pull)
    event = pair.events.terminal(pull)
    assert event.outcome is PullOutcome.FAILED
    assert "window slots" in event.reason


@pytest.mark.parametrize("window_bytes", [1, PART_ENDS[1], PART_ENDS[-1], 1 << 63])
def test_window_parts_of_another_size_are_refused(pair: Pair, window_bytes: int) -> None:
    info = replace(pair.info, page_bytes=max(0, PART_ENDS[-1] - window_bytes), window_bytes=window_bytes)
    with pytest.raises(LinkBroken, match=r"window parts of|pages of"):
        pair.puller.connect(info)
    assert pair.events.terminal(pair.pull([9], [8], None)).outcome is PullOutcome.DONE, "the old link is as it was"


@needs_nixl
def test_a_worker_whose_pages_have_one_part_links_to_none_with_slots() -> None:
    from baton.transfer.nixl import NixlPuller

    memory = PageMemory(NUM_PAGES, PART_ENDS[-1])
    with closing(NixlPuller(DECODE, Incarnation(8), memory, EventLog(), TRUST)) as puller:
        info = SourceInfo(PREFILL, INCARNATION, "127.0.0.1:9", "nixl", b"", 0, NUM_PAGES, PART_ENDS[1])
        with pytest.raises(LinkBroken, match="which is no part here"):
            puller.connect(replace(info, num_window_slots=8, window_bytes=PART_ENDS[-1] - PART_ENDS[1]))


def test_pages_of_one_part_are_hashed_without_being_cut() -> None:
    class Whole(PageMemory):
        def parts(self, pages: Sequence[int]) -> list[list[memoryview]]:
            raise AssertionError("a list a page, for nothing")

    memory = Whole(4, 4096)
    memory.page(1)[:] = random.Random(5).randbytes(4096)
    assert digest_pages(memory, page_ids([1, 0])) == tuple(page_digest(memory.page(page)) for page in (1, 0))


def test_leading_bytes_are_written_in_place() -> None:
    memory = random_pool(3, [0])
    content = memoryview(random.Random(4).randbytes(PART_ENDS[1]))
    window = bytes(memory.read([0])[0][PART_ENDS[1] :])
    write_leading(memory, [0], [content])
    assert memory.read([0]) == [bytes(content) + window]
