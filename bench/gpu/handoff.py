"""Speed of a handoff from and into a GPU's memory, with digests and without, and the path that UCX took.

    python -m bench.gpu.handoff [--page-kib 2304] [--pages 256] [--pulls 10] [--transports nixl stream]
        [--result FILE]

The source is a process of its own, on the same GPU; every pull reads its whole pool. The limit of pages that stay on
the device is a copy within its memory, that of pages which cross the bus a page-locked copy; both are measured. A
digest row is the time of one side's digests alone, which the engine thread pays. Exits with an error without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import grpc.aio
import torch
from rich.console import Console
from rich.table import Table

from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.kv.memory import MemoryKind, PageMemory, PoolMemory
from baton.model.device_memory import CudaCopyStream, DeviceMemory
from baton.model.storage import PageStorage
from baton.rpc.gen import handoff_pb2_grpc
from baton.transfer.base import SourceInfo
from baton.transfer.digest import digest_pages
from baton.transfer.factory import make_puller, make_source, usable_transports
from baton.transfer.nixl import NixlPuller
from baton.transfer.stream.source import StreamSource
from bench.engine.gpu import save
from bench.transfer.throughput import PoolPuller
from tests.unit.transfer.source_process import StreamServicer

SOURCE = WorkerId("prefill-0")
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
HEAD_BYTES = 512
"""Bytes of a token's K or V of 2 heads of 128 in bfloat16, of which pages are made."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Pages of both pools."""

    page_kib: int
    num_pages: int

    @property
    def geometry(self) -> KVGeometry:
        """A geometry with pages of about `page_kib` KiB: layers of 8 KiB a side and page of 16 tokens."""
        num_layers = max(1, self.page_kib * 1024 // (2 * 16 * HEAD_BYTES))
        return KVGeometry.of_layers((LayerGeometry(2, 128, 128),) * num_layers, "bfloat16", 16)


@dataclass(frozen=True, slots=True)
class DeviceFinding:
    """One row: bytes a second of the median and the best pull; `path`: what UCX reported."""

    name: str
    median_gb_per_s: float
    best_gb_per_s: float
    path: str


def make_pool(shape: PoolShape, kind: MemoryKind, seed: int = 0) -> PoolMemory:
    """A pool of random bytes in the GPU's or the host's memory."""
    geometry = shape.geometry
    generator = torch.Generator().manual_seed(seed)
    size = shape.num_pages, geometry.page_bytes
    content = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    if kind is MemoryKind.DRAM:
        memory = PageMemory(shape.num_pages, geometry.page_bytes, prefault=True)
        memory.buffer[:] = memoryview(content.numpy()).cast("B")  # type: ignore[arg-type]
        return memory
    storage = PageStorage.allocate(geometry, shape.num_pages, "cuda")
    storage.page_bytes().copy_(content)
    storage.synchronize()
    return DeviceMemory(storage, CudaCopyStream(storage.device))


def serve(pipe: Connection, shape: PoolShape, kind: MemoryKind, transport: str) -> None:
    """The source process: serves its pool until it receives a message."""
    memory = make_pool(shape, kind)
    source = make_source(transport, SOURCE, Incarnation(1), memory)
    digests = digest_pages(memory, [PageId(page) for page in range(shape.num_pages)])
    where = memory.address, memory.num_pages, memory.page_bytes
    info = SourceInfo(SOURCE, Incarnation(1), "", transport, source.metadata(), *where)
    if isinstance(source, StreamSource):
        asyncio.run(_serve_stream(pipe, source, info, digests))
    else:
        pipe.send((info, digests))
        pipe.recv()
    source.close()


async def _serve_stream(pipe: Connection, source: StreamSource, info: SourceInfo, digests: tuple[int, ...]) -> None:
    server = grpc.aio.server()
    handoff_pb2_grpc.add_HandoffServicer_to_server(StreamServicer(source), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send((replace(info, address=f"127.0.0.1:{port}"), digests))
    await asyncio.to_thread(pipe.recv)
    await server.stop(grace=None)


@contextlib.contextmanager
def running_source(shape: PoolShape, kind: MemoryKind, transport: str) -> Iterator[tuple[SourceInfo, tuple[int, ...]]]:
    """Starts a source process. Yields how to reach it, and its pages' digests."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, shape, kind, transport), daemon=True)
    process.start()
    try:
        if not ours.poll(START_TIMEOUT_S):
            raise TimeoutError("the source process did not start")
        yield ours.recv()
        ours.send(None)
        process.join(STOP_TIMEOUT_S)
    finally:
        process.kill()


def measure(
    shape: PoolShape, transport: str, pairs: Sequence[tuple[MemoryKind, MemoryKind]], num_pulls: int
) -> list[DeviceFinding]:
    """Measures every pair of memories with digests off and on. Raises `RuntimeError` if a pull fails."""
    findings: list[DeviceFinding] = []
    for there, here in pairs:
        with running_source(shape, there, transport) as (info, digests):
            memory = make_pool(shape, here, seed=1)  # other bytes than the source's
            puller = make_puller(transport, WorkerId("decode-0"), Incarnation(2), memory, lambda event: None)
            with contextlib.closing(puller):
                puller.connect(info)
                for name, wanted in (("", None), (", digests", digests)):
                    pool = PoolPuller(puller, SOURCE, shape.num_pages, wanted)
                    pool.pull()  # the first makes the connection
                    speeds = [pool.pull()[0] for _ in range(num_pulls)]
                    path = puller.path(SOURCE) if isinstance(puller, NixlPuller) else transport
                    findings.append(_finding(f"{there.value} -> {here.value}{name}", speeds, path))
    return findings


def measure_limits(shape: PoolShape, num_rounds: int) -> list[DeviceFinding]:
    """Copies of a pool's size within the device, from it to page-locked memory, and the digests of a pool."""
    num_bytes = shape.num_pages * shape.geometry.page_bytes
    device, other = (torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    pages = [PageId(page) for page in range(shape.num_pages)]
    pools = {kind: make_pool(shape, kind) for kind in (MemoryKind.VRAM, MemoryKind.DRAM)}
    actions: list[tuple[str, Callable[[], object]]] = [
        ("copy within the device", lambda: device.copy_(other)),
        ("copy to page-locked memory", lambda: host.copy_(device, non_blocking=True)),
        ("copy from page-locked memory", lambda: device.copy_(host, non_blocking=True)),
        ("digests of VRAM", lambda: digest_pages(pools[MemoryKind.VRAM], pages)),
        ("read VRAM into page-locked memory", lambda: pools[MemoryKind.VRAM].read(pages)),
        ("digests of DRAM", lambda: digest_pages(pools[MemoryKind.DRAM], pages)),
    ]
    findings = []
    for name, action in actions:
        speeds = []
        for _ in range(num_rounds + 1):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            action()
            torch.cuda.synchronize()
            speeds.append(num_bytes / (time.perf_counter() - began_s))
        findings.append(_finding(name, speeds[1:], ""))
    return findings


def table_of(findings: Sequence[DeviceFinding]) -> Table:
    """A table for the terminal."""
    table = Table("what", "median GB/s", "best GB/s", "path")
    for found in findings:
        table.add_row(found.name, f"{found.median_gb_per_s:.2f}", f"{found.best_gb_per_s:.2f}", found.path)
    return table


def _finding(name: str, speeds: Sequence[float], path: str) -> DeviceFinding:
    return DeviceFinding(name, statistics.median(speeds) / 1e9, max(speeds) / 1e9, path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", help="default: all that work here")
    parser.add_argument("--page-kib", type=int, default=2304)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--pulls", type=int, default=10)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU here; nothing to measure.")
    shape = PoolShape(flags.page_kib, flags.pages)
    vram, dram = MemoryKind.VRAM, MemoryKind.DRAM
    findings: list[DeviceFinding] = []
    for transport in flags.transports or usable_transports("auto"):
        findings += measure(shape, transport, ((vram, vram), (vram, dram), (dram, vram)), flags.pulls)
    findings += measure_limits(shape, flags.pulls)
    if flags.result is not None:
        save(flags.result, findings, "cuda")
    Console().print(table_of(findings))


if __name__ == "__main__":
    main()
