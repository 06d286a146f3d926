"""The arms of `bench.engine.steps` and the findings of each. Everything here computes on one thread.

Three kinds of arms. Each has a name, a number of pages, a run and the findings of its blocks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from baton.domain.arithmetic import ceil_div
from bench.engine.bench_engine import BenchEngine, run_all, time_steps
from bench.engine.decode_loop import EffectSink, host_time_shares, pages_needed
from bench.harness.rotations import Arm, Block, Finding, Remark, TimedSamples, make_finding

BY_CPU = ", by CPU time"
MIN_STEPS = 3
UNCHUNKED_TOKENS = 1024
CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class DecodeArm:
    """Steps of `num_rows` rows with `context` tokens each, for about `block_s` seconds a block."""

    num_rows: int
    context: int
    block_s: float
    again: bool = False

    @property
    def name(self) -> str:
        return f"decode {self.num_rows} x {self.context}{' again' if self.again else ''}"

    def num_pages(self, page_size: int) -> int:
        return self.num_rows * ceil_div(self.context, page_size)

    def run(self, engine: BenchEngine, sink: EffectSink) -> TimedSamples:
        """Repeats one step, which computes the same token at the same position every time."""
        batch = engine.decode_batch(self.num_rows, self.context)
        engine.runner.run(batch)  # replaces what the previous arm left in the caches
        return time_steps(lambda: engine.runner.run(batch), block_s=self.block_s, min_steps=MIN_STEPS)

    def findings(self, engine: BenchEngine, blocks: Sequence[Block]) -> list[Finding]:
        """Milliseconds a step, and its reads over the ceiling. Of the repeated arm: its time over the first's."""
        if self.again:
            arms = (self.name, self.name.removesuffix(" again"))
            return [make_finding(f"{self.name}: step / first (A/A)", "", blocks, arms, _time_ratio)]
        step = make_finding(
            f"{self.name}: step", "ms", blocks, (self.name,), lambda group: 1e3 * _median(group[0].values)
        )
        work = engine.step_bytes(self.num_rows, self.context)
        return [step, *_shares(f"{self.name}: read / ceiling", self.name, work, blocks)]


@dataclass(frozen=True, slots=True)
class PrefillArm:
    """One prompt a block. `chunk_tokens` None: in one step."""

    num_tokens: int
    chunk_tokens: int | None = None

    @property
    def name(self) -> str:
        chunks = "" if self.chunk_tokens is None else f" in chunks of {self.chunk_tokens}"
        return f"prefill {self.num_tokens}{chunks}"

    def num_pages(self, page_size: int) -> int:
        return ceil_div(self.num_tokens, page_size)

    def run(self, engine: BenchEngine, sink: EffectSink) -> TimedSamples:
        """From the first chunk to the first token."""
        batches = engine.prefill_batches(self.num_tokens, self.chunk_tokens or self.num_tokens)
        return time_steps(lambda: run_all(engine.runner, batches), block_s=0.0, min_steps=1)

    def findings(self, engine: BenchEngine, blocks: Sequence[Block]) -> list[Finding]:
        """Tokens a second, and its operations over the ceiling. In chunks: the speed over that in one step."""
        if self.chunk_tokens is not None:
            name, arms = f"{self.name}: speed / in one", (PrefillArm(self.num_tokens).name, self.name)
            by_cpu = make_finding(
                f"{name}{BY_CPU}", "", blocks, arms, _cpu_ratio, keep=lambda block: block.has_steady_probe
            )
            return [make_finding(name, "", blocks, arms, _time_ratio), by_cpu]
        speed = make_finding(
            f"{self.name}: speed", "tokens/s", blocks, (self.name,),
            lambda group: self.num_tokens / _median(group[0].values),
        )  # fmt: skip
        work = engine.shape.prefill_flops(self.num_tokens)
        return [speed, *_shares(f"{self.name}: arithmetic / ceiling", self.name, work, blocks)]


@dataclass(frozen=True, slots=True)
class HostArm:
    """`num_turns` turns a block of the worker's own loop."""

    num_rows: int
    context: int
    num_turns: int

    @property
    def name(self) -> str:
        return f"loop {self.num_rows} x {self.context}"

    def num_pages(self, page_size: int) -> int:
        return pages_needed(page_size, self.num_rows, self.context, self.num_turns)

    def run(self, engine: BenchEngine, sink: EffectSink) -> list[float]:
        """The host's share of every turn."""
        return host_time_shares(engine, sink, self.num_rows, self.context, self.num_turns)

    def findings(self, engine: BenchEngine, blocks: Sequence[Block]) -> list[Finding]:
        """The share of the median turn."""
        return [
            make_finding(f"{self.name}: host / turn", "", blocks, (self.name,), lambda group: _median(group[0].values))
        ]


EngineArm = DecodeArm | PrefillArm | HostArm


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """All arms of a run."""

    arms: tuple[EngineArm, ...]

    def num_pages(self, page_size: int) -> int:
        """Pages that the largest arm takes."""
        return max(arm.num_pages(page_size) for arm in self.arms)


def make_arms(plan: EnginePlan, engine: BenchEngine, sink: EffectSink) -> tuple[dict[str, Arm], list[Remark]]:
    """Arms that fit the pool, and a remark on each that does not."""
    arms: dict[str, Arm] = {}
    skipped: list[Remark] = []
    for arm in plan.arms:
        num_pages = arm.num_pages(engine.page_size)
        if num_pages <= engine.num_pages:
            arms[arm.name] = partial(arm.run, engine, sink)
        else:
            mib = num_pages * engine.model.geometry.page_bytes / 2**20
            skipped.append(Remark("left out", f"{arm.name}: it takes a pool of {mib:.0f} MiB (--max-pool-mib)"))
    return arms, skipped


def needs_gemm(arm: str) -> bool:
    """True if the arm's baseline is the matrix product; the other arms' baseline is the memory read."""
    return arm.startswith("prefill")


def findings_of(plan: EnginePlan, engine: BenchEngine, blocks: Sequence[Block]) -> list[Finding]:
    """The table."""
    ran = {block.arm for block in blocks}
    return [finding for arm in plan.arms if arm.name in ran for finding in arm.findings(engine, blocks)]


def _shares(name: str, arm: str, work: float, blocks: Sequence[Block]) -> list[Finding]:
    """Work over time over the ceiling, by wall time and by CPU time.

    CPU time excludes other processes' use of the core, so more rotations of a busy machine count. Disturbed caches and
    memory are still included.
    """

    def by_wall(group: tuple[Block, ...]) -> float:
        return work / _median(group[0].values) / group[0].probe

    def by_cpu(group: tuple[Block, ...]) -> float:
        return work / _median(group[0].cpu_s) / group[0].probe

    wall = make_finding(name, "", blocks, (arm,), by_wall)
    return [
        wall,
        make_finding(f"{name}{BY_CPU}", "", blocks, (arm,), by_cpu, keep=lambda block: block.has_steady_probe),
    ]


def _time_ratio(group: tuple[Block, ...]) -> float:
    return _median(group[0].values) / _median(group[1].values)


def _cpu_ratio(group: tuple[Block, ...]) -> float:
    return _median(group[0].cpu_s) / _median(group[1].cpu_s)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
