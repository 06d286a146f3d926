"""TTFT of short and long prompts under each prefill policy, from traces in simulated time.

    python -m bench.engine.prefill_policies [--mooncake conversation_trace.jsonl]
        [--azure AzureLLMInferenceTrace_conv.csv] [--minutes 15] [--load 0.8] [--plot FILE] [--priorities] [--overtakes]

Runs prefill's real scheduler, exports, page pool and prefix cache. Nothing is computed: a step takes the time of
`step_s`, and an export is committed at its seal. Lengths are divided by 16 (Mooncake's blocks with them, so prefixes
stay shared), stamps are spread uniformly over their slot of 3 s. The machine's speed is chosen such that fcfs, all
prompts at once, would be busy for `--load` of the trace's time; then every variant replays the same arrivals on the
same machine. So figures do not depend on the machine that replays. TTFT: arrival to seal, in seconds of the trace.
`--priorities` gives every tenth prompt, drawn with a fixed seed, a higher priority, and compares workers that heed it.
`--overtakes` compares bounds on admissions past a prompt that lacks pages, in a pool that lacks them.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import EngineRequest, SampledToken, SamplingParams, StopParams
from baton.domain.timing.step_time import StepShape, StepTimeModel
from baton.engine.batch import Batch, StepOutput
from baton.engine.handoff.export_events import Seal
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.step_metrics import shape_of
from baton.kv.page_checks import PageChecks
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.services.cli.bench.workload.traces import TraceRow, read_azure, read_mooncake, scale, scaled_block_tokens
from baton.services.prefill.policy import PolicySettings, PrefillLimits, PrefillPolicy
from baton.services.prefill.scheduler import PrefillScheduler

LENGTH = 1 / 16
PAGE_SIZE = scaled_block_tokens(LENGTH)
SLOT_S = 3.0
TOKEN_BUDGET, NUM_PAGES, THRESHOLD = 512, 16_000, 384
LONG_TOKENS = 4 * TOKEN_BUDGET
STEP_TOKENS, PAIRS_A_TOKEN = 20.0, 8_000.0
"""Cost of a step beside its tokens, in tokens; pairs of tokens whose attention costs as much as a token."""
_NEVER_S = 1e9
_OWN_BLOCKS = 1_000_000
_SAMPLE = SampledToken(0)


@dataclass(frozen=True)
class PolicyVariant:
    """One row of the table."""

    name: str
    order: PolicySettings
    threshold: int = THRESHOLD
    max_partial_prompts: int = 4
    equal_steps: bool = False
    num_pages: int = NUM_PAGES


VARIANTS = (
    PolicyVariant("fcfs, no threshold", PolicySettings(PrefillPolicy.FCFS), threshold=0),
    PolicyVariant("fcfs", PolicySettings(PrefillPolicy.FCFS)),
    PolicyVariant("fcfs, no sharing", PolicySettings(PrefillPolicy.FCFS, prefix_sharing=False)),
    PolicyVariant("lpm", PolicySettings(PrefillPolicy.LPM)),
    PolicyVariant("edf", PolicySettings(PrefillPolicy.EDF)),
    PolicyVariant("srpt", PolicySettings(PrefillPolicy.SRPT)),
    PolicyVariant("srpt, no share", PolicySettings(PrefillPolicy.SRPT, oldest_prompt_share=0.0)),
    PolicyVariant("srpt, share 0.5", PolicySettings(PrefillPolicy.SRPT, oldest_prompt_share=0.5)),
    PolicyVariant("srpt, 16 half-done", PolicySettings(PrefillPolicy.SRPT), max_partial_prompts=16),
    PolicyVariant("srpt, equal steps", PolicySettings(PrefillPolicy.SRPT), equal_steps=True),
)


HEEDED = tuple(
    PolicyVariant(policy.value + (", by priority" if heeded else ""), PolicySettings(policy, by_priority=heeded))
    for policy in (PrefillPolicy.FCFS, PrefillPolicy.SRPT)
    for heeded in (False, True)
)
URGENT_SHARE = 0.1
SCARCE_PAGES = 256
"""Hardly more than the longest prompt of Mooncake's conversations has."""
OVERTAKING = tuple(
    PolicyVariant(
        f"{pages:,} pages, {number:,} overtakes",
        PolicySettings(PrefillPolicy.SRPT, max_overtakes=number),
        num_pages=pages,
    )
    for pages, number in [(NUM_PAGES, 64), *((SCARCE_PAGES, number) for number in (1, 16, 64, 10**6))]
)


