"""G1, G2 and G8: the engine's speed on one core, over the ceilings of that core at the same time.

    python -m bench.engine.steps [--shape qwen2.5-0.5b] [--dtype auto] [--decoder auto] [--kernels auto]
        [--batches 1 4 8 32] [--contexts 256 2048] [--prefills 512 2048] [--parts decode prefill host]
        [--rotations 10] [--seed 0] [--result FILE]

A model of random weights is saved and loaded as any other; steps go through the worker's own runner, on one core with
one compute thread. G1: bytes that a decode step must read (weights once and the rows' KV), over its time, over this
core's reading speed. G2: operations that a prompt needs at least, over its time, over this core's best matrix product;
and the speed in chunks of 64 over the speed in one chunk. G8: the share of a decode turn's CPU time outside the forward
pass, with the worker's own loop and scheduler.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from baton.services.cli.doctor.host import cpu_name
from baton.settings.process import limit_cores, limit_threads, usable_cores
from bench.harness.model_shapes import SHAPES
from bench.harness.rotations import Finding, Remark, ResultFile, command_remark, rotate, table_of
from bench.harness.signals import run_command

if TYPE_CHECKING:
    from bench.engine.arms import EnginePlan
    from bench.engine.bench_engine import BenchEngine
    from bench.harness.ceilings import GemmProbe, ReadProbe

PARTS = ("decode", "prefill", "host")
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One run's flags."""

    shape: str
    dtype: str
    decoder: str
    kernels: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefills: tuple[int, ...]
    parts: tuple[str, ...]
    turns: int
    block_s: float
    max_pool_mib: int
    core: int
    rotations: int
    seed: int
    model_dir: Path | None
    result: Path | None


@dataclass(frozen=True, slots=True)
class EngineResult:
    """Findings and remarks of a run."""

    findings: tuple[Finding, ...]
    remarks: tuple[Remark, ...]


def measure(options: EngineOptions, console: Console) -> EngineResult:
    """Runs all rotations on this process's core. Raises `BatonError` for a model that cannot be loaded."""
    # Imported here: loading these modules reads the sizes of thread pools.
    from baton.model.cpu import configure_threads
    from bench.engine.arms import findings_of, make_arms, needs_gemm
    from bench.engine.decode_loop import EffectSink
    from bench.harness.ceilings import GemmProbe, ReadProbe

    configure_threads(1)
    plan = _plan(options)
    with _model_directory(options, console) as directory, EffectSink() as sink:
        with console.status("loading the model"):
            engine = _bench_engine(options, directory)
        with console.status("looking for this core's ceilings"):
            read, gemm = ReadProbe(), GemmProbe()
        arms, skipped = make_arms(plan, engine, sink)
        with console.status("a first prompt of each kind, which does not count"):
            for name in filter(needs_gemm, arms):
                arms[name]()
        remarks = [*_remarks(options, engine, read, gemm), *skipped]
        found = partial(findings_of, plan, engine)
        blocks = rotate(
            arms,
            lambda arm: gemm() if needs_gemm(arm) else read(),
            num_rotations=options.rotations,
            seed=options.seed,
            console=console,
            on_rotation=ResultFile(options.result, "engine", options.rotations, found, remarks).write,
        )
    return EngineResult(tuple(found(blocks)), tuple(remarks))


