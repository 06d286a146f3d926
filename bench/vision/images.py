"""Images: time to the first token, gaps of text streams beside them, and the router's CPU time.

    python -m bench.vision.images [--model bundled-vision] [--side 128] [--requests 5] [--rotations 8] [--streams 4]
        [--tokens 60] [--seed 0] [--result FILE]

Two systems are started by `baton up`: one whose prefill worker encodes, one with an encode worker (`--encode 1`).
Requests go over HTTP. A block of an arm asks `--requests` chats one after another:

- cold image: a new picture between new texts;
- cached embedding: a known picture between new texts, so that its rows are computed and not encoded;
- cached prefix: a new question behind a known text and picture;
- text of the rest: a chat of the same question alone, the ideal for a cached prefix;
- streams: gaps of `--streams` text streams alone, and while new pictures arrive, with either system.

Every answer's usage must report what its arm claims to be cached, or the run ends. The router's work for an image is
the CPU time of its parser in this process, with a picture less that of its text. Systems that are not asked idle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from baton.settings.model_source import resolve_model
from bench.harness.probes import LoopbackProbe
from bench.harness.rotations import (
    Arm,
    Block,
    Finding,
    OnRotation,
    Remark,
    ResultFile,
    command_remark,
    make_finding,
    rotate,
    table_of,
)  # fmt: skip
from bench.harness.running_system import running_system
from bench.harness.signals import run_command
from bench.vision.chat_client import TimedChatClient, stream_gaps
from bench.vision.chats import NUM_BEFORE, NUM_BEHIND, ChatDraw, said, shown
from bench.vision.router_cost import ParsingTimer

WAIT_S = 120.0
LOCAL, REMOTE = "in prefill", "apart"
SYSTEMS: dict[str, tuple[str, ...]] = {LOCAL: (), REMOTE: ("--encode", "1")}
COLD, EMBEDDING, PREFIX, REST = "cold image", "cached embedding", "cached prefix", "text of the rest"
QUIET = "streams alone"
ROUTER_IMAGE, ROUTER_TEXT = "router, image", "router, text"


def beside(system: str) -> str:
    """The arm of text streams beside images."""
    return f"streams beside images, encoder {system}"


def cold(system: str) -> str:
    """The arm of new pictures."""
    return f"{COLD}, encoder {system}"


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """One run's flags."""

    model: str
    side: int
    requests: int
    rotations: int
    streams: int
    tokens: int
    seed: int
    result: Path | None


