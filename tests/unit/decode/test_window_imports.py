"""Imports of pages with a window part: what is read of each page, what it settles with, and who may go on behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.errors import IntegrityFailure
from baton.domain.ids import AttemptId
from baton.kv.geometry import PageWindow
from baton.services.decode.kv_import import ProofKind, Reserved
from baton.transfer.base import Pull, PullEvent, PullOutcome
from tests.tiny_workers import PAGE_SIZE, engine_request
from tests.unit.decode.test_import_table import ID, KEYS, REQUEST, SOURCE, ImportDriver

WINDOW = PageWindow(3, PAGE_SIZE, 2)
"""Behind 7 tokens the next one reads keys 5 and 6: pages from the third on."""


class WindowDriver(ImportDriver):
    """An import table over pages with a window part."""

    def __init__(self) -> None:
        super().__init__()
        self.cache.window = WINDOW
        self.imports.limits = replace(self.imports.limits, window=WINDOW)

    def land(self, pull: Pull, outcome: PullOutcome = PullOutcome.DONE, *corrupt: int) -> list[Pull]:
        """Ends a read; each page has the digest 1000 + its number here."""
        found = () if pull.num_parts is None else tuple(1000 + page for page in pull.local_pages)
        event = PullEvent(pull, outcome, 64, 0.1, "", corrupt, found)
        return self.imports.on_pull_event(event, 2.0)

    def import_all(self) -> None:
        pulls = self.chunk(0, 4)
        while pulls:
            pulls += self.land(pulls.pop())


def test_pages_before_the_window_are_read_without_their_window_part():
    driver = WindowDriver()
    driver.claim()
    (first,) = driver.chunk(0, 4)
    (second,) = driver.land(first)
    assert [(list(pull.remote_pages), pull.num_parts) for pull in (first, second)] == [
        ([100, 101], 2),
        ([102, 103], None),
    ]
    kv_import = driver.imports.get(ID)
    assert kv_import is not None
    assert kv_import.table.windowless(4) == [0, 1]


def test_a_read_never_mixes_pages_with_and_without_their_window_part():
    driver = WindowDriver()
    driver.imports.limits = replace(driver.imports.limits, max_window_pages=4)
    driver.claim()
    pulls = driver.chunk(0, 1) + driver.chunk(0, 4)
    pulls += driver.land(pulls[0])
    pulls += driver.land(pulls[1])
    assert [(list(pull.remote_pages), pull.num_parts) for pull in pulls] == [([100], 2), ([101], 2), ([102, 103], None)]


@pytest.mark.parametrize("num_tokens", range(1, 40))
def test_every_page_is_read_once(num_tokens: int):
    limits, num_pages = WindowDriver().imports.limits, -(-num_tokens // PAGE_SIZE)
    reads = [(page, parts) for pages, parts in limits.reads(0, num_pages, num_tokens) for page in pages]
    edge = max(0, num_tokens - WINDOW.num_tokens + 1) // PAGE_SIZE
    assert reads == [(page, 2 if page < edge else None) for page in range(num_pages)]
    assert [page for pages, _ in limits.reads(1, num_pages, num_tokens) for page in pages] == list(range(1, num_pages))


def test_a_page_settles_with_the_digest_that_it_has_here():
    """With the announced one, its own check would take the page for damaged."""
    driver = WindowDriver()
    driver.claim()
    driver.import_all()
    kv_import = driver.imports.get(ID)
    assert kv_import is not None
    pages, digests = kv_import.table.pages, driver.cache.pool.digests
    assert [digests.digest(page) for page in pages[:3]] == [1000 + pages[0], 1000 + pages[1], 7]


def test_a_wrong_page_is_read_again_without_its_window_part():
    driver = WindowDriver()
    driver.claim()
    (pull,) = driver.chunk(0, 2)
    (again,) = driver.land(pull, PullOutcome.CORRUPT, 1)
    assert (again.remote_pages, again.local_pages, again.num_parts) == ((101,), pull.local_pages[1:], 2)
    assert again.digests == (7,)
    with pytest.raises(IntegrityFailure, match="twice"):
        driver.land(again, PullOutcome.CORRUPT, 0)


def imported() -> WindowDriver:
    """An import that has ended; its row has ended as well."""
    driver = WindowDriver()
    driver.claim()
    driver.import_all()
    driver.seal()
    driver.imports.commit(ID, ProofKind.DIGESTS, 4.0).table.release()
    return driver


@pytest.mark.parametrize(
    ("computes_prompt", "num_tokens", "prefix_len"),
    [(False, 7, 6), (True, 7, 6), (False, 5, 2), (True, 5, 0), (False, 6, 4), (True, 6, 0)],
)
def test_the_cached_prefix_serves_those_who_do_not_read_its_windows(
    computes_prompt: bool, num_tokens: int, prefix_len: int
):
    """After 7 tokens pages 0 and 1 have no window part.

    A prompt of 5 that is imported reads keys from 3 on, in page 1; one of 6 from 4 on, in page 2. One that is computed
    behind 4 cached tokens reads keys 2 and 3.
    """
    driver = imported()
    again = AttemptId(ID.request_id, 2)
    reserved = driver.imports.reserve(again, num_tokens, KEYS, 0, 5.0, 5.0, computes_prompt)
    assert isinstance(reserved, Reserved)
    assert reserved.prefix_len == prefix_len


def test_a_prompt_is_not_computed_behind_a_prefix_without_its_windows():
    """Its reservation was made for an import. It is refused like one that has ended, and the router reserves anew."""
    driver = imported()
    request = engine_request("r", list(REQUEST.tokens[:6]), attempt=2)
    reserved = driver.imports.reserve(request.id, 6, KEYS, 0, 5.0, 5.0)
    assert isinstance(reserved, Reserved)
    assert reserved.prefix_len == 4
    assert driver.imports.claim_local(reserved.id, request) is None
    assert driver.imports.claim(reserved.id, request, SOURCE, 9.0), "it is still good for an import"


def test_nothing_changes_for_pages_without_a_window_part():
    driver = ImportDriver(max_window_pages=4)
    driver.claim()
    (pull,) = driver.chunk(0, 4)
    assert (len(pull.remote_pages), pull.num_parts) == (4, None)
