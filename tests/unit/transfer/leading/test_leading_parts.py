"""Reads of the leading parts of pages, over every transport: what arrives, what stays, and what is compared."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from baton.domain.ids import Incarnation
from baton.kv.memory import PageMemory
from baton.kv.page_tags import PURPOSE, PageTag, PoolTagger
from baton.rpc.gen import handoff_pb2
from baton.transfer.base import PullOutcome
from baton.transfer.digest import digest_pages, page_digest
from baton.transfer.stream import page_wire
from baton.transfer.stream.source import StreamSource
from tests.contract.test_transfer import NUM_PAGES, PAGE_BYTES, SEED, Side, new_side, spec
from tests.unit.transfer import test_page_connections as connections
from tests.unit.transfer.rigs import ENVIRONMENTS, TRUST, Rig, RunningSource, needs_nixl, page_ids
from tests.unit.transfer.source_process import filled_memory

PART_ENDS = (4096, PAGE_BYTES // 2 + 64, PAGE_BYTES)


@pytest.fixture(scope="module")
def expected() -> PageMemory:
    return filled_memory(NUM_PAGES, PAGE_BYTES, SEED)


@pytest.fixture(
    scope="module",
    params=["fake-staged", "stream", "stream-staged", "stream-calls", pytest.param("nixl", marks=needs_nixl)],
)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENTS.get(request.param, {}).items():
            patch.setenv(name, value)
        rig = Rig(request.param)
        try:
            yield rig
        finally:
            rig.close()


@pytest.fixture(scope="module")
def source(rig: Rig) -> RunningSource:
    return rig.source(spec())


@pytest.fixture
def parted(rig: Rig, source: RunningSource) -> Iterator[Side]:
    """A puller whose pages have three parts."""
    side = new_side(rig, PART_ENDS)
    side.puller.connect(source.info)
    try:
        yield side
        side.events.assert_orderly()
    finally:
        side.puller.close()


def test_leading_parts_come_without_the_rest(parted: Side, expected: PageMemory) -> None:
    """Of many pages, more than one message or post has. What is behind them stays as it was."""
    dice = random.Random(9)
    remote, local = (dice.sample(range(NUM_PAGES), 100) for _ in range(2))
    assert parted.events.terminal(parted.pull(range(100), local)).outcome is PullOutcome.DONE
    digests = tuple(page_digest(expected.page(page), PART_ENDS) for page in remote)
    event = parted.events.terminal(parted.pull(remote, local, digests, num_parts=2))
    assert (event.outcome, event.reason, event.num_bytes) == (PullOutcome.DONE, "", 100 * PART_ENDS[1])
    for at, (there, here) in enumerate(zip(remote, local, strict=True)):
        content = bytes(expected.page(there)[: PART_ENDS[1]]) + bytes(expected.page(at)[PART_ENDS[1] :])
        assert parted.memory.read([here]) == [content]
        assert event.found[at] == page_digest(memoryview(content), PART_ENDS)


def test_only_the_leading_parts_that_are_read_are_compared(
    source: RunningSource, parted: Side, expected: PageMemory
) -> None:
    key = TRUST.key(PURPOSE)
    assert key is not None
    copy = PageMemory(NUM_PAGES, PAGE_BYTES, PART_ENDS)
    copy.buffer[:] = expected.buffer
    pages, identities = page_ids(range(20)), [bytes([page]) for page in range(20)]
    tags = [
        PageTag(*one)
        for one in zip(identities, PoolTagger(copy, key, Incarnation(1)).tags(pages, identities), strict=True)
    ]
    digests = digest_pages(copy, pages)
    flips = [(3, PAGE_BYTES - 1), (7, PART_ENDS[1] - 1)]
    for flip in flips:
        source.flip(*flip)
    try:
        by_digest = parted.events.terminal(parted.pull(pages, pages, digests, num_parts=2))
        by_tag = parted.events.terminal(parted.pull(pages, pages, None, tags=tags, num_parts=2))
    finally:
        for flip in flips:
            source.flip(*flip)
    for event in (by_digest, by_tag):
        assert (event.outcome, event.corrupt) == (PullOutcome.CORRUPT, (7,))
    assert (len(by_digest.found), by_tag.found) == (20, ())


def test_more_bytes_than_a_page_has_are_refused() -> None:
    """They would be the next page's, or lie behind the pool."""
    memory = filled_memory(connections.NUM_PAGES, connections.PAGE_BYTES, seed=3)
    incarnation = connections.INCARNATION
    served = StreamSource(incarnation, memory, connections.TRUST)
    try:
        for extra, refused in ((0, False), (1, True)):
            body = handoff_pb2.ReadPagesRequest(
                incarnation=incarnation, pages=[1], leading_bytes=memory.page_bytes + extra
            ).SerializeToString()
            with connections.connected(served) as connection:
                message = page_wire.MAGIC + connections.token(body) + body
                kind, content = connections.answer(connection, message)
                assert (kind == page_wire.REFUSED) == refused
                assert (b"a page has" in content) == refused
    finally:
        served.close()
