"""Planted bugs in overlap scheduling; a part of the table in `bugs`."""

from __future__ import annotations

from tests.planted.runner import PlantedBug

OVERLAP = "a step ahead changes nothing"
SCHEDULER, FENCE = "services/decode/rows/overlap_scheduler.py", "baton/engine/overlap/page_fence.py"
UNSETTLED = "services/decode/rows/unsettled_pages.py"
PREFILL, PREFILL_UNIT = "services/prefill/overlap/scheduler.py", "tests/unit/prefill/overlap/test_step_ahead.py"
PREFILL_LOOP = "tests/property/overlap/test_prefill_overlap_loop.py"
UNIT, LOOP = "tests/unit/decode/test_overlap.py", "tests/property/overlap/test_overlap_loop.py"


def bug(name: str, file: str, before: str, after: str, tests: str = UNIT) -> PlantedBug:
    return PlantedBug(OVERLAP, name, file, before, after, tests)


OVERLAP_BUGS = (
    bug(
        "the extra token is emitted", SCHEDULER,
        "here = {id: row for id, row in super()._stepped_rows(batch).items() if rows.get(id) is row}",
        "here = dict(rows)",
    ),
    bug("pages of an ended row are freed before the fence", SCHEDULER, "if self._is_in_flight(row):", "if False:"),
    bug(
        "a page that another row has cached is freed under a step", SCHEDULER,
        "if num_full > row.num_filled // self._page_size and self._is_in_flight(row):", "if False:",
    ),
    bug(
        "a page that gives way takes a reserved one", SCHEDULER,
        "return num_new > num_left and table.num_taken(tokens, num_filled) > num_left", "return False",
    ),
    bug("an abort forgets the step in flight", SCHEDULER, " if rows.get(id) is row}", "}"),
    bug("a fence opens one step too early", FENCE, "<= self._num_ended:", "<= self._num_ended + 1:"),
    bug(
        "the step ahead writes the place of the step before", SCHEDULER,
        "tokens, start = (UNREAD_TOKEN,), len(row.tokens)", "tokens, start = (UNREAD_TOKEN,), len(row.tokens) - 1",
    ),
    bug(
        "a row that needs the host runs ahead", SCHEDULER,
        "any(_needs_host(row, futures) for row in rows) or", "",
    ),
    bug(
        "a row runs ahead of its last token", SCHEDULER,
        "if not _ends_by_length(row, futures)]", "]",
    ),
    bug(
        "pages of an ended prompt are freed before the fence", PREFILL,
        "            self.fence.hold(prompt.table.pages)\n", "            pass\n", PREFILL_UNIT,
    ),
    bug(
        "a page that gave way is freed under the step ahead", FENCE,
        "if here.isdisjoint(pages):", "if False:", PREFILL_UNIT,
    ),
    bug(
        "cached pages are held for longer than the pages before them", FENCE,
        "if here.isdisjoint(pages):", "if True:",
        PREFILL_LOOP + "::test_pages_can_be_evicted_as_soon_as_decode_has_them",
    ),
    bug(
        "a prompt that starts again gets the result of its first try", PREFILL,
        "== (prompt, prompt.num_starts)", "is not None", PREFILL_UNIT,
    ),
    bug(
        "pages of the chunk in flight are published", "services/prefill/scheduler.py",
        "self._fill(prompt, prompt.num_filled + len(row.tokens))", "self._fill(prompt, prompt.num_scheduled)",
        PREFILL_UNIT,
    ),
    bug(
        "digests that were computed beside are not kept", "services/prefill/overlap/steps.py",
        "self._scheduler.keep_digests(finished.batch, digests)", "pass",
        PREFILL_LOOP + "::test_the_engine_thread_hashes_no_page_of_a_step",
    ),
    bug(
        "a step is taken before the one before it is committed", "services/prefill/loop.py",
        "events = self._emit_before(events, ahead.settle)", "pass",
        PREFILL_LOOP + "::test_a_further_step_starts_before_the_digests_are_waited_for",
    ),
    bug(
        "a closed prefill loop drops its step", "services/prefill/loop.py",
        "while self.ahead is not None and len(self.ahead):", "while False:",
        PREFILL_LOOP + "::test_closing_commits_the_step_in_flight",
    ),
    bug(
        "decode's pages are hashed in the engine thread", SCHEDULER,
        "        if self.unsettled is None:\n            return super()._settle(",
        "        if True:\n            return super()._settle(",
        LOOP + "::test_the_engine_thread_hashes_no_page_that_a_row_fills",
    ),
    bug(
        "pages of an ended row are freed while they are hashed", SCHEDULER,
        "unsettled.take_table(self._page_size)", "pass",
    ),
    bug(
        "what was condemned while it was hashed is cached", UNSETTLED,
        "if not self.is_ruined:", "if True:",
    ),
    bug(
        "a row is preempted for pages that are hashed", SCHEDULER,
        "return super()._ensure_page(row) or (self.settle_filled() and super()._ensure_page(row))",
        "return super()._ensure_page(row)",
    ),
    bug(
        "preempted rows do not get pages that are hashed", SCHEDULER,
        "        if self._preempted:\n            self.settle_filled()",
        "        if False:\n            self.settle_filled()",
    ),
    bug(
        "a loop without a step leaves pages without digests", "services/decode/loop.py",
        "if self._in_flight is None and ahead.unsettled:", "if False:",
        LOOP + "::test_the_engine_thread_hashes_no_page_that_a_row_fills",
    ),
    bug(
        "what a closed loop has computed is lost", "services/decode/loop.py",
        "self._emit_effects([*self._deferred, *self._take_result(self._in_flight)])",
        "self._emit_effects(self._deferred)", LOOP + "::test_closing_takes_the_step_in_flight",
    ),
)  # fmt: skip
