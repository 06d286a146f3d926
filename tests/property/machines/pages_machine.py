"""State machine of settled pages in a pool of eight, while any byte of any page may flip at any time.

A page's bytes are computed from its tokens and from the bytes of the page before it, as KV is: damage spreads to what
is computed later, whose digests are then good. The rules keep the true bytes apart and check D1-D6 of
`docs/protocol.md`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.domain.ids import PageId
from baton.kv.keys import page_keys
from baton.kv.page_checks import PageChecks, Scrubber
from baton.kv.page_digests import PageState
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, Owner, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.quarantine import Quarantine
from baton.transfer.digest import PoolHasher, page_digest
from simulation.runtime.page_memory import SimMemory
from tests.tiny_workers import NUM_PAGES, PAGE_SIZE, check_invariants

PAGE_BYTES = 16
TOKENS = st.lists(st.integers(0, 1), min_size=PAGE_SIZE, max_size=4 * PAGE_SIZE + 1)


def next_page(before: bytes, tokens: list[int]) -> bytes:
    """Bytes of the page of `tokens` after the page `before`. The top bit of each byte is clear; a flip sets it."""
    seed = zlib.crc32(bytes(tokens), zlib.crc32(before))
    return bytes((seed >> (i % 24)) & 0x7F for i in range(PAGE_BYTES))


def true_pages(tokens: list[int]) -> list[bytes]:
    """Bytes of all full pages of `tokens`, computed without damage."""
    pages, before = [], b""
    for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        before = next_page(before, tokens[start : start + PAGE_SIZE])
        pages.append(before)
    return pages


@dataclass
class Prompt:
    """A prompt in progress and the digests that were announced of its pages."""

    table: PageTable
    tokens: list[int]
    num_filled: int
    announced: dict[PageId, int] = field(default_factory=dict)


class PagesMachine(RuleBasedStateMachine):
    """Rules are prompts, the scrubber and damage. Subclasses may replace the classes by broken ones."""

    prefix_cache: type[PrefixCache] = PrefixCache
    page_checks: type[PageChecks] = PageChecks

    def __init__(self) -> None:
        super().__init__()
        self.memory = SimMemory(NUM_PAGES, PAGE_BYTES)
        self.cache = self.prefix_cache(PagePool(NUM_PAGES), PoolHasher(self.memory))
        self.digests = self.cache.pool.digests
        self.checks = self.page_checks(self.cache)
        self.scrubber = Scrubber(self.checks, PAGE_BYTES)
        self.quarantine = Quarantine(self.cache)
        self.now = 0.0
        self.prompts: list[Prompt] = []
        self.settled: dict[PageId, int] = {}  # what the digests were when they were taken

    # -- prompts

    @rule(tokens=TOKENS)
    def come(self, tokens: list[int]) -> None:
        table = PageTable(self.cache, PAGE_SIZE, "", Hold.LIVE)
        num_matched = table.match_checked(page_keys(tokens[:-1], PAGE_SIZE, ""), self.checks, self.quarantine, self.now)
        self._end_tainted()
        for index, page in enumerate(table.pages):
            assert self.digests.is_settled(page), "D4: a condemned page was matched"
            assert page_digest(self.memory.page(page)) == self.digests.digest(page), "D5: an unchecked page is used"
            assert bytes(self.memory.page(page)) == true_pages(tokens)[index], "D6: computed from a wrong page"
        if not table.extend(len(tokens)):
            table.release()
            return
        self.prompts.append(Prompt(table, tokens, num_matched))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), num_pages=st.integers(1, 3))
    def compute(self, data: st.DataObject, num_pages: int) -> None:
        """One step: computes pages on top of the memory as it is, and settles them."""
        prompt = data.draw(st.sampled_from(self.prompts))
        end = min(len(prompt.tokens), (prompt.num_filled // PAGE_SIZE + num_pages) * PAGE_SIZE)
        for index in range(prompt.num_filled // PAGE_SIZE, end // PAGE_SIZE):
            before = bytes(self.memory.page(prompt.table.pages[index - 1])) if index else b""
            tokens = prompt.tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
            self.memory.page(prompt.table.pages[index])[:] = next_page(before, tokens)
        prompt.num_filled = end
        prompt.table.cache_full_pages(prompt.tokens, end)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from(self.prompts))
        for page in prompt.table.pages[: prompt.num_filled // PAGE_SIZE]:
            prompt.announced.setdefault(page, self.announce(page))

    def announce(self, page: PageId) -> int:
        """The digest that a publish carries. Raises `Broken` for a condemned page (D4)."""
        return self.digests.digest(page)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from(self.prompts))
        self.prompts.remove(prompt)
        prompt.table.release()

    # -- damage, checks and the clock

    @rule(data=st.data(), offset=st.integers(0, PAGE_BYTES - 1))
    def flip(self, data: st.DataObject, offset: int) -> None:
        settled = [page for page in range(NUM_PAGES) if self._is_settled(page)]
        page = data.draw(st.sampled_from(settled or range(NUM_PAGES)))
        self.memory.page(page)[offset] |= 0x80

    @rule(dt=st.sampled_from([1.0, 700.0, 4000.0]), busy=st.booleans())
    def scrub(self, dt: float, busy: bool) -> None:
        self.now += dt
        wrong = self.scrubber.run_slice(self.now, busy=busy)
        self.quarantine.add_pages(wrong, self.now)
        self._end_tainted()
        if self.scrubber.num_rounds and dt > 600.0:
            for page in map(PageId, range(NUM_PAGES)):
                kept = self.digests.digest(page) if self.digests.is_settled(page) else None
                assert kept in (None, page_digest(self.memory.page(page))), "a wrong page was left after a round"

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def suspect(self, data: st.DataObject) -> None:
        """Decode reports the pages of a handoff: only those that differ from their digests are quarantined."""
        prompt = data.draw(st.sampled_from(self.prompts))
        self.quarantine.add_pages(self.checks.mismatches(prompt.table.pages), self.now)
        self._end_tainted()

    @rule(num_pages=st.integers(1, NUM_PAGES))
    def evict(self, num_pages: int) -> None:
        pages = self.cache.allocate(num_pages, Hold.RESERVED)
        if pages is not None:
            self.cache.pool.drop(pages, Hold.RESERVED)

    # -- invariants

    @invariant()
    def d1_cached_pages_are_settled(self) -> None:
        check_invariants(self.cache)
        for page in map(PageId, range(NUM_PAGES)):
            assert not self.cache.pool.is_cached(page) or self.digests.is_settled(page)
            retired = self.cache.pool.owner(page) is Owner.RETIRED
            assert retired == (self.digests.state(page) is PageState.RETIRED)

    @invariant()
    def d2_a_digest_is_constant_while_settled(self) -> None:
        now_settled = {PageId(p): self.digests.digest(PageId(p)) for p in range(NUM_PAGES) if self._is_settled(p)}
        for page, digest in now_settled.items():
            assert self.settled.get(page, digest) == digest or self._was_freed(page)
        self.settled = now_settled

    @invariant()
    def d3_what_was_announced_is_kept(self) -> None:
        for prompt in self.prompts:
            for page, digest in prompt.announced.items():
                assert not self._is_settled(page) or self.digests.digest(page) == digest

    @invariant()
    def d6_what_is_wrong_hangs_on_a_page_that_differs(self) -> None:
        """A cached page with good digest and wrong bytes would be served; its ancestor would tell, until it is gone."""
        for tokens in ([0, 0], [0, 1], [1, 0], [1, 1]):
            self._check_subtree(tokens, differs=False)

    def teardown(self) -> None:
        for prompt in self.prompts:
            prompt.table.release()
        check_invariants(self.cache)
        assert self.cache.pool.num_free + self.cache.pool.num_cached == self.cache.pool.num_usable

    # -- helpers

    def _is_settled(self, page: int) -> bool:
        return self.digests.is_settled(PageId(page))

    def _was_freed(self, page: PageId) -> bool:
        """True if no prompt has held the page since its digest was seen: it may have been written again."""
        return not any(page in prompt.announced for prompt in self.prompts)

    def _check_subtree(self, tokens: list[int], differs: bool) -> None:
        keys = page_keys(tokens, PAGE_SIZE, "")
        if self.cache.num_matching(keys) < len(keys):
            return
        page = self.cache.page_of(keys[-1])
        differs = differs or page_digest(self.memory.page(page)) != self.digests.digest(page)
        assert differs or bytes(self.memory.page(page)) == true_pages(tokens)[-1], "a descendant of a quarantined page"
        for more in ([0, 0], [0, 1], [1, 0], [1, 1]):
            self._check_subtree(tokens + more, differs)

    def _end_tainted(self) -> None:
        for prompt in [one for one in self.prompts if one.table.is_tainted]:
            self.prompts.remove(prompt)
            prompt.table.release()
