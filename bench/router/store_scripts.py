"""Redis scripts and router CPU time of a short request.

    python -m bench.router.store_scripts [--requests 60] [--rotations 3] [--baseline DIR]

A router in a process of its own stands before mock workers and a real Redis. `MONITOR` counts the scripts that the
server runs, without those of an idle router (leases, lists of orphans, views, the worker registry). Passes interleave;
`--baseline` names another checkout of this repository, whose router runs beside. CPU time is that of the router's
process in a pass, the idle part of it included. Figures are medians over the rotations, with the least and the most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import re
import statistics
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from baton.services.cli.processes.local_redis import LocalRedis
from bench.harness.probes import process_cpu_s
from bench.router.mock_cluster import MODEL, DecodeCapacity, mock_workers, running_router
from bench.router.path_profile import ROOT

IDLE_SCRIPTS = ("announce", "exchange_views", "hold_lease", "list_orphans", "share_service", "withdraw")
TOKEN_S = 0.005
"""Time between two tokens of a request."""
SETTLE_S = 0.5
"""Time for the last writes of a pass to reach Redis."""
_EVALSHA = re.compile(rb'"EVALSHA" "([0-9a-f]{40})"', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Requests of one pass: output tokens of each, streamed or not, and how many run at a time."""

    num_tokens: int
    stream: bool
    num_at_once: int

    def __str__(self) -> str:
        how = "streamed" if self.stream else "whole"
        return f"{self.num_tokens} tokens, {how}, {self.num_at_once} at a time"


SHAPES = tuple(itertools.starmap(RequestShape, itertools.product((2, 30), (True, False), (1, 8))))


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Scripts a request, and CPU seconds of its router."""

    num_scripts: float
    cpu_s: float


class ScriptWatcher:
    """Counts the scripts that a Redis runs, but for `IDLE_SCRIPTS`."""

    def __init__(self, folders: tuple[Path, ...]) -> None:
        """`folders`: those of the scripts, of every version that runs."""
        self.num_scripts = 0
        sources = [folder / f"{name}.lua" for folder in folders for name in IDLE_SCRIPTS]
        self._idle = {hashlib.sha1(source.read_bytes()).hexdigest().encode() for source in sources}

    @contextlib.asynccontextmanager
    async def watching(self, redis_url: str) -> AsyncIterator[None]:
        """Counts while the block runs. `redis_url`: that of a `LocalRedis`."""
        reader, writer = await asyncio.open_unix_connection(urlsplit(redis_url).path, limit=1 << 24)
        writer.write(b"MONITOR\r\n")
        await reader.readline()
        task = asyncio.create_task(self._read(reader))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            found = _EVALSHA.search(line[:200])
            self.num_scripts += found is not None and found[1] not in self._idle


def scripts_folder(tree: Path) -> Path:
    """The Lua scripts of a checkout."""
    return tree / "baton" / "store" / "redis" / "scripts"


async def send(port: int, shape: RequestShape) -> None:
    """Sends one completion. Raises `RuntimeError` for a status other than 200."""
    body = {"model": MODEL, "prompt": list(range(4, 68)), "max_tokens": shape.num_tokens, "stream": shape.stream}
    content = json.dumps({**body, "temperature": 0, "ignore_eos": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(content)}\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + content)
        answer = await reader.read()
    finally:
        writer.close()
    if b" 200 " not in answer[:20]:
        raise RuntimeError(answer[:400].decode(errors="replace"))


async def run_pass(redis_url: str, port: int, shape: RequestShape, num_requests: int, counter: ScriptWatcher) -> float:
    """Sends requests and waits for their writes. Returns the scripts a request."""
    async with counter.watching(redis_url):
        before = counter.num_scripts
        for first in range(0, num_requests, shape.num_at_once):
            number = min(shape.num_at_once, num_requests - first)
            await asyncio.gather(*[send(port, shape) for _ in range(number)])
        await asyncio.sleep(SETTLE_S)
        return (counter.num_scripts - before) / num_requests


@contextlib.contextmanager
def _routers(baseline: Path | None) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Redis's URL, and port and process id of each router."""
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(LocalRedis())
        stack.enter_context(mock_workers(redis.url, DecodeCapacity(64, TOKEN_S)))
        found = {}
        for name, tree in {"this": None, **({"baseline": baseline} if baseline else {})}.items():
            url, pid = stack.enter_context(running_router(redis.url, tree=tree))
            found[name] = (int(url.rpartition(":")[2]), pid)
        yield redis.url, found


def measure(
    num_rotations: int, num_requests: int, baseline: Path | None
) -> dict[tuple[RequestShape, str], list[RequestCost]]:
    """Runs every pass in turn, `num_rotations` times."""
    counter = ScriptWatcher(tuple(scripts_folder(tree) for tree in (ROOT, *([baseline] if baseline else []))))
    costs: dict[tuple[RequestShape, str], list[RequestCost]] = {}
    with _routers(baseline) as (redis_url, routers):
        for rotation in range(-1, num_rotations):  # the first one warms up
            for shape, (name, (port, pid)) in itertools.product(SHAPES, routers.items()):
                before_s = process_cpu_s(pid)
                num_scripts = asyncio.run(run_pass(redis_url, port, shape, num_requests, counter))
                if rotation >= 0:
                    cost = RequestCost(num_scripts, (process_cpu_s(pid) - before_s) / num_requests)
                    costs.setdefault((shape, name), []).append(cost)
    return costs


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rotations", type=int, default=3)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--baseline", type=Path)
    flags = parser.parse_args()
    console = Console(soft_wrap=True)
    for (shape, name), costs in measure(flags.rotations, flags.requests, flags.baseline).items():
        scripts = _spread([cost.num_scripts for cost in costs])
        cpu = _spread([cost.cpu_s * 1e3 for cost in costs])
        console.print(f"{shape!s:36} {name:9} scripts {scripts}, router CPU {cpu} ms", highlight=False)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