@dataclass(frozen=True)
class PolicyOutcome:
    """TTFT of all prompts in seconds, short and long, and of urgent ones; seconds of the steps, and tokens computed."""

    short_s: list[float]
    long_s: list[float]
    all_s: list[float]
    steps_s: list[float]
    num_tokens: int
    urgent_s: list[float] = field(default_factory=list)
    other_s: list[float] = field(default_factory=list)


def step_cost(shape: StepShape) -> float:
    """Cost of a step in tokens."""
    return STEP_TOKENS + shape.num_tokens + shape.chunk_pairs / PAIRS_A_TOKEN


def replay(
    rows: Sequence[TraceRow],
    variant: PolicyVariant,
    token_s: float,
    *,
    at_once: bool = False,
    urgent: Set[int] = frozenset(),
) -> PolicyOutcome:
    """Serves all prompts on a machine that takes `token_s` a token; `at_once`: nobody waits to come.

    `urgent`: numbers of the prompts with a higher priority.
    """
    cache = PrefixCache(PagePool(variant.num_pages))
    exports = ExportTable(cache.pool, _NEVER_S, grants_leases=True)
    model = StepTimeModel()
    limits = PrefillLimits(
        PAGE_SIZE, TOKEN_BUDGET, variant.max_partial_prompts, variant.num_pages, variant.threshold, variant.order,
        equal_time=model if variant.equal_steps else None,
    )  # fmt: skip
    scheduler = PrefillScheduler(cache, exports, limits, PageChecks(cache))
    outcome = PolicyOutcome([], [], [], [], 0)
    arrivals = [0.0 if at_once else row.arrival_s for row in rows]
    now = 0.0
    num_tokens = num_come = 0
    while len(outcome.all_s) < len(rows):
        while num_come < len(rows) and arrivals[num_come] <= now:
            request = replace(_request(num_come, rows[num_come]), priority=int(num_come in urgent))
            scheduler.add(request, 0, _NEVER_S, arrivals[num_come])
            num_come += 1
        batch = scheduler.schedule(now)
        if batch is None:
            now = arrivals[num_come]
            continue
        step_s = token_s * step_cost(shape_of(batch))
        model.observe(shape_of(batch), step_s)
        outcome.steps_s.append(step_s)
        now, num_tokens = now + step_s, num_tokens + batch.num_tokens
        for effect in scheduler.commit(batch, _output(batch), now):
            if isinstance(effect, Seal):
                exports.commit(effect.id)
                number = int(effect.id.request_id)
                _record(outcome, rows[number].num_input_tokens, now - arrivals[number])
                (outcome.urgent_s if number in urgent else outcome.other_s).append(now - arrivals[number])
    return replace(outcome, num_tokens=num_tokens)


def _record(outcome: PolicyOutcome, num_tokens: int, ttft_s: float) -> None:
    outcome.all_s.append(ttft_s)
    if num_tokens <= TOKEN_BUDGET:
        outcome.short_s.append(ttft_s)
    elif num_tokens > LONG_TOKENS:
        outcome.long_s.append(ttft_s)


def _output(batch: Batch) -> StepOutput:
    return StepOutput(tuple(() if row.sample is None else (_SAMPLE,) for row in batch.rows))


def _request(number: int, row: TraceRow) -> EngineRequest:
    """A prompt whose tokens name their blocks; one of a trace without blocks shares nothing."""
    count = row.num_input_tokens
    if row.block_ids:
        tokens = tuple(block for block in row.block_ids for _ in range(PAGE_SIZE))[:count]
        salt = ""
    else:
        tokens, salt = (0,) * count, str(number)
    id = AttemptId(RequestId(str(number)), 1)
    return EngineRequest(id, tokens, len(tokens), SamplingParams(temperature=0.0), StopParams(1), salt)


def prepare(rows: Sequence[TraceRow], minutes: float, slot_s: float) -> list[TraceRow]:
    """The first minutes, scaled, in the order of stamps that are spread over their slot."""
    rng = random.Random(0)
    chosen = [row for row in scale(rows, length=LENGTH, rate=1.0) if row.arrival_s < 60 * minutes]
    spread = [replace(row, arrival_s=row.arrival_s + rng.uniform(0.0, slot_s)) for row in chosen]
    return sorted(spread, key=lambda row: row.arrival_s)


