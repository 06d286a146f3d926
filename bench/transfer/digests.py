"""Cost of page digests: prefill computes them, decode checks them.

    python -m bench.transfer.digests [--transports nixl stream] [--rotations 20] [--result FILE]

Every block pulls the same 64 MB pool with digests and without, one arm after the other in a random order; a third arm
only computes the digests of such a pool on one core, which is prefill's part. The baseline is a 64 MB copy.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.kv.memory import PageMemory
from baton.settings.ucx import prepare_environment
from baton.transfer.digest import digest_pages
from baton.transfer.factory import make_puller, usable_transports
from bench.harness.probes import PROBE_BYTES, MemcpyProbe
from bench.harness.rotations import Block, Finding, OnRotation, ResultFile, make_finding, rotate, table_of
from bench.harness.signals import run_command
from bench.transfer.throughput import PoolPuller
from tests.unit.transfer.source_process import SourceProcess, SourceSpec, filled_memory

COMPUTE = "compute"
CHECKED = "{} checked"
SEED = 0


@contextlib.contextmanager
def running_pairs(transport: str, memory: PageMemory, digests: Sequence[int]) -> Iterator[dict[str, PoolPuller]]:
    """Runs a source process with a pool like `memory`; yields its puller twice, unchecked and checked."""
    num_pages, page_bytes = memory.num_pages, memory.page_bytes
    source_id = WorkerId(f"{transport}-source")
    environment = {"UCX_NET_DEVICES": "lo"}
    spec = SourceSpec(transport, source_id, Incarnation(1), num_pages, page_bytes, seed=SEED, environment=environment)
    with contextlib.closing(SourceProcess(spec)) as source:
        landed = PageMemory(num_pages, page_bytes, prefault=True)
        puller = make_puller(transport, WorkerId(f"{transport}-puller"), Incarnation(2), landed, lambda event: None)
        with contextlib.closing(puller):
            puller.connect(source.info)
            yield {
                transport: PoolPuller(puller, source_id, num_pages),
                CHECKED.format(transport): PoolPuller(puller, source_id, num_pages, digests),
            }


def digest_arm(memory: PageMemory) -> Callable[[], list[float]]:
    """An arm that digests the whole pool on one core, in bytes a second."""
    pages = [PageId(page) for page in range(memory.num_pages)]

    def compute() -> list[float]:
        began = time.perf_counter()
        digest_pages(memory, pages)
        return [memory.num_pages * memory.page_bytes / (time.perf_counter() - began)]

    return compute


def run(
    transports: Sequence[str],
    page_bytes: int,
    *,
    num_rotations: int,
    seed: int,
    console: Console,
    on_rotation: OnRotation,
) -> list[Block]:
    """Measures every arm in every rotation."""
    memcpy = MemcpyProbe()
    memory = filled_memory(PROBE_BYTES // page_bytes, page_bytes, SEED)
    digests = digest_pages(memory, [PageId(page) for page in range(memory.num_pages)])
    arms: dict[str, Callable[[], Sequence[float]]] = {COMPUTE: digest_arm(memory)}
    with contextlib.ExitStack() as stack:
        for transport in transports:
            for name, pool in stack.enter_context(running_pairs(transport, memory, digests)).items():
                pool.pull()  # the first makes the connection
                arms[name] = pool.pull
        return rotate(
            arms,
            lambda arm: memcpy(),
            num_rotations=num_rotations,
            seed=seed,
            console=console,
            on_rotation=on_rotation,
        )


def findings_of(blocks: Sequence[Block], transports: Sequence[str]) -> list[Finding]:
    """The table, from the blocks alone."""

    def speed(group: tuple[Block, ...]) -> float:
        return group[0].values[0] / 1e9

    findings = [make_finding("digests: computed", "GB/s", blocks, (COMPUTE,), speed)]
    for name in transports:
        checked = CHECKED.format(name)
        findings += [
            make_finding(f"{name}: unchecked", "GB/s", blocks, (name,), speed),
            make_finding(f"{name}: checked", "GB/s", blocks, (checked,), speed),
            make_finding(f"{name}: time of checked / unchecked", "", blocks, (name, checked), _times),
        ]
    return findings


def _times(group: tuple[Block, ...]) -> float:
    unchecked, checked = group
    return unchecked.values[0] / checked.values[0]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", help="default: all that work here")
    parser.add_argument("--page-kib", type=int, default=256)
    parser.add_argument("--rotations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args()
    prepare_environment({"UCX_NET_DEVICES": "lo"})
    transports = flags.transports or usable_transports("auto")
    findings_from = partial(findings_of, transports=transports)
    blocks = run(
        transports,
        flags.page_kib * 1024,
        num_rotations=flags.rotations,
        seed=flags.seed,
        console=Console(stderr=True),
        on_rotation=ResultFile(flags.result, "digests", flags.rotations, findings_from).write,
    )
    Console().print(table_of(findings_from(blocks)))


if __name__ == "__main__":
    run_command(main)
