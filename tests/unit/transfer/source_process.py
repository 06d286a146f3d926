"""A source in its own process, for tests that kill, stop and restart it. Driven over a pipe.

Forked from a server process that has only imported this module: a process with an agent must not be forked, and imports
take longer than most tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.kv.memory import PageMemory
from baton.rpc.gen import handoff_pb2_grpc
from baton.settings.ucx import prepare_environment
from baton.transfer.base import SourceInfo
from baton.transfer.factory import make_source
from baton.transfer.stream.source import StreamSource

START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Parameters of a source process. `seed` determines the bytes of its pages."""

    transport: str
    worker_id: WorkerId
    incarnation: Incarnation
    num_pages: int
    page_bytes: int
    seed: int
    environment: Mapping[str, str]
    trust: ClusterTrust = OPEN_CLUSTER


def filled_memory(num_pages: int, page_bytes: int, seed: int) -> PageMemory:
    """Pool of a source with this seed; every page differs."""
    memory = PageMemory(num_pages, page_bytes)
    memory.buffer[:] = random.Random(seed).randbytes(num_pages * page_bytes)
    return memory


def source_info(spec: SourceSpec, memory: PageMemory, address: str, metadata: bytes) -> SourceInfo:
    return SourceInfo(
        spec.worker_id,
        spec.incarnation,
        address,
        spec.transport,
        metadata,
        memory.address,
        memory.num_pages,
        memory.page_bytes,
    )


class SourceProcess:
    """The parent's handle. A context manager that ends the process on exit."""

    def __init__(self, spec: SourceSpec) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=source_main, args=(theirs, spec), daemon=True)
        self._process.start()
        theirs.close()
        self.info: SourceInfo = self._receive()

    def flip(self, page: int, offset: int) -> None:
        """Flips a bit of the source's memory."""
        self._pipe.send((page, offset))
        self._receive()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.join(START_TIMEOUT_S)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends the process; asserts that a running one exits with 0."""
        if self._process.is_alive():
            self.resume()
            self._pipe.send(None)
            self._process.join(START_TIMEOUT_S)
            assert self._process.exitcode == 0
        self._pipe.close()
        self._process.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _receive(self) -> Any:
        assert self._pipe.poll(START_TIMEOUT_S), "the source process is silent"
        return self._pipe.recv()


def source_main(pipe: Connection, spec: SourceSpec) -> None:
    """Serves until the parent sends a stop or is gone. Runs in the child."""
    prepare_environment(spec.environment)
    memory = filled_memory(spec.num_pages, spec.page_bytes, spec.seed)
    source = make_source(spec.transport, spec.worker_id, spec.incarnation, memory, spec.trust)
    info = source_info(spec, memory, "", source.metadata())
    if isinstance(source, StreamSource):
        asyncio.run(_serve_stream(pipe, source, memory, info))
    else:
        pipe.send(info)
        _obey(pipe, memory)
    source.close()


async def _serve_stream(pipe: Connection, source: StreamSource, memory: PageMemory, info: SourceInfo) -> None:
    server = grpc.aio.server()
    handoff_pb2_grpc.add_HandoffServicer_to_server(StreamServicer(source), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(replace(info, address=f"127.0.0.1:{port}"))
    await asyncio.to_thread(_obey, pipe, memory)
    await server.stop(grace=None)


class StreamServicer(handoff_pb2_grpc.HandoffServicer):
    """A Handoff service with `ReadPages` only."""

    def __init__(self, source: StreamSource) -> None:
        self._source = source

    async def ReadPages(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for message in self._source.read_pages(request, context):
            yield message


def _obey(pipe: Connection, memory: PageMemory) -> None:
    with contextlib.suppress(EOFError):
        for page, offset in _orders(pipe):
            memory.page(page)[offset] ^= 1
            pipe.send(None)


def _orders(pipe: Connection) -> Iterator[tuple[int, int]]:
    while (order := pipe.recv()) is not None:
        yield order
