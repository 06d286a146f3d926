"""Tokens a second with a trained head over those without, with chains and with trees of drafts.

    python -m bench.speculation.heads [--batches 1 4 8] [--rotations 6]

The bundled model answers questions of the bundled corpus with its bundled head. Nothing is recorded: draws are the
model's own, and all arms emit the same tokens. A block is one batch of questions: prompts are computed first, then
steps are timed until an output has ended, so all rows of a timed step decode. Scheduler, runner, step-time model and
draft budget are the worker's. Arms take turns, with one compute thread; times are CPU time of the engine's thread.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from baton.bundled import HEAD_DIR, MODEL_DIR
from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import EngineRequest, StopParams
from baton.domain.timing.step_time import StepTimeModel
from baton.engine.chunking import ChunkBudget
from baton.engine.drafts.budget import DraftBudget
from baton.engine.drafts.policy import MAX_DRAFT_TOKENS, DraftPolicy
from baton.engine.drafts.runner_drafter import MAX_RUNNER_DRAFTS, RunnerDrafter
from baton.engine.runner import ModelRunner
from baton.engine.step_metrics import shape_of
from baton.kv.memory import PageMemory
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.swap_space import SwapSpace
from baton.model.cpu import configure_threads
from baton.model.loading.loader import LoadedModel, load_model
from baton.model.storage import PageStorage
from baton.services.decode.effects import EmitTokens
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import ImportLimits, LocalPrompt
from baton.services.decode.rows.rules import RowRules
from baton.services.decode.scheduler import DecodeScheduler
from bench.engine.bench_engine import GREEDY
from bench.harness.signals import run_command
from bench.speculation.ratios import AGAIN, OFF, PAGE_SIZE, BlockTimes, print_arm
from scripts.train_bundled_head import prompts

ARMS: dict[str, tuple[int, ...] | None] = {OFF: None, AGAIN: None, "head": (), "head, tree 3,2": (3, 2)}
"""Widths of trees; (): chains; None: no drafter."""
OUTPUT_TOKENS, PROMPT_BUDGET = 96, 512


def questions(seed: int, count: int, directory: Path = MODEL_DIR) -> list[list[int]]:
    """The tokens of so many prompts."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in itertools.islice(prompts(seed), count)]


class HeadArm:
    """One arm: a decode worker that computes its prompts itself. `widths`: see `ARMS`."""

    def __init__(self, model: LoadedModel, widths: tuple[int, ...] | None, num_rows: int, longest_prompt: int) -> None:
        num_pages = num_rows * (2 + (longest_prompt + OUTPUT_TOKENS + MAX_DRAFT_TOKENS) // PAGE_SIZE)
        memory = PageMemory(num_pages, model.geometry.page_bytes, model.geometry.part_ends, prefault=True)
        self._runner = ModelRunner(model, PageStorage.on_memory(model.geometry, memory))
        self._cache = PrefixCache(PagePool(num_pages))
        self._step_time = StepTimeModel()
        self.drafts = None
        if widths is not None:
            most, budget = MAX_DRAFT_TOKENS if widths else MAX_RUNNER_DRAFTS, DraftBudget(self._step_time)
            self.drafts = DraftPolicy(RunnerDrafter(widths), most, PAGE_SIZE, self._cache.pool, budget)
        imports = ImportTable(self._cache, ImportLimits(PAGE_SIZE, num_rows, num_pages, 3600.0))
        chunks, rules = ChunkBudget(PROMPT_BUDGET, PAGE_SIZE), RowRules(drafts=self.drafts)
        self._scheduler = DecodeScheduler(imports, SwapSpace(0), PAGE_SIZE, chunks, rules)
        self._names = itertools.count()

    def run(self, asked: Sequence[Sequence[int]]) -> tuple[BlockTimes, list[list[int]]]:
        """One block: the timed part of it, and the output of each prompt."""
        outputs = {self._add(prompt): list[int]() for prompt in asked}
        block = BlockTimes()
        while self._scheduler.num_rows:
            batch = self._scheduler.schedule(0.0)
            assert batch is not None
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            shape = shape_of(batch)
            output = self._runner.run(batch)
            self._step_time.observe(shape, time.thread_time() - cpu_s)
            emitted = [each for each in self._scheduler.commit(batch, output, 0.0) if isinstance(each, EmitTokens)]
            cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
            for each in emitted:
                outputs[each.id] += [token.token for token in each.tokens]
            if len(batch.rows) == len(asked) and not batch.num_prompt_tokens:
                block.num_tokens += sum(len(each.tokens) for each in emitted)
                block.num_steps += 1
                block.cpu_s += cpu_s
                block.wall_s += wall_s
        return block, list(outputs.values())

    def _add(self, prompt: Sequence[int]) -> AttemptId:
        id = AttemptId(RequestId(f"r{next(self._names)}"), 1)
        request = EngineRequest(id, tuple(prompt), len(prompt), GREEDY, StopParams(OUTPUT_TOKENS))
        table = PageTable(self._cache, PAGE_SIZE, id.request_id, Hold.LIVE)
        assert table.extend(len(prompt))
        self._scheduler.add_prompt(LocalPrompt(request, table, 0))
        return id


def measure(model: LoadedModel, num_rows: int, rotations: int, seed: int) -> None:
    """Prints a line for each arm. Raises `AssertionError` if an arm emits other tokens than the first."""
    asked = questions(seed, num_rows * (1 + rotations))
    longest = max(map(len, asked))
    arms = {arm: HeadArm(model, widths, num_rows, longest) for arm, widths in ARMS.items()}
    blocks: dict[str, list[BlockTimes]] = {arm: [] for arm in arms}
    rng = random.Random(seed)
    for rotation in range(1 + rotations):
        batch = asked[rotation * num_rows : (rotation + 1) * num_rows]
        outputs = {}
        for arm in rng.sample(list(arms), len(arms)):
            block, outputs[arm] = arms[arm].run(batch)
            if rotation:  # the first does not count: the step-time model is new
                blocks[arm].append(block)
        assert all(each == outputs[OFF] for each in outputs.values()), "drafts changed tokens"
    for arm in list(arms)[1:]:
        print_arm("answers", num_rows, arm, blocks[arm], blocks[OFF], arms[arm].drafts)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8, 32])
    parser.add_argument("--rotations", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    configure_threads(1)
    with torch.inference_mode():
        model = load_model(MODEL_DIR, page_size=PAGE_SIZE).with_head(HEAD_DIR)
        print(f"bundled: {model.config.dtype}, {model.report.kernel_note}", flush=True)
        print("| text | rows | drafter | CPU time | wall time | tokens a row step | accepted |")
        print("|---|---|---|---|---|---|---|")
        for num_rows in flags.batches:
            measure(model, num_rows, flags.rotations, flags.seed)


if __name__ == "__main__":
    run_command(main)
