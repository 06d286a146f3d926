"""Page memory: zeroed, addressed by page, readable at its address."""

from __future__ import annotations

import ctypes

import pytest

from baton.kv.memory import PageMemory


def test_pages_lie_at_their_address():
    memory = PageMemory(3, 8)
    assert bytes(memory.buffer) == bytes(24)
    memory.page(2)[:] = b"abcdefgh"
    assert ctypes.string_at(memory.address + 2 * 8, 8) == b"abcdefgh"
    assert bytes(memory.page(1)) == bytes(8)


@pytest.mark.parametrize("page", [-1, 3])
def test_a_page_outside_the_pool_is_refused(page: int):
    with pytest.raises(IndexError):
        PageMemory(3, 8).page(page)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_an_empty_pool_is_refused(shape: tuple[int, int]):
    with pytest.raises(ValueError, match="needs pages"):
        PageMemory(*shape)
