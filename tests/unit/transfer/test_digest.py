"""Page digests: the algorithm, the order, and the detection of every flipped bit."""

import pytest
import xxhash

from baton.domain.ids import PageId
from baton.kv.memory import PageMemory, page_parts
from baton.kv.page_digests import join_parts, split_parts
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


def test_a_page_of_parts_has_one_digest_a_part():
    memory = PageMemory(2, 96, (16, 32, 96))
    memory.buffer[:] = bytes(range(192))
    first, second = digest_pages(memory, page_ids([1, 0]))
    for page, digest in ((1, first), (0, second)):
        parts = page_parts(memory.page(page), memory.part_ends)
        assert [len(part) for part in parts] == [16, 16, 64]
        assert split_parts([digest], 3) == [xxhash.xxh3_64_intdigest(bytes(part)) for part in parts]


def test_a_flipped_bit_changes_the_digest_of_its_part_alone():
    memory = PageMemory(1, 96, (16, 32, 96))
    before = split_parts(digest_pages(memory, page_ids([0])), 3)
    for byte, part in ((0, 0), (15, 0), (16, 1), (31, 1), (32, 2), (95, 2)):
        memory.page(0)[byte] ^= 1
        after = split_parts(digest_pages(memory, page_ids([0])), 3)
        assert [before[i] != after[i] for i in range(3)] == [i == part for i in range(3)]
        memory.page(0)[byte] ^= 1


def test_digests_of_parts_are_joined_page_by_page_and_split_again():
    parts = [1, 0, 2**64 - 1, 3, 4, 2**63]
    for num_parts in (1, 2, 3, 6):
        joined = join_parts(parts, num_parts)
        assert len(joined) == 6 // num_parts
        assert split_parts(joined, num_parts) == parts
    with pytest.raises(ValueError, match="6 digests are not 4 a page"):
        join_parts(parts, 4)


@pytest.mark.parametrize("part_ends", [(16,), (16, 97), (32, 16, 96), (16, 16, 96)])
def test_parts_that_do_not_make_up_a_page_are_refused(part_ends: tuple[int, ...]):
    with pytest.raises(ValueError, match="do not make up a page of 96 bytes"):
        PageMemory(2, 96, part_ends)
