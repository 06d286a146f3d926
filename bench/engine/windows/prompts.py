"""What a prefill pool's cache gives with window slots and without them, from equal bytes.

    python -m bench.engine.windows.prompts [--shapes gemma-3-27b gpt-oss-20b] [--pages 4000 16000] [--prompts 3000]
        [--windows 4] [--mooncake conversation_trace.jsonl]

Runs prefill's scheduler, exports, page pool and prefix cache as they are, over the prompts of a trace in their order:
the next one comes when one has ended, so that eight are there. Nothing is computed, and an export is committed at its
seal, so the figures are the same on every machine. A token here stands for a page of 64 tokens: a page has one, and
lengths, windows and the token budget are divided by 64. Prompts that do not fit the smallest pool are left out.

Two loads come without a trace. `system prompts`: one of 32 beginnings of 2,048 tokens, drawn at random, and 512 tokens
of its own. `short chats`: 400 conversations at a time, the next message of a random one, 128 tokens each, at most 16.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import EngineRequest, SampledToken, SamplingParams, StopParams
from baton.engine.batch import Batch, StepOutput
from baton.engine.handoff.export_events import Seal
from baton.engine.handoff.kv_export import ExportTable
from baton.kv.page_checks import PageChecks
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.services.cli.bench.workload.traces import read_mooncake, scale, scaled_block_tokens
from baton.services.prefill.policy import PolicySettings, PrefillLimits, PrefillPolicy
from baton.services.prefill.scheduler import PrefillScheduler
from bench.engine.windows.pools import SHAPES, PoolArm, arms

PAGE_SIZE = 64
NUM_AT_ONCE, TOKEN_BUDGET, MAX_PARTIAL_PROMPTS = 8, 512, 4
_NEVER_S = 1e9
_SAMPLE = SampledToken(0)
Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class PromptTotals:
    """Tokens of all prompts, and those that were computed; steps; window parts that gave way."""

    num_tokens: int
    num_computed: int
    num_steps: int
    num_slots_evicted: int

    @property
    def cached_share(self) -> float:
        """Share of the tokens that the cache had."""
        return 1.0 - self.num_computed / self.num_tokens


def replay(prompts: Prompts, arm: PoolArm) -> PromptTotals:
    """Serves all prompts, each of which fits the pool."""
    plan, cache = arm.plan, PrefixCache(PagePool(arm.plan.num_pages))
    if plan.num_slots is not None:
        cache.window = arm.by_pages
        cache.pool.add_window_slots(plan.num_slots, cache.window.num_parts + 1)
    exports = ExportTable(cache.pool, _NEVER_S, grants_leases=True)
    order = PolicySettings(PrefillPolicy.SRPT)
    limits = PrefillLimits(1, TOKEN_BUDGET // PAGE_SIZE, MAX_PARTIAL_PROMPTS, plan.num_pages, 0, order)
    scheduler = PrefillScheduler(cache, exports, limits, PageChecks(cache))
    num_come = num_ended = num_computed = num_steps = 0
    while num_ended < len(prompts):
        while num_come < len(prompts) and num_come - num_ended < NUM_AT_ONCE:
            if scheduler.add(_request(num_come, prompts[num_come]), 0, _NEVER_S, 0.0):
                raise RuntimeError(f"prompt {num_come} does not fit the pool")
            num_come += 1
        batch = scheduler.schedule(float(num_steps))
        if batch is None:
            raise RuntimeError(f"step {num_steps}: {num_come - num_ended} prompts wait and none runs")
        num_steps, num_computed = num_steps + 1, num_computed + batch.num_tokens
        for effect in scheduler.commit(batch, _output(batch), float(num_steps)):
            if isinstance(effect, Seal):
                exports.commit(effect.id)
                num_ended += 1
    windows = cache.pool.windows
    return PromptTotals(sum(map(len, prompts)), num_computed, num_steps, 0 if windows is None else windows.num_evicted)


def _request(number: int, tokens: tuple[int, ...]) -> EngineRequest:
    id = AttemptId(RequestId(str(number)), 1)
    return EngineRequest(id, tokens, len(tokens), SamplingParams(temperature=0.0), StopParams(1))


def _output(batch: Batch) -> StepOutput:
    return StepOutput(tuple(() if row.sample is None else (_SAMPLE,) for row in batch.rows))


def mooncake(path: Path, num_prompts: int) -> Prompts:
    """The first prompts of a trace. Their tokens name their blocks."""
    block = scaled_block_tokens(1 / PAGE_SIZE)
    rows = scale(read_mooncake(path)[:num_prompts], length=1 / PAGE_SIZE, rate=1.0)
    return [tuple(id for id in row.block_ids for _ in range(block))[: row.num_input_tokens] for row in rows]


def system_prompts(num_prompts: int) -> Prompts:
    """See the module."""
    rng, prefix, own = random.Random(0), 2048 // PAGE_SIZE, 512 // PAGE_SIZE
    return [(rng.randrange(32),) * prefix + (100 + number,) * own for number in range(num_prompts)]


def short_chats(num_prompts: int) -> Prompts:
    """See the module."""
    rng, size, chats = random.Random(0), 128 // PAGE_SIZE, [list[int]() for _ in range(400)]
    prompts = []
    for number in range(num_prompts):
        chat = rng.choice(chats)
        if len(chat) == 16 * size:
            chat.clear()
        chat += [number] * size
        prompts.append(tuple(chat))
    return prompts


def main() -> None:
    """Prints one table a shape and pool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gemma-3-27b", "gpt-oss-20b"])
    parser.add_argument("--pages", nargs="+", type=int, default=[4_000, 16_000])
    parser.add_argument("--prompts", type=int, default=3000)
    parser.add_argument("--windows", nargs="*", type=int, default=[4])
    parser.add_argument("--mooncake", type=Path)
    options = parser.parse_args()
    loads = {"system prompts": system_prompts(options.prompts), "short chats": short_chats(options.prompts)}
    if options.mooncake:
        loads["Mooncake conversation"] = mooncake(options.mooncake, options.prompts)
    for shape in options.shapes:
        for num_pages in options.pages:
            pools = arms(shape, num_pages, options.windows, PAGE_SIZE)
            print(f"{shape}, bytes of {num_pages:,} whole pages\n")
            print("| prompts | slots | pages | window slots | cached | computed | steps | slots evicted |")
            print("|---" * 8 + "|")
            for name, prompts in loads.items():
                fitting = [prompt for prompt in prompts if len(prompt) <= min(arm.plan.num_pages for arm in pools)]
                for arm in pools:
                    found, plan = replay(fitting, arm), arm.plan
                    counts = f"{found.num_computed:,} | {found.num_steps:,} | {found.num_slots_evicted:,}"
                    sizes = f"{plan.num_pages:,} | {plan.num_slots or '-'}"
                    print(f"| {name} | {arm.name} | {sizes} | {found.cached_share:.1%} | {counts} |", flush=True)
            print()


if __name__ == "__main__":
    main()
