"""A file tier of a worker that had window slots and is started again without them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from baton.domain.ids import PageKey
from baton.engine.build import Engine
from baton.engine.tiers.start import TierFiles, open_file_tier, open_host_tier
from baton.kv.keys import KEY_BYTES
from baton.kv.memory import PageMemory
from baton.kv.page_digests import join_parts, without_window
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.tiers.tier import CacheTier, SlotEntry
from baton.settings.tiers import TierWrite
from baton.transfer.file_tier.index_log import IndexLog
from baton.transfer.file_tier.slot_file import FolderClaim

PART_ENDS = (4096, 8192)
KEYS = [PageKey(bytes([number]) * KEY_BYTES) for number in (1, 2, 3)]
(WHOLE,) = join_parts([11, 22], 2)
ABSENT = without_window(WHOLE, 2)


def engine(has_slots: bool) -> Engine:
    """What tiers depend on of an engine."""
    pool = PagePool(8)
    if has_slots:
        pool.add_window_slots(4, len(PART_ENDS))
    fingerprint, memory = SimpleNamespace(digest="pages"), PageMemory(8, PART_ENDS[-1], PART_ENDS)
    return cast(Engine, SimpleNamespace(memory=memory, cache=PrefixCache(pool), fingerprint=fingerprint))


def reads_back(tier: CacheTier) -> bool:
    """True if a page that was copied without its window part, and lies there with any other, is taken for intact."""
    slot = tier.begin_write(KEYS[2], None, ABSENT)
    assert slot is not None
    tier.end_write(KEYS[2], slot, ok=True)
    tier.begin_read(KEYS[2:])
    return tier.end_read(KEYS[2], slot, WHOLE) is not None


@pytest.mark.parametrize("has_slots", [True, False])
def test_copies_without_a_window_part_are_used_with_slots_only(tmp_path: Path, has_slots: bool):
    claim = FolderClaim(tmp_path, "pages")
    index = IndexLog(claim.path, PART_ENDS[-1], len(PART_ENDS))
    for slot, (key, parent, digest) in enumerate([(KEYS[0], None, WHOLE), (KEYS[1], KEYS[0], ABSENT)]):
        index.append(SlotEntry(slot, key, parent, digest))
    index.close()
    claim.close()
    files = TierFiles(tmp_path, 16 * PART_ENDS[-1], TierWrite.THROUGH)
    with ExitStack() as stack:
        controller, close = open_file_tier(files, engine(has_slots), lambda *_: 0.0, lambda: None)
        stack.callback(close)
        assert len(controller._tier) == (2 if has_slots else 1)
        assert reads_back(controller._tier) is has_slots
    assert reads_back(open_host_tier(1, TierWrite.BACK, engine(has_slots), lambda *_: 0.0)._tier) is has_slots