def bursts() -> list[TraceRow]:
    """20 bursts of 16 prompts within 0.1 s, each with a new prefix of 125 blocks and 6 blocks of their own."""
    prefix, own, size, rows = 125, 6, 16, []
    for number in range(20 * size):
        first = number // size * prefix
        ids = (*range(first, first + prefix), *range(_OWN_BLOCKS + own * number, _OWN_BLOCKS + own * (number + 1)))
        arrival_s = 10.0 * (number // size) + 0.1 * (number % size) / size
        rows.append(TraceRow(arrival_s, PAGE_SIZE * len(ids), 1, ids))
    return rows


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed. `values` must not be empty."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def table(
    name: str, rows: Sequence[TraceRow], load: float, variants: Sequence[PolicyVariant] = VARIANTS
) -> tuple[list[str], dict[str, PolicyOutcome]]:
    """Lines of a Markdown table, and the outcomes by variant."""
    token_s = load * rows[-1].arrival_s / sum(replay(rows, VARIANTS[1], 1.0, at_once=True).steps_s)
    lines = [
        f"{name}, load {load}: {len(rows):,} prompts, {token_s * 1e3:.3f} ms a token.",
        "",
        "| variant | short p50 | short p99 | long p50 | long p99 | mean | steps | p99 ms | most ms | tokens computed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    outcomes = {}
    for variant in variants:
        found = outcomes[variant.name] = replay(rows, variant, token_s)
        groups = (found.short_s, found.long_s)
        times = [f"{percentile(group, q):.2f}" if group else "-" for group in groups for q in (0.5, 0.99)]
        cells = [*times, f"{sum(found.all_s) / len(found.all_s):.2f}"]
        steps_ms = [1e3 * percentile(found.steps_s, share) for share in (0.99, 1.0)]
        counts = f"{len(found.steps_s):,} | {steps_ms[0]:.0f} | {steps_ms[1]:.0f} | {found.num_tokens:,}"
        lines.append(f"| {variant.name} | {' | '.join(cells)} | {counts} |")
    return lines, outcomes


def priority_table(name: str, rows: Sequence[TraceRow], load: float) -> list[str]:
    """Lines of a Markdown table: TTFT of urgent prompts and of the others."""
    token_s = load * rows[-1].arrival_s / sum(replay(rows, VARIANTS[1], 1.0, at_once=True).steps_s)
    rng = random.Random(0)
    urgent = frozenset(number for number in range(len(rows)) if rng.random() < URGENT_SHARE)
    lines = [
        f"{name}, load {load}: {len(rows):,} prompts, of which {len(urgent):,} are urgent.",
        "",
        "| variant | urgent p50 | urgent p99 | others p50 | others p99 | mean |",
        "|---|---|---|---|---|---|",
    ]
    for variant in HEEDED:
        found = replay(rows, variant, token_s, urgent=urgent)
        times = [percentile(group, q) for group in (found.urgent_s, found.other_s) for q in (0.5, 0.99)]
        cells = [f"{time_s:.2f}" for time_s in (*times, sum(found.all_s) / len(found.all_s))]
        lines.append(f"| {variant.name} | {' | '.join(cells)} |")
    return lines


def plot(title: str, outcomes: dict[str, PolicyOutcome], path: Path) -> None:
    """Draws the distribution of TTFT of short and long prompts. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("short", "long"), strict=True):
        for variant in ("fcfs", "lpm", "edf", "srpt", "srpt, no share"):
            times = outcomes[variant].short_s if name == "short" else outcomes[variant].long_s
            shares = [0.01, *(percent / 100 for percent in range(5, 100, 5)), 0.99]
            axes.plot([percentile(times, share) for share in shares], shares, label=variant)
        axes.set(title=f"{title}: {name} prompts", xlabel="TTFT, s", ylabel="share of prompts", xscale="log")
        axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Prints a table a trace and load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--azure", type=Path)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--load", type=float, nargs="+", default=[0.8])
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--priorities", action="store_true", help="compare workers that heed priorities")
    parser.add_argument("--overtakes", action="store_true", help="compare bounds on overtaking in a small pool")
    options = parser.parse_args()
    traces = {} if options.priorities or options.overtakes else {"Bursts of 16 prompts with one new prefix": bursts()}
    if options.mooncake:
        traces["Mooncake conversation"] = prepare(read_mooncake(options.mooncake), options.minutes, SLOT_S)
    if options.azure:
        traces["Azure conversation"] = prepare(read_azure(options.azure), options.minutes, 0.0)
    for name, rows in traces.items():
        for load in options.load:
            if options.priorities:
                print("\n".join(priority_table(name, rows, load)) + "\n", flush=True)
                continue
            lines, outcomes = table(name, rows, load, OVERTAKING if options.overtakes else VARIANTS)
            print("\n".join(lines), flush=True)
            print()
            if options.plot and not options.overtakes and name.startswith("Mooncake"):
                plot(f"{name}, load {load}", outcomes, options.plot)


if __name__ == "__main__":
    main()
