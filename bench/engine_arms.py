"""What `bench.engine` measures, arm by arm, and how the table is made of it. Everything here computes on one thread.

Three kinds of arms, each of which knows its name, the pages it takes, how it runs and what its blocks say.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bench.decode_turns import Outside, host_shares, pages_needed
from bench.rotations import Arm, Block, Finding, Remark, Timed, find
from bench.workbench import Workbench, run_all, time_steps

BY_CPU = ", by CPU time"
MIN_STEPS = 3
WHOLE_TOKENS = 1024
CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class DecodeArm:
    """Steps of `num_rows` rows that see `context` tokens each, for about `block_s` seconds a block."""

    num_rows: int
    context: int
    block_s: float
    again: bool = False

    @property
    def name(self) -> str:
        return f"decode {self.num_rows} x {self.context}{' again' if self.again else ''}"

    def num_pages(self, page_size: int) -> int:
        return self.num_rows * -(-self.context // page_size)

    def run(self, workbench: Workbench, outside: Outside) -> Timed:
        """One step again and again: it computes the same token at the same place every time."""
        batch = workbench.decode_batch(self.num_rows, self.context)
        workbench.runner.run(batch)  # what the arm before left in the caches
        return time_steps(lambda: workbench.runner.run(batch), block_s=self.block_s, min_steps=MIN_STEPS)

    def findings(self, workbench: Workbench, blocks: Sequence[Block]) -> list[Finding]:
        """Milliseconds a step, and what it must read over the ceiling. Of the second run: its time over the first's."""
        if self.again:
            arms = (self.name, self.name.removesuffix(" again"))
            return [find(f"{self.name}: step / first (A/A)", "", blocks, arms, _time_ratio)]
        step = find(f"{self.name}: step", "ms", blocks, (self.name,), lambda group: 1e3 * _median(group[0].values))
        work = workbench.step_bytes(self.num_rows, self.context)
        return [step, *_shares(f"{self.name}: read / ceiling", self.name, work, blocks)]


@dataclass(frozen=True, slots=True)
class PrefillArm:
    """One prompt a block: it takes seconds. `chunk_tokens` None: in one step."""

    num_tokens: int
    chunk_tokens: int | None = None

    @property
    def name(self) -> str:
        chunks = "" if self.chunk_tokens is None else f" in chunks of {self.chunk_tokens}"
        return f"prefill {self.num_tokens}{chunks}"

    def num_pages(self, page_size: int) -> int:
        return -(-self.num_tokens // page_size)

    def run(self, workbench: Workbench, outside: Outside) -> Timed:
        """From the first chunk to the first token."""
        batches = workbench.prefill_batches(self.num_tokens, self.chunk_tokens or self.num_tokens)
        return time_steps(lambda: run_all(workbench.runner, batches), block_s=0.0, min_steps=1)

    def findings(self, workbench: Workbench, blocks: Sequence[Block]) -> list[Finding]:
        """Tokens a second, and what had to be computed over the ceiling. In chunks: the speed over that in one step."""
        if self.chunk_tokens is not None:
            name, arms = f"{self.name}: speed / in one", (PrefillArm(self.num_tokens).name, self.name)
            by_cpu = find(f"{name}{BY_CPU}", "", blocks, arms, _cpu_ratio, keep=lambda block: block.has_steady_probe)
            return [find(name, "", blocks, arms, _time_ratio), by_cpu]
        speed = find(
            f"{self.name}: speed", "tokens/s", blocks, (self.name,),
            lambda group: self.num_tokens / _median(group[0].values),
        )  # fmt: skip
        work = workbench.shape.prefill_flops(self.num_tokens)
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

    def run(self, workbench: Workbench, outside: Outside) -> list[float]:
        """The host's share of every turn."""
        return host_shares(workbench, outside, self.num_rows, self.context, self.num_turns)

    def findings(self, workbench: Workbench, blocks: Sequence[Block]) -> list[Finding]:
        """The share of the median turn."""
        return [find(f"{self.name}: host / turn", "", blocks, (self.name,), lambda group: _median(group[0].values))]


EngineArm = DecodeArm | PrefillArm | HostArm


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """All arms of a run."""

    arms: tuple[EngineArm, ...]

    def num_pages(self, page_size: int) -> int:
        """Pages that the largest arm takes."""
        return max(arm.num_pages(page_size) for arm in self.arms)


def make_arms(plan: EnginePlan, workbench: Workbench, outside: Outside) -> tuple[dict[str, Arm], list[Remark]]:
    """The arms that the pool has room for, and a remark on each that it has not."""
    arms: dict[str, Arm] = {}
    left_out: list[Remark] = []
    for arm in plan.arms:
        num_pages = arm.num_pages(workbench.page_size)
        if num_pages <= workbench.num_pages:
            arms[arm.name] = partial(arm.run, workbench, outside)
        else:
            mib = num_pages * workbench.model.geometry.page_bytes / 2**20
            left_out.append(Remark("left out", f"{arm.name}: it takes a pool of {mib:.0f} MiB (--max-pool-mib)"))
    return arms, left_out


def needs_gemm(arm: str) -> bool:
    """Whether the yardstick of the arm of this name is the matrix product; the others' is reading."""
    return arm.startswith("prefill")


def findings_of(plan: EnginePlan, workbench: Workbench, blocks: Sequence[Block]) -> list[Finding]:
    """The table."""
    ran = {block.arm for block in blocks}
    return [finding for arm in plan.arms if arm.name in ran for finding in arm.findings(workbench, blocks)]


def _shares(name: str, arm: str, work: float, blocks: Sequence[Block]) -> list[Finding]:
    """Work over time over the ceiling, by the wall's clock and by CPU time.

    CPU time leaves out what others took of the core, so more of a busy machine's rotations count; what they took of its
    caches and its memory is still in it.
    """

    def by_wall(group: tuple[Block, ...]) -> float:
        return work / _median(group[0].values) / group[0].probe

    def by_cpu(group: tuple[Block, ...]) -> float:
        return work / _median(group[0].cpu_s) / group[0].probe

    wall = find(name, "", blocks, (arm,), by_wall)
    return [wall, find(f"{name}{BY_CPU}", "", blocks, (arm,), by_cpu, keep=lambda block: block.has_steady_probe)]


def _time_ratio(group: tuple[Block, ...]) -> float:
    return _median(group[0].values) / _median(group[1].values)


def _cpu_ratio(group: tuple[Block, ...]) -> float:
    return _median(group[0].cpu_s) / _median(group[1].cpu_s)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