def parse(arguments: Sequence[str] | None = None) -> EngineOptions:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--decoder", default="auto", choices=("auto", "lean", "stock"))
    parser.add_argument("--kernels", default="auto", choices=("auto", "never"))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 2048])
    parser.add_argument("--prefills", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--turns", type=int, default=20, help="turns of the decode loop a block")
    parser.add_argument("--block-s", type=float, default=0.5, help="seconds of decode steps a block")
    parser.add_argument("--max-pool-mib", type=int, default=4096, help="arms that need more KV are left out")
    parser.add_argument("--core", type=int, default=usable_cores()[-1])
    parser.add_argument("--rotations", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-dir", type=Path, help="where the model is kept; default: a temporary directory")
    parser.add_argument("--result", type=Path)
    flags: dict[str, Any] = vars(parser.parse_args(arguments))
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()}
    return EngineOptions(**given)


def main() -> None:
    """Command line."""
    options = parse()
    limit_threads(1)
    limit_cores([options.core])
    run = measure(options, Console(stderr=True))
    console = Console()
    for remark in run.remarks:
        console.print(f"{remark.name}: {remark.text}", markup=False, highlight=False)
    console.print(table_of(run.findings))


def _plan(options: EngineOptions) -> EnginePlan:
    from bench.engine.arms import CHUNK_TOKENS, UNCHUNKED_TOKENS, DecodeArm, EngineArm, EnginePlan, HostArm, PrefillArm

    arms: list[EngineArm] = []
    if "decode" in options.parts:
        arms += [DecodeArm(rows, context, options.block_s) for rows in options.batches for context in options.contexts]
        arms.append(DecodeArm(options.batches[0], options.contexts[0], options.block_s, again=True))
    if "prefill" in options.parts:
        arms += [PrefillArm(num_tokens) for num_tokens in sorted({*options.prefills, UNCHUNKED_TOKENS})]
        arms.append(PrefillArm(UNCHUNKED_TOKENS, CHUNK_TOKENS))
    if "host" in options.parts:
        arms += [HostArm(rows, options.contexts[0], options.turns) for rows in options.batches]
    return EnginePlan(tuple(arms))


@contextlib.contextmanager
def _model_directory(options: EngineOptions, console: Console) -> Iterator[Path]:
    """Yields a directory with the model, created if missing; removes it unless `--model-dir` names it."""
    from bench.harness.random_models import save_random_model

    with contextlib.ExitStack() as stack:
        directory = options.model_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        if not (directory / "config.json").is_file():
            with console.status(f"making a random {options.shape}"):
                save_random_model(SHAPES[options.shape], directory, seed=options.seed)
        yield directory


def _bench_engine(options: EngineOptions, directory: Path) -> BenchEngine:
    from baton.model.loading.config import DtypeChoice
    from baton.model.loading.kernel_choice import KernelUse
    from baton.model.loading.loader import DecoderChoice
    from bench.engine.bench_engine import make_bench_engine

    return make_bench_engine(
        SHAPES[options.shape],
        directory,
        dtype=DtypeChoice(options.dtype),
        decoder=DecoderChoice(options.decoder),
        kernels=KernelUse(options.kernels),
        page_size=PAGE_SIZE,
        max_pool_bytes=options.max_pool_mib * 2**20,
        num_pages_wanted=_plan(options).num_pages,
        seed=options.seed,
    )


def _remarks(options: EngineOptions, engine: BenchEngine, read: ReadProbe, gemm: GemmProbe) -> list[Remark]:
    report, config = engine.model.report, engine.model.config
    weights = report.weights
    ways = ", ".join(f"{name} {speed / 1e9:.1f}" for name, speed in read.ceiling.speeds)
    gemms = ", ".join(f"{dtype} {best.speed / 1e9:.1f} ({best.name})" for dtype, best in gemm.by_dtype.items())
    return [
        command_remark("bench.engine.steps"),
        Remark("machine", f"{cpu_name() or platform.machine()}, core {options.core}, one compute thread"),
        Remark("model", f"{options.shape}, random weights, {report.num_parameters / 1e6:.0f} M, {config.dtype}"),
        Remark("decoder", f"stock: {report.stock_note}" if report.stock_note else "lean"),
        Remark("kernels", report.kernel_note),
        Remark("matrices", f"{weights.num_matrices} {weights.layout.value} {weights.note}".rstrip()),
        Remark("reading, GB/s", f"{read.ceiling.name} is the probe; {ways}"),
        Remark("matrix products, GFLOP/s", f"{gemm.dtype} is the probe; {gemms}"),
    ]


if __name__ == "__main__":
    run_command(main)
