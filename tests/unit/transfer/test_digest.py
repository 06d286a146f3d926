"""Page digests: the algorithm, the order, and the detection of every flipped bit."""

import pytest
import xxhash

from baton.domain.ids import PageId
from baton.transfer.digest import digest_pages, mismatches, page_digest
from tests.unit.transfer.rigs import page_ids
from tests.unit.transfer.source_process import filled_memory


def test_the_algorithm_is_xxh3_64():
    assert page_digest(memoryview(b"")) == 0x2D06800538D394C2  # the published value for the empty input


def test_digests_follow_the_order_of_the_pages():
    memory = filled_memory(4, 1000, seed=1)
    digests = digest_pages(memory, page_ids([2, 0, 2]))
    assert digests == tuple(xxhash.xxh3_64_intdigest(bytes(memory.page(page))) for page in (2, 0, 2))
    assert digests[0] != digests[1]


def test_every_flipped_bit_is_found_at_its_position():
    memory = filled_memory(3, 64, seed=2)
    pages = page_ids([1, 2, 0])
    digests = digest_pages(memory, pages)
    assert mismatches(memory, pages, digests) == []
    for bit in range(64 * 8):
        memory.page(2)[bit // 8] ^= 1 << bit % 8
        assert mismatches(memory, pages, digests) == [1]
        memory.page(2)[bit // 8] ^= 1 << bit % 8


def test_a_page_outside_the_pool_is_refused():
    with pytest.raises(IndexError):
        digest_pages(filled_memory(1, 8, seed=3), [PageId(1)])
