"""What each growth reserve costs and buys: tokens, preemptions and gaps, in a model of a decode worker.

    python -m bench.engine.growth_reserve [--steps 1000] [--warmup 2000] [--markdown FILE]
        [--azure AzureLLMInferenceTrace_conv.csv] [--mooncake conversation_trace.jsonl]

Runs decode's import policy, import table, scheduler, page pool and swap space as they are, in steps. Requests never
run out: before each step new ones are reserved until the worker is busy. Imports are whole at once. The runner computes
nothing: it ends each row at a length drawn before. So the figures do not depend on the machine. The warm-up is not
counted; without one, `peak` still reserves by `max_tokens`.

With a trace only its requests run, in its order, with the lengths of their prompts and outputs and without their times:
one that finds no room waits, and those behind it with it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.domain.arithmetic import ceil_div
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageId, RequestId, WorkerId
from baton.domain.request import EngineRequest, SampledToken, SamplingParams, StopParams
from baton.engine.batch import Batch, StepOutput
from baton.kv.geometry import PageWindow
from baton.kv.growth import GrowthPolicy, GrowthReserve
from baton.kv.page_checks import PageChecks
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.swap_space import SwapSpace
from baton.services.cli.bench.workload.traces import TraceRow, read_azure, read_mooncake
from baton.services.decode.effects import DecodeEffect, EmitTokens
from baton.services.decode.import_policy import ImportPolicy, ImportRules
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import ImportLimits, Reserved, SealInfo
from baton.services.decode.page_faults import PageFaults
from baton.services.decode.rows.rules import RowRules
from baton.services.decode.scheduler import DecodeScheduler
from baton.transfer.base import Pull, PullEvent, PullOutcome

PAGE_SIZE, NUM_PAGES, MAX_ROWS, MAX_TOKENS = 16, 2_000, 512, 2_048
CLIP_TOKENS = 4_096
AZURE_PAGES, MOONCAKE_PAGES = 8_000, 64_000
"""Pools of the traces: room for about a hundred of their prompts."""
TEXT, END = 5, 2
_SOURCE = WorkerId("prefill-0")
_DEADLINE_S = 1e9
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class GrowthLoad:
    """`draw` gives the lengths of prompt and output of a request, by its number; again after a refusal.

    `max_tokens` None: clients ask for as many output tokens as there are. `window`: of pages with a window part, which
    have `num_slots` slots for it, or None: each its own.
    """

    name: str
    draw: Callable[[random.Random, int], tuple[int, float]]
    num_pages: int = NUM_PAGES
    max_tokens: int | None = MAX_TOKENS
    window: PageWindow | None = None
    num_slots: int | None = None
    max_rows: int = MAX_ROWS


WORKLOADS = (
    GrowthLoad("prompt 64, output 512 +- 128", lambda rng, _: (64, rng.gauss(512, 128))),
    GrowthLoad("prompt 128, output 256 +- 64", lambda rng, _: (128, rng.gauss(256, 64))),
    GrowthLoad("prompt 64, output lognormal, median 200", lambda rng, _: (64, rng.lognormvariate(5.3, 1.0))),
)


def trace_load(name: str, rows: Sequence[TraceRow], num_pages: int) -> GrowthLoad:
    """The requests of a trace, again from the first after the last."""
    lengths = [(row.num_input_tokens, row.num_output_tokens) for row in rows]
    return GrowthLoad(name, lambda _, number: lengths[number % len(lengths)], num_pages)


@dataclass(frozen=True)
class GrowthTotals:
    """Totals of one run. Gaps are in steps, between two tokens of a row."""

    num_tokens: int
    num_finished: int
    num_preemptions: int
    num_failed: int
    gaps: tuple[int, ...]
    mean_rows: float = 0.0

    @property
    def preemptions_each(self) -> float:
        """Preemptions a finished request."""
        return self.num_preemptions / max(1, self.num_finished)

    @property
    def row(self) -> tuple[str, ...]:
        """Cells of the table."""
        gaps = sorted(self.gaps)
        return (
            f"{self.num_tokens:,}",
            f"{self.num_finished:,}",
            f"{self.preemptions_each:.2f}",
            str(gaps[int(0.999 * len(gaps))]),
            str(gaps[-1]),
        )


class _Worker:
    """One decode worker without a model."""

    def __init__(self, mode: GrowthPolicy, workload: GrowthLoad, seed: int) -> None:
        self._rng = random.Random(seed)
        self._workload = workload
        self._ends: dict[AttemptId, int] = {}  # tokens of prompt and output
        self._token_steps: dict[AttemptId, int] = {}
        self._gaps: list[int] = []
        self._num_failed = self._num_finished = 0
        num_pages, window = workload.num_pages, workload.window
        self._num_rows = 0
        cache = PrefixCache(PagePool(num_pages))
        cache.window = window
        if window is not None and workload.num_slots is not None:
            cache.pool.add_window_slots(workload.num_slots, window.num_parts + 1)
        imports = ImportTable(cache, ImportLimits(PAGE_SIZE, workload.max_rows, num_pages, _DEADLINE_S, window=window))
        growth = GrowthReserve(mode, PAGE_SIZE, CLIP_TOKENS)
        self._scheduler = DecodeScheduler(
            imports, SwapSpace(num_pages, num_parts=cache.pool.num_window_parts), PAGE_SIZE, rules=RowRules(growth)
        )
        faults = PageFaults(cache, imports, self._scheduler, PageChecks(cache), PAGE_SIZE, 1)
        rules = ImportRules(PAGE_SIZE, digests=True)
        self._policy = ImportPolicy(cache.pool, imports, self._scheduler, rules, faults, growth)

    def run(self, num_steps: int, num_warmup: int) -> GrowthTotals:
        """Runs `num_warmup` steps and `num_steps` counted ones under endless arrivals."""
        num_earlier = 0
        for step in range(num_warmup + num_steps):
            if step == num_warmup:
                self._gaps.clear()
                self._num_finished = self._num_rows = 0
                num_earlier = self._scheduler.num_preemptions
            while self._admit(step):
                pass
            batch = self._scheduler.schedule(float(step))
            if batch is None:
                raise RuntimeError(f"step {step}: a worker with endless arrivals had nothing to run")
            self._num_rows += len(batch.rows)
            for effect in self._scheduler.commit(batch, self._output(batch), float(step)):
                self._record(effect, step)
        gaps = (*self._gaps, *(num_warmup + num_steps - last for last in self._token_steps.values()))
        preemptions = self._scheduler.num_preemptions - num_earlier
        mean_rows = self._num_rows / num_steps
        return GrowthTotals(len(self._gaps), self._num_finished, preemptions, self._num_failed, gaps, mean_rows)

    def _admit(self, step: int) -> bool:
        rng, workload = self._rng, self._workload
        prompt_len, output_len = workload.draw(rng, len(self._ends))
        most = workload.max_tokens or workload.num_pages * PAGE_SIZE - prompt_len
        length = min(most, max(2, round(output_len)))
        id = AttemptId(RequestId(f"r{len(self._ends)}"), 1)
        answer, _ = self._policy.reserve(id, prompt_len, [], 0.0, _DEADLINE_S, most)
        if not isinstance(answer, Reserved):
            return False
        tokens = tuple(rng.choices(range(10, 30_000), k=prompt_len))
        stop = StopParams(most, stop_token_ids=frozenset({END}))
        self._policy.claim(answer.id, EngineRequest(id, tokens, len(tokens), _GREEDY, stop), _SOURCE, _DEADLINE_S)
        pages = tuple(map(PageId, range(ceil_div(len(tokens), PAGE_SIZE))))
        effects = self._policy.on_chunk(PublishedChunk(id, 0, pages, (0,) * len(pages)), 0.0)
        self._policy.on_seal(id, SealInfo(SampledToken(TEXT), None, len(pages)), 0.0)
        while effects:
            if isinstance(effect := effects.pop(), Pull):
                effects += self._policy.on_pull_event(_read(effect), 0.0)
        self._ends[id] = prompt_len + length
        self._token_steps[id] = step - 1
        return True

    def _output(self, batch: Batch) -> StepOutput:
        ends = (row.sample is not None and row.start + 2 >= self._ends[row.id] for row in batch.rows)
        return StepOutput(tuple((SampledToken(END if end else TEXT),) for end in ends))

    def _record(self, effect: DecodeEffect, step: int) -> None:
        if not isinstance(effect, EmitTokens):
            self._num_failed += 1
            return
        self._gaps.append(step - self._token_steps[effect.id])
        self._token_steps[effect.id] = step
        if effect.finish is not None:
            self._num_finished += 1
            del self._token_steps[effect.id]


def _read(pull: Pull) -> PullEvent:
    """The end of a read, with the digests of its pages as they are here."""
    return PullEvent(pull, PullOutcome.DONE, 1, 0.0, found=(0,) * len(pull.local_pages))


def simulate(
    mode: GrowthPolicy, workload: GrowthLoad, num_steps: int, num_warmup: int = 0, seed: int = 0
) -> GrowthTotals:
    """Runs one workload under one growth reserve."""
    return _Worker(mode, workload, seed).run(num_steps, num_warmup)


def main() -> None:
    """Prints one table per workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warmup", type=int, default=2000)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--azure", type=Path)
    parser.add_argument("--mooncake", type=Path)
    args = parser.parse_args()
    loads = list(WORKLOADS) if args.azure is None and args.mooncake is None else []
    lines = ["| workload | reserve | tokens | finished | preemptions each | p99.9 gap | longest gap |"]
    lines.append("|---" * 7 + "|")
    if args.azure is not None:
        loads.append(trace_load("Azure conversation", read_azure(args.azure), AZURE_PAGES))
    if args.mooncake is not None:
        loads.append(trace_load("Mooncake conversation", read_mooncake(args.mooncake), MOONCAKE_PAGES))
    for workload in loads:
        for mode in GrowthPolicy:
            totals = simulate(mode, workload, args.steps, args.warmup)
            lines.append(f"| {workload.name} | {mode.value} | {' | '.join(totals.row)} |")
            print(lines[-1], flush=True)
    if args.markdown is not None:
        args.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
