"""What the load generator itself costs: its CPU an event, beside a plain client built on `httpx2`, on one stream.

    python -m bench.client_overhead [--rotations 10] [--requests 40] [--result FILE]

The server is another process that sends a fixed answer, one event a write. Four requests are under way at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import httpx2
import uvloop
from rich.console import Console

from bench.interruption import run_command
from bench.probes import LoopbackProbe
from bench.rotations import Block, Finding, OnRotation, Record, find, rotate, table_of
from services.cli.bench.client import BenchClient, Call
from services.cli.bench.options import Endpoint
from services.cli.bench.records import PlannedRequest

NUM_EVENTS = 128
CONCURRENCY = 4
WAIT_S = 60.0
CALL = Call("m", Endpoint.COMPLETIONS, temperature=0.0, ignore_eos=True, continuous_usage=False)
REQUEST = PlannedRequest(0, 0.0, tuple(range(4, 68)), NUM_EVENTS)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = b'data: {"id":"x","created":1,"model":"m","choices":[{"index":0,"text":" tok","finish_reason":%b}]}\n\n'

OneRequest = Callable[[], Awaitable[None]]


@contextlib.contextmanager
def fixed_server() -> Iterator[str]:
    """The server's URL; its process ends with the context."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_server_main, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(WAIT_S):
            raise TimeoutError("the server did not start")
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        ours.close()  # which ends the process
        process.join(WAIT_S)
        process.close()


def _server_main(pipe: Connection) -> None:
    uvloop.run(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    async with server:
        pipe.send(server.sockets[0].getsockname()[1])
        with contextlib.suppress(EOFError):
            await asyncio.to_thread(pipe.recv)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One fixed answer a request, until the client hangs up."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
            writer.write(_HEAD)
            for number in range(NUM_EVENTS):
                writer.write(_chunk(_EVENT % (b'"length"' if number == NUM_EVENTS - 1 else b"null")))
                await writer.drain()
                await asyncio.sleep(0)  # lets the other answers take their turn, so that events come one by one
            writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            await writer.drain()
    writer.close()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _ours(client: BenchClient) -> None:
    answer = await client.measure(CALL, REQUEST, lambda _: None)
    if answer.failure is not None or answer.num_output_tokens != NUM_EVENTS:
        raise RuntimeError(f"{answer.num_output_tokens} tokens: {answer.failure}")


async def _plain(client: httpx2.AsyncClient, url: str) -> None:
    times: list[float] = []
    async with client.stream("POST", f"{url}/v1/completions", content=CALL.body(REQUEST)) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                json.loads(line[6:])
                times.append(time.perf_counter())
    if len(times) != NUM_EVENTS:
        raise RuntimeError(f"{len(times)} events")


async def _cpu_an_event(request: OneRequest, num_requests: int) -> list[float]:
    """Seconds of this process's CPU."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one() -> None:
        async with slots:
            await request()

    began_s = time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_requests):
            group.create_task(one())
    return [(time.process_time() - began_s) / (num_requests * NUM_EVENTS)]


def run(num_rotations: int, num_requests: int, seed: int, console: Console, on_rotation: OnRotation) -> list[Block]:
    """Measures both clients."""
    with fixed_server() as url, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        ours = BenchClient(url, api_key=None, timeout_s=WAIT_S, clock=time.perf_counter)
        plain = httpx2.AsyncClient(timeout=WAIT_S, trust_env=False)
        arms: dict[str, Callable[[], Sequence[float]]] = {
            "baton bench": lambda: runner.run(_cpu_an_event(lambda: _ours(ours), num_requests)),
            "httpx2": lambda: runner.run(_cpu_an_event(lambda: _plain(plain, url), num_requests)),
        }
        probe = LoopbackProbe()
        try:
            for arm in arms.values():
                arm()  # connections and caches
            return rotate(
                arms,
                lambda _: probe(),
                num_rotations=num_rotations,
                seed=seed,
                console=console,
                on_rotation=on_rotation,
            )
        finally:
            runner.run(ours.__aexit__())
            runner.run(plain.aclose())


def findings_of(blocks: Sequence[Block]) -> list[Finding]:
    """The table, from the blocks alone."""
    arms = ("baton bench", "httpx2")
    cpu = [find(f"{arm}: CPU an event", "us", blocks, (arm,), lambda group: group[0].values[0] * 1e6) for arm in arms]
    return [*cpu, find("ratio", "", blocks, arms, lambda group: group[0].values[0] / group[1].values[0])]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rotations", type=int, default=10)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args()
    record = Record(flags.result, "client_overhead", flags.rotations, findings_of)
    blocks = run(flags.rotations, flags.requests, flags.seed, Console(stderr=True), record.keep)
    Console().print(table_of(findings_of(blocks)))


if __name__ == "__main__":
    run_command(main)
