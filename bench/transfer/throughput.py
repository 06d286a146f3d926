"""G5: speed of page transfer, over the speed of a copy or a socket at the same time.

    python -m bench.transfer.throughput [--transports nixl stream] [--ucx-tls tcp] [--rotations 20] [--result FILE]

A source in a process of its own, a puller in this one; every block pulls the whole pool, 64 MB, once. The baseline
of NIXL through CMA is a 64 MB copy. The baseline of the stream, and of NIXL with `--ucx-tls tcp`, is a loopback socket.
Digests are off, because the baselines check nothing either.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.kv.memory import PageMemory
from baton.settings.ucx import prepare_environment
from baton.transfer import nixl
from baton.transfer.base import Pull, PullEvent, PullOutcome
from baton.transfer.factory import make_puller, usable_transports
from baton.transfer.puller import ThreadedPuller
from bench.harness.probes import PROBE_BYTES, LoopbackProbe, MemcpyProbe
from bench.harness.rotations import Block, Finding, OnRotation, ResultFile, make_finding, rotate, table_of
from bench.harness.signals import run_command
from tests.unit.transfer.source_process import SourceProcess, SourceSpec

DEADLINE_S = 60.0


class PoolPuller:
    """Pulls a source's whole pool into a pool of the same shape; checks every page where `digests` are given."""

    def __init__(
        self, puller: ThreadedPuller, source: WorkerId, num_pages: int, digests: Sequence[int] | None = None
    ) -> None:
        self._puller = puller
        self._digests = digests
        self._source = source
        self._pages = tuple(PageId(page) for page in range(num_pages))
        self._num_pulls = 0

    def pull(self) -> list[float]:
        """Bytes a second, from submission to the last byte. Raises `RuntimeError` if a pull fails."""
        ended = threading.Event()
        events: list[PullEvent] = []

        def on_event(event: PullEvent) -> None:
            events.append(event)
            ended.set()

        self._num_pulls += 1
        pull = Pull(self._num_pulls, self._source, self._pages, self._pages, self._digests, DEADLINE_S)
        self._puller.submit_to(pull, on_event)
        if not ended.wait(DEADLINE_S + 1.0) or events[0].outcome is not PullOutcome.DONE:
            raise RuntimeError(f"a pull of {self._source} failed: {events[0].reason if events else 'no event'}")
        return [events[0].num_bytes / events[0].seconds]


@contextlib.contextmanager
def running_pair(transport: str, page_bytes: int, environment: dict[str, str]) -> Iterator[PoolPuller]:
    """Runs a source process and a connected puller; stops both at the end."""
    num_pages = PROBE_BYTES // page_bytes
    source_id = WorkerId(f"{transport}-source")
    spec = SourceSpec(transport, source_id, Incarnation(1), num_pages, page_bytes, seed=0, environment=environment)
    with contextlib.closing(SourceProcess(spec)) as source:
        memory = PageMemory(num_pages, page_bytes, prefault=True)
        puller = make_puller(transport, WorkerId(f"{transport}-puller"), Incarnation(2), memory, lambda event: None)
        with contextlib.closing(puller):
            puller.connect(source.info)
            yield PoolPuller(puller, source_id, num_pages)


def run(
    transports: Sequence[str],
    page_bytes: int,
    environment: dict[str, str],
    *,
    num_rotations: int,
    seed: int,
    console: Console,
    on_rotation: OnRotation,
) -> list[Block]:
    """Measures every transport in every rotation. `environment`: UCX's variables, as this process has them."""
    memcpy, loopback = MemcpyProbe(), LoopbackProbe()
    through_socket = {t for t in transports if t != nixl.TRANSPORT or "UCX_TLS" in environment}
    with contextlib.ExitStack() as stack:
        pools = {t: stack.enter_context(running_pair(t, page_bytes, environment)) for t in transports}
        for pool in pools.values():
            pool.pull()  # the first makes the connection
        return rotate(
            {transport: pool.pull for transport, pool in pools.items()},
            lambda arm: loopback() if arm in through_socket else memcpy(),
            num_rotations=num_rotations,
            seed=seed,
            console=console,
            on_rotation=on_rotation,
        )


def findings_of(blocks: Sequence[Block]) -> list[Finding]:
    """The table, from the blocks alone."""
    findings = []
    for arm in sorted({block.arm for block in blocks}):
        findings += [
            make_finding(f"{arm}: speed", "GB/s", blocks, (arm,), lambda group: group[0].values[0] / 1e9),
            make_finding(f"{arm}: baseline", "GB/s", blocks, (arm,), lambda group: group[0].probe / 1e9),
            make_finding(
                f"{arm}: speed / baseline", "", blocks, (arm,), lambda group: group[0].values[0] / group[0].probe
            ),
        ]
    return findings


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", help="default: all that work here")
    parser.add_argument("--ucx-tls", help="e.g. tcp; default: what UCX chooses")
    parser.add_argument("--page-kib", type=int, default=64)
    parser.add_argument("--rotations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args()
    # Must precede the check whether NIXL can be loaded.
    environment = {"UCX_NET_DEVICES": "lo"} | ({"UCX_TLS": flags.ucx_tls} if flags.ucx_tls else {})
    prepare_environment(environment)
    blocks = run(
        flags.transports or usable_transports("auto"),
        flags.page_kib * 1024,
        environment,
        num_rotations=flags.rotations,
        seed=flags.seed,
        console=Console(stderr=True),
        on_rotation=ResultFile(flags.result, "transfer", flags.rotations, findings_of).write,
    )
    Console().print(table_of(findings_of(blocks)))


if __name__ == "__main__":
    run_command(main)
