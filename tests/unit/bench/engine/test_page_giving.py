"""The replay of page giving counts what each worker has, and reads answers from the prompts that continue them."""

from __future__ import annotations

import pytest

from baton.services.cli.bench.workload.traces import TraceRow
from bench.engine.tiers.page_giving import GivingReplay, GivingRule, Placement, ReplayedTurn, table, turns


def rows() -> list[TraceRow]:
    """A talk of two turns, with a prompt between that shares its first block."""
    return [
        TraceRow(0.0, 2 * 512 + 128, 512, (7, 8, 1)),
        TraceRow(1.0, 3 * 512, 1, (7, 9, 10)),
        TraceRow(2.0, 4 * 512 + 256, 1, (7, 8, 2, 3, 4)),
    ]


def test_an_answer_is_read_from_the_prompt_that_continues_it():
    first, other, second = turns(rows(), 128)
    assert first.is_continued
    assert first.prompt == second.prompt[:9]
    assert first.answer == second.prompt[9:13]
    assert not other.is_continued
    assert not second.is_continued
    assert len(second.prompt) == 18
    assert not set(other.prompt[4:]) & set(second.prompt)


def test_a_shorter_prompt_continues_nothing():
    first, other, _ = rows()
    assert not turns([first, other, TraceRow(2.0, 3 * 512, 1, (7, 8, 2))], 128)[0].is_continued


@pytest.mark.parametrize(
    ("giving", "shares"),
    [
        (GivingRule.NONE, (0, 0, 0)),
        (GivingRule.DECODE, (0, 17, 0)),  # 4 pages of the other prompt, 13 of the second turn
        (GivingRule.PREFILL, (0, 0, 13)),
        (GivingRule.ANY, (0, 17, 0)),
    ],
)
def test_pages_come_from_who_has_them(giving: GivingRule, shares: tuple[int, int, int]):
    served = turns(rows(), 128)
    found = GivingReplay(3, 100, giving, Placement.ROUND_ROBIN).run(served)
    num_pages = sum(len(turn.prompt) for turn in served)
    assert [round(share * num_pages) for share in (found.own, found.from_decode, found.from_prefill)] == list(shares)


def test_a_prompt_goes_where_most_of_it_is_but_not_always_to_one_worker():
    first, other, again = (ReplayedTurn(pages, (), False) for pages in ((1, 2, 3, 4), (5, 6, 7, 8), (1, 2, 3, 9)))
    replays = [GivingReplay(2, 100, GivingRule.NONE, Placement.MOST_CACHED) for _ in range(2)]
    assert replays[0].run([first, again]).own == 0
    assert round(12 * replays[1].run([first, other, again]).own) == 3


def test_the_table_has_a_row_for_each_way():
    assert len(table(turns(rows(), 128), 2, [100])) == 2 + len(Placement) * len(GivingRule)
