"""How long a worker takes to start, and how much memory two of them use, with and without shared weights.

    python -m bench.system.worker_start MODEL [--rounds 5] [--pool-mib 64] [--dtype auto] [--markdown FILE]

A start is a process from its launch until its engine is built: interpreter, all imports of a decode worker, model,
self-checks, pool. No router, no store. Arms, in turns, in every round:

- `private`: two workers that keep their own weights, one after the other, both alive;
- `packing`: a first worker without a weight file, which packs;
- `first`, `second`: two workers that find the file, one after the other, both alive.

Wall time is that of the machine as it is, CPU time (user and system) is the kernel's count for the process. PSS is the
sum over both workers, from `smaps_rollup`. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
ARMS = ("private", "packing", "first", "second")


@dataclass(frozen=True)
class WorkerStart:
    """One start. `weight_mib`: bytes of weights that a step reads; `shared_mib`: those in a shared mapping."""

    wall_s: float
    cpu_s: float
    weight_mib: float
    shared_mib: float


class StartedWorker:
    """A process whose engine is built."""

    def __init__(self, flags: argparse.Namespace, cache: Path, sharing: str) -> None:
        command = [sys.executable, "-m", "bench.system.worker_start", str(flags.model), "--child", sharing]
        command += ["--cache", str(cache), "--pool-mib", str(flags.pool_mib), "--dtype", flags.dtype]
        began = time.monotonic()
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._popen.stdout is not None
        line = next(line for line in self._popen.stdout if line.startswith("{"))
        wall_s, found = time.monotonic() - began, json.loads(line)
        self.start = WorkerStart(wall_s, found["cpu_s"], found["weights"] / MIB, found["shared"] / MIB)

    def pss_mib(self) -> float:
        """Its proportional set size."""
        text = Path(f"/proc/{self._popen.pid}/smaps_rollup").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024

    def stop(self) -> None:
        """Ends it."""
        self._popen.kill()
        self._popen.communicate(timeout=30.0)


def child(flags: argparse.Namespace) -> None:
    """Builds a decode worker's engine, writes what it took, and waits."""
    from baton.engine.build import build_engine
    from baton.services.decode import app  # noqa: F401 - its imports are part of a start
    from baton.services.decode.settings import DecodeSettings
    from baton.telemetry import metrics

    settings = DecodeSettings(
        model=str(flags.model),
        port=0,
        metrics_port=0,
        dtype=flags.dtype,
        kv_memory_mib=flags.pool_mib,
        weight_sharing=flags.child,
        weight_cache_dir=flags.cache,
    )
    engine = build_engine(settings, 0, decodes=True)
    kinds = ("shared", "private")
    sizes = {kind: metrics.REGISTRY.get_sample_value("baton_weights_bytes", {"memory": kind}) or 0 for kind in kinds}
    answer = {"cpu_s": time.process_time(), "weights": sum(sizes.values()), "shared": sizes["shared"]}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    del engine


def measure_round(flags: argparse.Namespace, cache: Path) -> tuple[dict[str, WorkerStart], dict[str, float]]:
    """Starts by arm, and PSS of both workers by kind."""
    shutil.rmtree(cache, ignore_errors=True)
    starts: dict[str, WorkerStart] = {}
    pss: dict[str, float] = {}
    for kind, sharing, arms in (("private", "off", ("private", "")), ("shared", "always", ("first", "second"))):
        if kind == "shared":
            packing = StartedWorker(flags, cache, sharing)
            starts["packing"] = packing.start
            packing.stop()
        pair = []
        try:
            for arm in arms:
                pair.append(StartedWorker(flags, cache, sharing))
                starts[arm or "private, second"] = pair[-1].start
            pss[kind] = sum(worker.pss_mib() for worker in pair)
        finally:
            for worker in pair:
                worker.stop()
    return starts, pss


def spread(values: list[float], digits: int = 1) -> str:
    """Median and range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def report(rounds: list[tuple[dict[str, WorkerStart], dict[str, float]]], pool_mib: int) -> str:
    """Tables in Markdown."""
    by_arm: dict[str, list[WorkerStart]] = defaultdict(list)
    for starts, _ in rounds:
        for arm, start in starts.items():
            by_arm[arm].append(start)
    lines = ["| start | wall, s | CPU, s | weights, MiB | of them shared, MiB |", "|---|---|---|---|---|"]
    for arm, found in by_arm.items():
        wall, cpu = spread([start.wall_s for start in found]), spread([start.cpu_s for start in found])
        lines.append(f"| {arm} | {wall} | {cpu} | {found[-1].weight_mib:.0f} | {found[-1].shared_mib:.0f} |")
    lines += ["", "| two workers | PSS of both, MiB | (PSS - pools) / weights |", "|---|---|---|"]
    weights = by_arm["private"][-1].weight_mib
    for kind in ("private", "shared"):
        totals = [pss[kind] for _, pss in rounds]
        ratios = [(total - 2 * pool_mib) / weights for total in totals]
        lines.append(f"| {kind} | {spread(totals, 0)} | {spread(ratios, 2)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pool-mib", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        child(flags)
        return
    with tempfile.TemporaryDirectory(dir=flags.model.parent) as scratch:  # the disk that the model is on
        text = report([measure_round(flags, Path(scratch) / "cache") for _ in range(flags.rounds)], flags.pool_mib)
    sys.stdout.write(text)
    if flags.markdown:
        flags.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
