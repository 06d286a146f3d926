"""Planted bugs in overlap scheduling; a part of the table in `bugs`."""

from __future__ import annotations

from tests.planted.runner import PlantedBug

OVERLAP = "a step ahead changes nothing"
SCHEDULER, FENCE = "services/decode/rows/overlap_scheduler.py", "baton/engine/overlap/page_fence.py"
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
        "what a closed loop has computed is lost", "services/decode/loop.py",
        "self._emit_effects([*self._deferred, *self._take_result(self._in_flight)])",
        "self._emit_effects(self._deferred)", LOOP + "::test_closing_takes_the_step_in_flight",
    ),
)  # fmt: skip
