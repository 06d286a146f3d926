"""Cached prompt tokens of a request trace over several workers, by who gives pages to whom.

    python -m bench.engine.tiers.page_giving conversation_trace.jsonl [--pools 4000 16000] [--limit 2000]

Replays a Mooncake trace in order of arrival over prefill and decode workers, each with the product's prefix cache.
Pages have `--page-tokens`; a block of the trace (512 tokens) has several. A prompt goes to a prefill worker, which
imports what the giver with the longest prefix has beyond its own (`--page-sharing always`) and computes the rest; then
to a decode worker, which ends with prompt and answer. It counts pages, so figures are the same on every machine.

A trace names the blocks of prompts only. What prompt and answer end with is read from the prompt that continues them:
the first later one that begins with all full blocks of the earlier prompt, the last of which no prompt before it had,
and is at least as long as prompt and answer together. Answers that no prompt continues have pages of their own.
"""

from __future__ import annotations

import argparse
import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import PageKey
from baton.kv.keys import page_keys
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.services.cli.bench.workload.traces import MOONCAKE_BLOCK_TOKENS, TraceRow, read_mooncake

BLOCK = MOONCAKE_BLOCK_TOKENS
MAX_IMBALANCE = 1.25
"""The worker with the longest prefix is passed over if it has had this many times the mean of pages that it lacked."""


class Placement(enum.StrEnum):
    """Which prefill worker gets a prompt: each in turn, or the one that has most of it, within `MAX_IMBALANCE`."""

    ROUND_ROBIN = "in turn"
    MOST_CACHED = "most cached"


