"""Tokens a second with drafts over those without, by drafter and number of rows.

    python -m bench.speculation.ratios [--shape m32] [--batches 1 4 8 32] [--texts copy prose] [--rotations 8]

Every step is the model's own, on the worker's scheduler, runner, step-time model and draft budget. The sampler's draw
is then replaced by the recorded token of its place. So cost, lookup and acceptance are real, and the output is known.
An oracle drafter is right with a set chance; with a tree, at the first two depths a second child is right in half of
the other cases. `nothing proposed` is what a drafter costs that finds nothing.

Arms take turns, a block each, with one compute thread. A ratio compares blocks of one rotation; `off again` shows what
is noise. Times are CPU time of the engine's thread; wall time stands beside it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from baton.domain.ids import AttemptId, RequestId, WorkerId
from baton.domain.request import EngineRequest, SampledToken, StopParams
from baton.domain.timing.attempt_times import ImportTimes
from baton.domain.timing.step_time import StepTimeModel
from baton.engine.drafts.base import Drafter
from baton.engine.drafts.budget import DraftBudget
from baton.engine.drafts.policy import MAX_DRAFT_TOKENS, DraftPolicy
from baton.engine.drafts.registry import find_drafter
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
from baton.services.decode.kv_import import ImportedPrompt, ImportLimits
from baton.services.decode.rows.rules import RowRules
from baton.services.decode.scheduler import DecodeScheduler
from bench.engine.bench_engine import GREEDY
from bench.harness.model_shapes import SHAPES
from bench.harness.random_models import save_random_model
from bench.harness.signals import run_command
from bench.speculation.transcripts import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    NothingDrafter,
    RecordedOutput,
    TranscriptDrafter,
    TranscriptRunner,
    transcripts,
)

PAGE_SIZE = 16
OFF, AGAIN, EMPTY, NGRAM = "off", "off again", "nothing proposed", "ngram"
ORACLES = {f"oracle {chance}": chance for chance in (0.0, 0.3, 0.6, 0.9)}
TREE_ORACLES = {f"oracle {chance}, tree 2,2": chance for chance in (0.0, 0.6)}
ARMS = (OFF, AGAIN, EMPTY, NGRAM, *ORACLES, *TREE_ORACLES)
TREE_DEPTH = 2
_SOURCE = WorkerId("prefill-0")
_NO_TIMES = ImportTimes("", "", 0, 0, 0, 0, 0, 0, 0, "v3", 0)


@dataclass(slots=True)
class BlockTimes:
    """Tokens that an arm emitted in a block, and the seconds that they took."""

    num_tokens: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    num_steps: int = 0


class DraftArm:
    """One arm: a decode scheduler with `num_rows` rows, of which an ended one is replaced at once."""

    def __init__(self, model: LoadedModel, arm: str, num_rows: int, texts: Iterator[RecordedOutput], seed: int) -> None:
        num_pages = num_rows * (3 + (max(PROMPT_TOKENS, OUTPUT_TOKENS) + OUTPUT_TOKENS) // PAGE_SIZE)
        memory = PageMemory(num_pages, model.geometry.page_bytes, model.geometry.part_ends, prefault=True)
        runner = ModelRunner(model, PageStorage.on_memory(model.geometry, memory))
        self._runner = TranscriptRunner(runner)
        self._cache = PrefixCache(PagePool(num_pages))
        imports = ImportTable(self._cache, ImportLimits(PAGE_SIZE, num_rows, num_pages, 3600.0))
        self._step_time = StepTimeModel()
        self._vocab_size = model.config.vocab_size
        drafter = self._drafter(arm, seed)
        budget = DraftBudget(self._step_time)
        self.drafts = None
        if drafter is not None:
            self.drafts = DraftPolicy(drafter, MAX_DRAFT_TOKENS, PAGE_SIZE, self._cache.pool, budget)
        self._scheduler = DecodeScheduler(imports, SwapSpace(0), PAGE_SIZE, rules=RowRules(drafts=self.drafts))
        self._texts, self._names, self._num_rows = texts, count(), num_rows

    def run(self, num_tokens: int) -> BlockTimes:
        """Steps until a block of at least `num_tokens` is emitted."""
        block = BlockTimes()
        while block.num_tokens < num_tokens:
            while self._scheduler.num_rows < self._num_rows:
                self._add_row()
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            block.num_tokens += self._step()
            block.cpu_s += time.thread_time() - cpu_s
            block.wall_s += time.perf_counter() - wall_s
            block.num_steps += 1
        return block

    def _step(self) -> int:
        batch = self._scheduler.schedule(0.0)
        assert batch is not None
        began_s = time.thread_time()
        output = self._runner.run(batch)
        self._step_time.observe(shape_of(batch), time.thread_time() - began_s)
        effects = self._scheduler.commit(batch, output, 0.0)
        return sum(len(effect.tokens) for effect in effects if isinstance(effect, EmitTokens))

    def _add_row(self) -> None:
        """A row whose prompt was imported. Its pages hold numbers of earlier rows, which cost what others do."""
        text = next(self._texts)
        id = AttemptId(RequestId(f"r{next(self._names)}"), 1)
        self._runner.texts[id] = (*text.prompt, *text.output)
        request = EngineRequest(id, text.prompt, len(text.prompt), GREEDY, StopParams(len(text.output)))
        first = SampledToken(text.output[0])
        table = PageTable(self._cache, PAGE_SIZE, id.request_id, Hold.LIVE)
        assert table.extend(len(text.prompt) + 1)
        self._scheduler.add(ImportedPrompt(request, table, first, _SOURCE, 0, 0.0, _NO_TIMES))

    def _drafter(self, arm: str, seed: int) -> Drafter | None:
        if arm == EMPTY:
            return NothingDrafter()
        if arm in ORACLES:
            return TranscriptDrafter(self._runner.texts, ORACLES[arm], seed)
        if arm in TREE_ORACLES:
            return TranscriptDrafter(self._runner.texts, TREE_ORACLES[arm], seed, TREE_DEPTH)
        entry = find_drafter(NGRAM) if arm == NGRAM else None
        return None if entry is None else entry.make(self._vocab_size)


def measure(model: LoadedModel, kind: str, num_rows: int, rotations: int, num_tokens: int, seed: int) -> None:
    """Prints a line for each arm."""
    vocab_size = model.config.vocab_size
    arms = [arm for arm in ARMS if kind == "copy" or arm in (OFF, AGAIN, EMPTY, NGRAM)]
    runs = {arm: DraftArm(model, arm, num_rows, transcripts(kind, vocab_size, seed), seed) for arm in arms}
    for run in runs.values():
        run.run(num_tokens)  # does not count: the step-time model and the indexes are new
    blocks: dict[str, list[BlockTimes]] = {arm: [] for arm in arms}
    rng = random.Random(seed)
    for _ in range(rotations):
        for arm in rng.sample(arms, len(arms)):
            blocks[arm].append(runs[arm].run(num_tokens))
    for arm in arms[1:]:
        print_arm(kind, num_rows, arm, blocks[arm], blocks[OFF], runs[arm].drafts)


def print_arm(
    kind: str,
    num_rows: int,
    arm: str,
    ours: Sequence[BlockTimes],
    off: Sequence[BlockTimes],
    drafts: DraftPolicy | None,
) -> None:
    """Prints the line of one arm, from its blocks and those without drafts of the same rotations."""
    cpu, wall = (_ratios(ours, off, seconds) for seconds in (_cpu, _wall))
    per_row_step = sum(block.num_tokens for block in ours) / sum(block.num_steps for block in ours) / num_rows
    accepted = "-" if drafts is None else f"{drafts.totals.num_accepted / max(1, drafts.totals.num_drafts):.2f}"
    print(
        f"| {kind} | {num_rows} | {arm} | {_band(cpu)} | {_band(wall)} | {per_row_step:.2f} | {accepted} |", flush=True
    )


def _ratios(
    ours: Sequence[BlockTimes], off: Sequence[BlockTimes], seconds: Callable[[BlockTimes], float]
) -> list[float]:
    """Tokens a second over those of the block without drafts in the same rotation."""
    pairs = zip(ours, off, strict=True)
    return [(a.num_tokens / seconds(a)) / (b.num_tokens / seconds(b)) for a, b in pairs]


def _cpu(block: BlockTimes) -> float:
    return block.cpu_s


def _wall(block: BlockTimes) -> float:
    return block.wall_s


def _band(ratios: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="m32", choices=sorted(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8, 32])
    parser.add_argument("--texts", nargs="+", default=["copy", "prose"], choices=("copy", "prose"))
    parser.add_argument("--rotations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of a block of up to 4 rows")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    configure_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        directory = Path(folder)
        save_random_model(SHAPES[flags.shape], directory, seed=flags.seed)
        model = load_model(directory, page_size=PAGE_SIZE)
        print(f"{flags.shape}: {model.config.dtype}, {model.report.kernel_note}", flush=True)
        print("| text | rows | drafter | CPU time | wall time | tokens a row step | accepted |")
        print("|---|---|---|---|---|---|---|")
        for kind in flags.texts:
            for num_rows in flags.batches:
                measure(model, kind, num_rows, flags.rotations, flags.tokens * max(1, num_rows // 4), flags.seed)


if __name__ == "__main__":
    run_command(main)
