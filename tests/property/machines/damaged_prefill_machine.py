"""State machine of a prefill worker whose idle and exported pages rot at any time.

The fake runner refuses a row over wrong pages, so a prompt that starts on an unchecked or orphaned page breaks the run.
Pages of prompts in progress do not rot here: that is the stated limit.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from baton.domain.errors import PageVerdict
from baton.domain.handoff import Suspect
from baton.domain.ids import AttemptId, PageId
from baton.kv.keys import page_keys
from baton.kv.page_checks import PageChecks, Scrubber
from baton.kv.page_digests import PageState
from baton.kv.pages import Owner
from baton.transfer.digest import page_digest
from tests.property.machines.prefill_machine import PrefillMachine
from tests.tiny_workers import NUM_PAGES, PAGE_BYTES, PAGE_SIZE, engine_request, page_bytes


class DamagedPrefillMachine(PrefillMachine):
    """Adds damage, suspects and the scrubber."""

    def __init__(self) -> None:
        super().__init__()
        self.scrubber = Scrubber(PageChecks(self.world.cache), PAGE_BYTES)

    @precondition(lambda self: self._idle_pages())
    @rule(data=st.data(), offset=st.integers(0, PAGE_BYTES - 1))
    def flip(self, data: st.DataObject, offset: int) -> None:
        pinned = [page for page in self._idle_pages() if self.world.cache.pool.owner(page) is Owner.PINNED]
        page = data.draw(st.sampled_from(pinned or self._idle_pages()))
        self.world.memory.page(page)[offset] ^= 0x80

    @precondition(lambda self: self.cases)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """A prompt comes again, and one of its cached pages has been damaged."""
        request = self.cases[data.draw(st.sampled_from(list(self.cases)))].request
        keys = page_keys(request.tokens, PAGE_SIZE, request.salt)
        cached = {self.world.cache.page_of(key) for key in keys[: self.world.cache.num_matching(keys)]}
        if damaged := cached.intersection(self._idle_pages()):
            self.world.memory.page(max(damaged))[0] ^= 0x80
        self._add(engine_request(f"r{next(self.names)}", list(request.tokens), salt=request.salt), 0, 20)

    @rule()
    def scrub(self) -> None:
        self.now += 600.0
        wrong = self.scrubber.run_slice(self.now, busy=False)
        self._on_effects(self.world.scheduler.on_wrong_pages(wrong, self.now))
        self.wait(0.0)

    @precondition(lambda self: any(map(self.world.exports.announced, self.cases)))
    @rule(data=st.data(), damaged=st.booleans())
    def report(self, data: st.DataObject, damaged: bool) -> None:
        """Decode reports all announced pages of a handoff, perhaps one that has just been damaged among them."""
        id = data.draw(st.sampled_from([one for one in self.cases if self.world.exports.announced(one)]))
        idle = set(self._idle_pages()).intersection(self.world.exports.announced(id))
        if damaged and idle:
            self.world.memory.page(min(idle))[0] ^= 0x80
        suspects = [Suspect(0, page, digest) for page, digest in self.world.exports.announced(id).items()]
        wrong = [one.page for one in suspects if page_digest(self.world.memory.page(one.page)) != one.digest]
        verdict, effects = self.world.scheduler.examine(id, suspects, self.now)
        self._on_effects(effects)
        assert verdict is (PageVerdict.SOURCE if wrong else PageVerdict.LINK)
        assert self.cases[id].exported == (not wrong)

    @invariant()
    def exported_pages_are_pinned_and_final(self) -> None:
        """An exported page has its true bytes, or bytes that differ from the announced digest."""
        for id, case in self.cases.items():
            for index, page in case.pages.items() if case.exported else ():
                assert self.world.cache.pool.owner(page) in (Owner.PINNED, Owner.LIVE)
                assert self.world.cache.pool.digests.state(page) is not PageState.CONDEMNED
                self._check_bytes(id, index, page)

    def teardown(self) -> None:
        """A condemned or retired page would leave too little for prompts that need the whole pool."""
        for id in list(self.cases):
            if not self.cases[id].ended or self.cases[id].exported:
                self._abort(id)
        pool = self.world.cache.pool
        assert pool.num_free + pool.num_cached == pool.num_usable

    def _check_bytes(self, id: AttemptId, index: int, page: PageId) -> None:
        bytes_now = self.world.memory.page(page)
        expected = page_bytes(self.cases[id].request.tokens, index)
        differs = page_digest(bytes_now) != self.world.exports.announced(id).get(page)
        assert differs or bytes(bytes_now[: len(expected)]) == expected

    def _idle_pages(self) -> list[PageId]:
        """Complete pages that no prompt in progress holds."""
        pool = self.world.cache.pool
        return [PageId(i) for i in range(NUM_PAGES) if pool.owner(PageId(i)) in (Owner.CACHED, Owner.PINNED)]
