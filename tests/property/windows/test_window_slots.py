"""Workers whose window parts lie in fewer slots than pages, in tiny worlds: nothing reads a slot that was given back.

A free slot is poisoned. The fake runner writes each slot of a page into its window part as well and reads it back in
the window of every row, so a window part that is freed too soon, or lost in a copy, fails the step that reads it.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from baton.domain.ids import PageId
from baton.engine.drafts.base import Drafter
from baton.kv.geometry import PageWindow
from baton.kv.page_digests import ABSENT_DIGEST, PART_BITS, PART_MASK, join_parts
from baton.kv.prefix_cache import PrefixCache
from baton.kv.windows.slots import NO_SLOT
from baton.transfer.base import Pull
from baton.transfer.digest import PoolHasher, page_digest
from tests import tiny_workers
from tests.property.drafts.drafters import AdversarialDrafter
from tests.property.drafts.test_drafts import right_tokens
from tests.property.machines.decode_machine import DecodeMachine
from tests.property.machines.prefill_machine import Case, PrefillMachine
from tests.property.machines.split_machine import SplitMachine
from tests.property.overlap.overlap_machine import OverlapMachine
from tests.tiny_workers import (
    PAGE_BYTES,
    PAGE_SIZE,
    REPEATABLE_SETTINGS,
    VOCAB_SIZE,
    page_bytes,
    true_digests,
)

SEEN: Counter[str] = Counter()
"""What happened in the worlds of one test."""


def note(cache: PrefixCache) -> None:
    """Notes what one world has seen."""
    windows = cache.pool.windows
    assert windows is not None
    SEEN["evicted"] += windows.num_evicted
    SEEN["unheld"] += windows.num_unheld


class WindowedPrefill(PrefillMachine):
    """Prefill beside scripted decode workers."""

    num_window_slots = 5

    @invariant()
    def window_parts_that_decode_reads_are_final(self) -> None:
        windowed = self.world.windowed
        assert windowed is not None
        for case in self.cases.values():
            for index, page in case.pages.items() if case.exported else ():
                if index >= tiny_workers.WINDOW.first_page(len(case.request.tokens)):
                    expected = page_bytes(case.request.tokens, index)
                    slot = windowed.slot_of[page]
                    assert slot != NO_SLOT
                    assert bytes(windowed.windows.page(slot)[: len(expected)]) == expected

    def teardown(self) -> None:
        super().teardown()
        note(self.world.cache)

    def _check_digests(
        self, case: Case, first_page: int, pages: tuple[PageId, ...], digests: tuple[int, ...] | None
    ) -> None:
        assert digests is not None
        for index, digest in enumerate(digests, first_page):
            expected = page_bytes(case.request.tokens, index)
            if len(expected) == PAGE_BYTES:
                alone, window = page_digest(memoryview(expected)), digest >> PART_BITS
                assert digest & PART_MASK == alone
                may_be_gone = index < tiny_workers.WINDOW.first_page(len(case.request.tokens))
                assert window == alone or (may_be_gone and window == ABSENT_DIGEST)


class WindowedDecode(DecodeMachine):
    """Decode beside a scripted prefill worker."""

    num_window_slots = 7

    def teardown(self) -> None:
        super().teardown()
        note(self.world.cache)

    def _true_digests(self, tokens: tuple[int, ...], first: int, end: int) -> tuple[int, ...]:
        return join_parts([one for one in true_digests(tokens, first, end) for _ in range(2)], 2)

    def _found(self, pull: Pull) -> tuple[int, ...]:
        assert self.world.windowed is not None
        return () if pull.num_parts is None else PoolHasher(self.world.windowed).digests(pull.local_pages)

    def _move_bytes(self, pull: Pull, corrupt: tuple[int, ...]) -> None:
        super()._move_bytes(pull, corrupt)
        windowed, case = self.world.windowed, self.cases_by_pull[pull.id]
        assert windowed is not None
        for at, (index, local) in enumerate(zip(pull.remote_pages, pull.local_pages, strict=True)):
            SEEN["whole" if pull.num_parts is None else "leading"] += 1
            if pull.num_parts is None:
                data = page_bytes(case.request.tokens, index)
                wrong = at in corrupt or case.pins_lost
                content = bytes(len(data)) if wrong else data
                windowed.windows.page(windowed.slot_of[local])[: len(data)] = content


class WindowedDrafts(WindowedDecode):
    """Rows have drafts, most of them refused; they end where the adversary likes."""

    num_window_slots = 12

    def _new_drafter(self) -> Drafter:
        self.drafter = AdversarialDrafter(lambda id: right_tokens(self.cases[id].request), VOCAB_SIZE)
        return self.drafter

    def teardown(self) -> None:
        super().teardown()
        SEEN["drafts"] += self.world.scheduler._drafts is not None and self.world.scheduler._drafts.totals.num_drafts


class WindowedOverlap(WindowedDecode, OverlapMachine):
    """One step is in flight while the next one is built, and reads the slots of when it was started."""

    num_window_slots = 12


class WindowedSplit(SplitMachine):
    """Both sides, and messages between them."""

    num_window_slots = 6

    def teardown(self) -> None:
        super().teardown()
        note(self.prefill.cache)
        note(self.decode.cache)


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


@pytest.fixture
def wider(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window over several pages: what it has passed and what it reaches differ by more than one."""
    monkeypatch.setattr(tiny_workers, "WINDOW", PageWindow(5, PAGE_SIZE, 1))


@pytest.mark.parametrize("num_slots", [4, 6, 8])
def test_prefill(num_slots: int):
    class Sized(WindowedPrefill):
        num_window_slots = num_slots

    run_state_machine_as_test(Sized, settings=settings(REPEATABLE_SETTINGS, max_examples=40))
    assert SEEN["unheld"] > 0
    assert SEEN["evicted"] > 0 or num_slots == 8


@pytest.mark.parametrize("num_slots", [4, 6, 8])
def test_decode(num_slots: int):
    class Sized(WindowedDecode):
        num_window_slots = num_slots

    run_state_machine_as_test(Sized, settings=settings(REPEATABLE_SETTINGS, max_examples=60))
    assert SEEN["leading"]
    assert SEEN["whole"]
    assert SEEN["evicted"] or num_slots > 5


def test_rows_with_drafts():
    run_state_machine_as_test(WindowedDrafts, settings=settings(REPEATABLE_SETTINGS, max_examples=40))
    assert SEEN["drafts"] > 0


@pytest.mark.parametrize("num_slots", [6, 8])
def test_a_step_in_flight_keeps_the_slots_that_it_reads(num_slots: int):
    class Sized(WindowedOverlap):
        num_window_slots = num_slots

    Sized.num_ahead = 0
    run_state_machine_as_test(Sized, settings=settings(REPEATABLE_SETTINGS, max_examples=60))
    assert Sized.num_ahead


def test_both_together() -> None:
    run_state_machine_as_test(WindowedSplit, settings=settings(REPEATABLE_SETTINGS, max_examples=60))
    assert SEEN["evicted"] > 0


@pytest.mark.usefixtures("wider")
@pytest.mark.parametrize("num_slots", [5, 8])
def test_prefill_under_a_wider_window(num_slots: int):
    test_prefill(num_slots)


@pytest.mark.usefixtures("wider")
@pytest.mark.parametrize("num_slots", [5, 8])
def test_decode_under_a_wider_window(num_slots: int):
    test_decode(num_slots)


@pytest.mark.usefixtures("wider")
def test_both_under_a_wider_window():
    test_both_together()