class ImageArms:
    """What the arms do. Times are in seconds."""

    def __init__(self, options: ImageOptions, clients: dict[str, TimedChatClient], runner: asyncio.Runner) -> None:
        self._options = options
        self._clients = clients
        self._runner = runner
        self._draw = ChatDraw(random.Random(options.seed), options.side)
        self._cost = ParsingTimer(resolve_model(options.model))

    def arms(self) -> dict[str, Arm]:
        """All arms by name."""
        timed: dict[str, Callable[[], Coroutine[Any, Any, list[float]]]]
        timed = {cold(system): partial(self._cold, system) for system in SYSTEMS}
        timed |= {EMBEDDING: self._cached_embedding, PREFIX: self._cached_prefix, REST: self._rest}
        made: dict[str, Arm] = {name: partial(self._run, arm) for name, arm in timed.items()}
        made |= {beside(system): partial(self._run, partial(self._streams, system, True)) for system in SYSTEMS}
        made[QUIET] = partial(self._run, partial(self._streams, LOCAL, False))
        return made | {ROUTER_IMAGE: partial(self._router, True), ROUTER_TEXT: partial(self._router, False)}

    def _run(self, arm: Any) -> list[float]:
        values: list[float] = self._runner.run(arm())
        return values

    async def _cold(self, system: str) -> list[float]:
        return [await self._first_s(self._new_chat(), cached=False, system=system) for _ in self._each()]

    async def _cached_embedding(self) -> list[float]:
        url = self._draw.picture()
        await self._first_s(self._new_chat(url), cached=False)
        return [await self._first_s(self._new_chat(url), cached=False) for _ in self._each()]

    async def _cached_prefix(self) -> list[float]:
        before, url = self._draw.words(NUM_BEFORE), self._draw.picture()
        chats = [shown(before, url, self._draw.words(NUM_BEHIND)) for _ in self._each()]
        await self._first_s(shown(before, url, self._draw.words(NUM_BEHIND)), cached=False)
        return [await self._first_s(chat, cached=True) for chat in chats]

    async def _rest(self) -> list[float]:
        return [await self._first_s(said(self._draw.words(NUM_BEHIND)), cached=False) for _ in self._each()]

    async def _streams(self, system: str, has_images: bool) -> list[float]:
        options = self._options
        texts = [said(self._draw.words(NUM_BEHIND)) for _ in range(options.streams)]
        images = [self._new_chat() for _ in self._each()] if has_images else []
        return await stream_gaps(self._clients[system], texts, images, options.tokens)

    def _router(self, has_image: bool) -> list[float]:
        before, behind = self._draw.words(NUM_BEFORE), self._draw.words(NUM_BEHIND)
        url = self._draw.picture()
        chat = shown(before, url, behind) if has_image else said(f"{before} {behind}")
        return [self._cost.seconds(chat) for _ in self._each()]

    def _each(self) -> range:
        return range(self._options.requests)

    def _new_chat(self, url: str | None = None) -> list[dict[str, Any]]:
        return shown(self._draw.words(NUM_BEFORE), url or self._draw.picture(), self._draw.words(NUM_BEHIND))

    async def _first_s(self, chat: list[dict[str, Any]], *, cached: bool, system: str = LOCAL) -> float:
        answer = await self._clients[system].ask(chat)
        if cached is not (answer.num_cached > answer.num_prompt // 3):
            raise RuntimeError(f"{answer.num_cached} of {answer.num_prompt} tokens are cached, and cached is {cached}")
        return answer.first_s


def findings_of(blocks: Sequence[Block]) -> list[Finding]:
    """The table."""

    def first(arm: str) -> Finding:
        return make_finding(f"{arm}: first token", "ms", blocks, (arm,), lambda group: 1e3 * _median(group[0]))

    def gap(arm: str, percent: int) -> Finding:
        name = f"{arm}: gap, p{percent}"
        return make_finding(name, "ms", blocks, (arm,), lambda group: 1e3 * percentile(group[0].values, percent))

    found = [first(arm) for arm in (cold(LOCAL), cold(REMOTE), EMBEDDING, PREFIX, REST)]
    found.append(make_finding(f"{PREFIX} / {REST}", "", blocks, (PREFIX, REST), _ratio))
    found.append(make_finding(f"{EMBEDDING} / {cold(LOCAL)}", "", blocks, (EMBEDDING, cold(LOCAL)), _ratio))
    for arm in (QUIET, beside(LOCAL), beside(REMOTE)):
        found += [gap(arm, 50), gap(arm, 99)]
    found.append(
        make_finding(
            "gap, p99: encoder in prefill / apart", "", blocks, (beside(LOCAL), beside(REMOTE)),
            lambda group: percentile(group[0].values, 99) / percentile(group[1].values, 99),
        )
    )  # fmt: skip
    router = make_finding(
        "router: CPU time of an image", "ms", blocks, (ROUTER_IMAGE, ROUTER_TEXT),
        lambda group: 1e3 * (_median(group[0]) - _median(group[1])),
    )  # fmt: skip
    return [*found, router]


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def _median(block: Block) -> float:
    return statistics.median(block.values)


def _ratio(group: tuple[Block, ...]) -> float:
    return _median(group[0]) / _median(group[1])


def run(options: ImageOptions, console: Console, on_rotation: OnRotation) -> list[Block]:
    """Runs all rotations. Raises `RuntimeError` if a request fails or an arm is not what it claims."""
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        clients: dict[str, TimedChatClient] = {}
        for name, flags in SYSTEMS.items():
            flags = (*flags, "--dtype", "float32")
            system = stack.enter_context(running_system(options.model, None, options.seed, flags, console))
            clients[name] = client = TimedChatClient(system.url, WAIT_S)
            runner.run(client.open())
            stack.callback(partial(_close, runner, client))
        arms, probe = ImageArms(options, clients, runner).arms(), LoopbackProbe()
        with console.status("a first round, which does not count"):
            for arm in arms.values():
                arm()
        return rotate(
            arms, lambda _: probe(), num_rotations=options.rotations, seed=options.seed, console=console,
            on_rotation=on_rotation,
        )  # fmt: skip


def _close(runner: asyncio.Runner, client: TimedChatClient) -> None:
    runner.run(client.close())


def parse(arguments: Sequence[str] | None = None) -> ImageOptions:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled-vision")
    parser.add_argument("--side", type=int, default=128, help="of pictures, in pixels")
    parser.add_argument("--requests", type=int, default=5, help="chats a block")
    parser.add_argument("--rotations", type=int, default=8)
    parser.add_argument("--streams", type=int, default=4, help="of text, at once")
    parser.add_argument("--tokens", type=int, default=60, help="of each stream")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    return ImageOptions(**vars(parser.parse_args(arguments)))


def main() -> None:
    """Command line."""
    options = parse()
    remarks = [command_remark("bench.vision.images"), Remark("system", f"baton up, {options.model}")]
    result_file = ResultFile(options.result, "images", options.rotations, findings_of, remarks)
    blocks = run(options, Console(stderr=True), result_file.write)
    Console().print(table_of(findings_of(blocks)))


if __name__ == "__main__":
    run_command(main)
