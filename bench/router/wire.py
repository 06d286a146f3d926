"""CPU time of a token between two processes: a gRPC message a token, and a session's message a step.

    python -m bench.router.wire [--rotations 5] [--streams 1 8 64] [--step-ms 4]

A process stands for a decode worker: every `--step-ms` each open attempt emits a token, which goes through the worker's
own streams and codecs. This process stands for a router: it opens the attempts and reads them, in calls or in a
session, without detokenising or HTTP. CPU time of long answers less that of short ones, over the difference in tokens,
is the cost of a token at either end. Passes interleave; a rotation gives a ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import uvloop
from rich.console import Console

from baton.domain.ids import AttemptId, RequestId, WorkerId, new_incarnation
from baton.domain.request import FinishReason, OutputToken
from baton.domain.trace_context import TraceContext
from baton.domain.trust import OPEN_CLUSTER
from baton.domain.worker import SESSIONS, WorkerRecord, WorkerRole
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.codec import decode_id, decode_token, encode_id
from baton.rpc.gen import common_pb2, decode_pb2, decode_pb2_grpc
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.server import ServerAuth, start_server
from baton.rpc.tokens.row_codec import decode_row
from baton.services.decode.effects import EmitTokens
from baton.services.decode.serving.attempts import DecodeStreamEvent
from baton.services.decode.serving.event_codec import encode_call_events, encode_session_events
from baton.services.decode.serving.sessions import token_taker
from baton.services.router.dispatch.sessions.worker_sessions import WorkerSessions
from baton.session.wires.grpc_wire import GrpcWire, SessionServicer, add_session_servicer
from baton.worker.sessions.listener import listen_for_sessions
from baton.worker.sessions.session_handlers import Answer, SessionHandlers, WriteTokens
from baton.worker.streams import AttemptStreams, Take
from bench.harness.probes import LoopbackProbe, process_cpu_s
from bench.harness.rotations import (
    Block,
    Finding,
    OnRotation,
    ResultFile,
    command_remark,
    make_finding,
    rotate,
    table_of,
)
from bench.harness.signals import run_command

STREAMS = (1, 8, 64)
STEP_S = 0.004
SHORT_TOKENS, LONG_TOKENS = 2, 258
CALLS, IN_SESSION = "calls", "session"
EVENT_TIMEOUT_S = 60.0
_START_S = 60.0


class SteppingDecode(decode_pb2_grpc.DecodeServicer):
    """Emits a token of every open attempt each step, as an engine does, until it has `max_tokens`."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._streams: AttemptStreams[DecodeStreamEvent] = AttemptStreams()
        self._rows: dict[AttemptId, tuple[int, int]] = {}  # tokens so far, and in all
        self._stepping = asyncio.create_task(self._step_forever())

    async def Generate(  # gRPC's name
        self, request: decode_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[decode_pb2.GenerateEvent, None]:
        async for event in self._events(request):
            for message in encode_call_events(event):
                yield message

    async def serve(
        self, request: decode_pb2.GenerateRequest, trace: TraceContext, write: WriteTokens
    ) -> AsyncGenerator[Answer, None]:
        """The same in a session."""
        async for event in self._events(request, token_taker(write)):
            for answer in encode_session_events(event):
                yield answer

    async def _events(
        self, request: decode_pb2.GenerateRequest, take: Take[DecodeStreamEvent] | None = None
    ) -> AsyncGenerator[DecodeStreamEvent, None]:
        id = decode_id(request.request.id)
        self._streams.open(id, take)
        self._rows[id] = 0, request.request.stop.max_tokens
        try:
            while True:
                event = await self._streams.next(id, EVENT_TIMEOUT_S)
                yield event
                if isinstance(event, EmitTokens) and event.finish is not None:
                    return
        finally:
            self._rows.pop(id, None)
            self._streams.close(id)

    async def _step_forever(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            for id, (index, num_tokens) in list(self._rows.items()):
                if index < num_tokens:
                    self._rows[id] = index + 1, num_tokens
                    finish = FinishReason.LENGTH if index + 1 == num_tokens else None
                    self._streams.deliver(id, EmitTokens(id, (OutputToken(index, 1000 + index),), finish))


def _worker_main(pipe: Connection, step_s: float) -> None:
    uvloop.run(_serve_worker(pipe, step_s))


async def _serve_worker(pipe: Connection, step_s: float) -> None:
    """Serves until the other end of the pipe is closed."""
    incarnation, decode = new_incarnation(), SteppingDecode(step_s)
    listener = listen_for_sessions(SessionHandlers(generate=decode.serve), OPEN_CLUSTER, incarnation, 1024)

    def register(server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(decode, server)
        add_session_servicer(SessionServicer(listener.serve), server)

    server = await start_server("127.0.0.1", 0, register, ServerAuth(incarnation))
    pipe.send((incarnation, f"127.0.0.1:{server.port}"))
    with contextlib.suppress(EOFError):
        await asyncio.to_thread(pipe.recv)
    listener.close()
    await server.stop(0.0)


@dataclass(frozen=True, slots=True)
class WireEnds:
    """The worker's process, and this process's ways to it."""

    worker: WorkerRecord
    pid: int
    channels: ChannelPool
    sessions: WorkerSessions

    async def read_call(self, request: decode_pb2.GenerateRequest) -> int:
        """Reads an attempt in a call of its own; returns its tokens."""
        stub = self.channels.stub(decode_pb2_grpc.DecodeStub, self.worker.address, self.worker.incarnation)
        call: Any = stub.Generate(request, timeout=EVENT_TIMEOUT_S)
        num_tokens = 0
        while (event := await call.read()) is not grpc.aio.EOF:
            num_tokens += len(tuple(map(decode_token, event.tokens.tokens)))
        return num_tokens

    async def read_session(self, request: decode_pb2.GenerateRequest) -> int:
        """Reads an attempt in the session; returns its tokens."""
        stream, num_tokens = self.sessions.open(self.worker, request, ()), 0
        while (event := await stream.read()) is not None:
            assert isinstance(event, pb.TokenRow), event
            num_tokens += len(decode_row(event))
        return num_tokens


@contextlib.asynccontextmanager
async def wire_ends(step_s: float) -> AsyncGenerator[WireEnds, None]:
    """Starts the worker's process; ends it at the end."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_worker_main, args=(theirs, step_s), daemon=True)
    process.start()
    theirs.close()
    wire, channels = GrpcWire(), ChannelPool()
    sessions = WorkerSessions(wire, "bench", new_incarnation())
    try:
        if not await asyncio.to_thread(ours.poll, _START_S):
            raise TimeoutError("the worker's process did not start")
        incarnation, address = ours.recv()
        worker = _record(incarnation, address)
        assert process.pid is not None
        yield WireEnds(worker, process.pid, channels, sessions)
    finally:
        ours.close()  # which ends the process
        await sessions.close()
        await wire.close()
        await channels.close()
        await asyncio.to_thread(process.join, _START_S)


def _record(incarnation: Any, address: str) -> WorkerRecord:
    return WorkerRecord(
        id=WorkerId("decode-0"), role=WorkerRole.DECODE, incarnation=incarnation, address=address, model="bench",
        fingerprint="", page_size=16, max_model_len=1024, vocab_size=2048, capabilities=(SESSIONS,),
    )  # fmt: skip


async def cpu_a_token(ends: WireEnds, way: str, num_streams: int, numbers: Iterator[int]) -> list[float]:
    """CPU seconds a token: of the router's end, and of the worker's."""
    read = ends.read_call if way == CALLS else ends.read_session
    readings = [(time.process_time(), process_cpu_s(ends.pid))]
    for num_tokens in (SHORT_TOKENS, LONG_TOKENS):
        requests = [_request(f"r{next(numbers)}", num_tokens) for _ in range(num_streams)]
        counts = await asyncio.gather(*map(read, requests))
        if counts != [num_tokens] * num_streams:
            raise RuntimeError(f"{way}: {counts} tokens came instead of {num_tokens} each")
        readings.append((time.process_time(), process_cpu_s(ends.pid)))
    num_more = num_streams * (LONG_TOKENS - SHORT_TOKENS)
    short, long = ([b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(readings))
    return [(after - before) / num_more for before, after in zip(short, long, strict=True)]


def _request(name: str, num_tokens: int) -> decode_pb2.GenerateRequest:
    id, stop = encode_id(AttemptId(RequestId(name), 1)), common_pb2.StopParams(max_tokens=num_tokens)
    return decode_pb2.GenerateRequest(request=common_pb2.EngineRequest(id=id, tokens=[1, 2, 3], stop=stop))


def findings_of(blocks: Sequence[Block]) -> list[Finding]:
    """The table, from the blocks alone."""
    findings: list[Finding] = []
    for num_streams in sorted({int(block.arm.split()[1]) for block in blocks}):
        arms = (f"{CALLS} {num_streams}", f"{IN_SESSION} {num_streams}")
        for end, name in enumerate(("router", "decode")):
            figures: list[tuple[str, str, Callable[[tuple[Block, ...]], float]]] = [
                (f"{name}, a message a token", "us", partial(_token_us, end, 0)),
                (f"{name}, a message a step", "us", partial(_token_us, end, 1)),
                (f"{name}, ratio", "ratio", partial(_ratio, end)),
            ]
            findings += [
                make_finding(f"{what}, {num_streams} streams", unit, blocks, arms, figure, lambda b: b.has_steady_probe)
                for what, unit, figure in figures
            ]
    return findings


def _token_us(end: int, arm: int, group: tuple[Block, ...]) -> float:
    return group[arm].values[end] * 1e6


def _ratio(end: int, group: tuple[Block, ...]) -> float:
    """Calls over the session."""
    return group[0].values[end] / group[1].values[end]


def run(
    num_rotations: int, streams: Sequence[int], step_s: float, console: Console, on_rotation: OnRotation
) -> list[Block]:
    """Runs all rotations on a worker's process of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        context = wire_ends(step_s)
        ends, numbers, probe = runner.run(context.__aenter__()), itertools.count(), LoopbackProbe()
        arms: dict[str, Callable[[], list[float]]] = {
            f"{way} {n}": lambda way=way, n=n: runner.run(cpu_a_token(ends, way, n, numbers))  # type: ignore[misc]
            for n in streams
            for way in (CALLS, IN_SESSION)
        }
        try:
            for arm in arms.values():
                arm()  # connections, caches, lazily imported code
            return rotate(
                arms, lambda _: probe(), num_rotations=num_rotations, seed=0, console=console, on_rotation=on_rotation
            )
        finally:
            runner.run(context.__aexit__(None, None, None))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rotations", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--step-ms", type=float, default=STEP_S * 1e3)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args()
    result_file = ResultFile(flags.result, "wire", flags.rotations, findings_of, [command_remark("bench.router.wire")])
    blocks = run(flags.rotations, flags.streams, flags.step_ms / 1e3, Console(stderr=True), result_file.write)
    Console().print(table_of(findings_of(blocks)))


if __name__ == "__main__":
    run_command(main)