class GivingRule(enum.StrEnum):
    """Which workers give pages to a prefill worker."""

    NONE = "nobody"
    DECODE = "decode"
    PREFILL = "prefill"
    ANY = "any worker"

    @property
    def decode_gives(self) -> bool:
        return self in (GivingRule.DECODE, GivingRule.ANY)

    @property
    def prefill_gives(self) -> bool:
        return self in (GivingRule.PREFILL, GivingRule.ANY)


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """Full pages of a prompt, and those that prompt and answer fill together. `is_continued`: by a later prompt."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    is_continued: bool


@dataclass(frozen=True, slots=True)
class GivingShares:
    """Shares of all full pages of prompts: cached at their prefill worker, and given by others."""

    own: float
    from_decode: float
    from_prefill: float

    @property
    def all(self) -> float:
        """Pages that are not computed."""
        return self.own + self.from_decode + self.from_prefill


def turns(rows: Sequence[TraceRow], page_tokens: int) -> list[ReplayedTurn]:
    """The trace with the pages of answers. `page_tokens` divides a block."""
    fulls = [row.block_ids[: row.num_input_tokens // BLOCK] for row in rows]
    users: dict[int, list[int]] = {}  # of a block: the prompts with it as a full one, in order
    for number, full in enumerate(fulls):
        for block in full:
            users.setdefault(block, []).append(number)
    own = itertools.count(1 + max((max(row.block_ids, default=0) for row in rows), default=0))
    blocks: list[tuple[int, ...]] = [()] * len(rows)  # of prompt and answer
    found = []
    for number in reversed(range(len(rows))):
        row, full = rows[number], fulls[number]
        num_tokens = row.num_input_tokens + row.num_output_tokens
        later = users[full[-1]] if full and users[full[-1]][0] == number else []
        fits = (
            one for one in later[1:] if rows[one].num_input_tokens >= num_tokens and fulls[one][: len(full)] == full
        )
        continuation = next(fits, None)
        known = row.block_ids if continuation is None else blocks[continuation][: ceil_div(num_tokens, BLOCK)]
        num_own = ceil_div(num_tokens, BLOCK) - len(known)
        blocks[number] = (*known, *(next(own) for _ in range(num_own)))
        pages = _pages(blocks[number], page_tokens)
        num_prompt, num_all = row.num_input_tokens // page_tokens, num_tokens // page_tokens
        found.append(ReplayedTurn(pages[:num_prompt], pages[num_prompt:num_all], continuation is not None))
    return found[::-1]


def _pages(blocks: Sequence[int], page_tokens: int) -> tuple[int, ...]:
    count = BLOCK // page_tokens
    return tuple(block * count + at for block in blocks for at in range(count))


class GivingReplay:
    """`num_workers` prefill and as many decode workers, with `num_pages` pages each."""

    def __init__(self, num_workers: int, num_pages: int, giving: GivingRule, placement: Placement) -> None:
        self._prefill = [PrefixCache(PagePool(num_pages)) for _ in range(num_workers)]
        self._decode = [PrefixCache(PagePool(num_pages)) for _ in range(num_workers)]
        self._giving, self._placement = giving, placement
        self._num_computed = [0] * num_workers
        self._num_moved = [0] * num_workers  # to each decode worker
        self._in_turn = itertools.count()

    def run(self, served: Sequence[ReplayedTurn]) -> GivingShares:
        """Serves the prompts one after another."""
        num_own = num_decode = num_prefill = num_pages = 0
        for turn in served:
            keys = page_keys(turn.prompt, 1, "")
            at = self._place(keys)
            own = self._prefill[at].num_matching(keys)
            by_decode = self._best(self._decode, keys) if self._giving.decode_gives else 0
            by_prefill = self._best(self._prefill, keys) if self._giving.prefill_gives else 0
            given = max(0, max(by_decode, by_prefill) - own)
            if given:  # what is given is used last there
                givers = self._decode if by_decode >= by_prefill else self._prefill
                _touch(max(givers, key=lambda one: one.num_matching(keys)), keys)
            num_own, num_pages = num_own + own, num_pages + len(keys)
            num_decode += given if by_decode >= by_prefill else 0
            num_prefill += given if by_decode < by_prefill else 0
            self._num_computed[at] += len(keys) - own - given
            _fill(self._prefill[at], turn.prompt)
            self._move(turn, keys)
        return GivingShares(*(number / num_pages for number in (num_own, num_decode, num_prefill)))

    def _place(self, keys: Sequence[PageKey]) -> int:
        if self._placement is Placement.ROUND_ROBIN:
            return next(self._in_turn) % len(self._prefill)
        return _most_cached(self._prefill, self._num_computed, keys)

    def _move(self, turn: ReplayedTurn, keys: Sequence[PageKey]) -> None:
        at = _most_cached(self._decode, self._num_moved, keys)
        self._num_moved[at] += len(keys) + len(turn.answer) - self._decode[at].num_matching(keys)
        _fill(self._decode[at], (*turn.prompt, *turn.answer))

    @staticmethod
    def _best(givers: Sequence[PrefixCache], keys: Sequence[PageKey]) -> int:
        return max(one.num_matching(keys) for one in givers)


def _most_cached(workers: Sequence[PrefixCache], loads: Sequence[int], keys: Sequence[PageKey]) -> int:
    """The worker with the longest prefix, of those that have had no more than their share."""
    most = MAX_IMBALANCE * (sum(loads) / len(loads) + 1)
    free = [at for at in range(len(workers)) if loads[at] <= most]
    return max(free, key=lambda at: (workers[at].num_matching(keys), -loads[at]))


def _touch(cache: PrefixCache, keys: Sequence[PageKey]) -> None:
    cache.pool.drop(cache.match(keys, Hold.PINNED), Hold.PINNED)


def _fill(cache: PrefixCache, pages: Sequence[int]) -> None:
    """The worker has had all pages and lets go of them. A pool that they exceed keeps nothing new."""
    table = PageTable(cache, 1, "", Hold.LIVE)
    table.match_tokens(pages)
    if table.extend(len(pages)):
        table.cache_full_pages(pages, len(pages))
    table.release()


def table(served: Sequence[ReplayedTurn], num_workers: int, pools: Sequence[int]) -> list[str]:
    """The shares as lines of a Markdown table."""
    lines = [
        "| pages a worker | prompts go | who gives | own cache | from decode | from prefill | not computed |",
        "|---|---|---|---|---|---|---|",
    ]
    for pages, placement, giving in itertools.product(pools, Placement, GivingRule):
        found = GivingReplay(num_workers, pages, giving, placement).run(served)
        shares = " | ".join(f"{share:.1%}" for share in (found.own, found.from_decode, found.from_prefill, found.all))
        lines.append(f"| {pages:,} | {placement.value} | {giving.value} | {shares} |")
    return lines


def main() -> None:
    """Prints the table of one trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--pools", type=int, nargs="+", default=[4000, 16000])
    parser.add_argument("--page-tokens", type=int, default=128, choices=[32, 64, 128, 256, 512])
    parser.add_argument("--limit", type=int, help="prompts to replay; default: all")
    options = parser.parse_args()
    served = turns(read_mooncake(options.trace)[: options.limit], options.page_tokens)
    num_pages = sum(len(turn.prompt) for turn in served)
    num_kept = sum(len(turn.answer) for turn in served if turn.is_continued)
    num_continued = sum(turn.is_continued for turn in served)
    print(
        f"{len(served):,} prompts of {num_pages:,} full pages. {num_continued:,} are continued, with {num_kept:,} pages"
        f" of answers: {num_kept / num_pages:.1%} of all pages of prompts.\n"
    )
    print("\n".join(table(served, options.workers, options.pools)))


if __name__ == "__main__":
    main()
