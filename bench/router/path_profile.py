"""Counts the functions, files and value types that streamed chats pass in the router, per request, token and frame.

    python -m bench.router.path_profile [--tokens 256] [--list]

A profile hook (`sys.setprofile`) watches a real router in this process. Mock workers in another process answer over
gRPC, and a real Redis keeps the records. Only the project's own functions count, without generated gRPC stubs.

- *Token*: what is called for at least nine of ten tokens of `NUM_STREAMS` running streams. Tokens come ten times as
  often as the journal is flushed, so a flush does not count.
- *Frame*: what is called for at least nine of ten frames of the session that tokens come in, but for fewer tokens. At
  one stream every token is a frame: `token_budget` bounds the calls of both together.
- *Request*: every function called from the connection to the end of the response, in each of `NUM_CHATS` chats: a reset
  connection of one does not count. What an idle router calls as well (heartbeats, the worker registry) is reported
  apart.
- *Value type*: a frozen dataclass, msgspec struct or protobuf message that is an argument or a result. A token's value
  types are those of its functions: the values of a flush, which several functions take, do not count either.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import inspect
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
from google.protobuf.message import Message
from rich.console import Console

from baton.services.cli.processes.local_redis import LocalRedis
from baton.services.router.app import listen, run
from baton.services.router.settings import RouterSettings
from baton.services.router.text.text_model import TextModel
from baton.session.session import MessageSession
from baton.settings.model_source import ModelFiles, resolve_model
from baton.store.connect import connect
from bench.router.mock_cluster import MODEL, DecodeCapacity, mock_workers

ROOT = Path(__file__).resolve().parents[2]
OWN_SOURCES = (f"{ROOT}/baton/", f"{ROOT}/services/")
GENERATED_SOURCES = f"{ROOT}/baton/rpc/gen/"

DEFAULT_TOKENS = 256
NUM_STREAMS = 4
NUM_CHATS = 3
SKIPPED_TOKENS = 8
"""Tokens at both ends of the stream that the token's window leaves out."""
TOKEN_INTERVAL_S = 0.005
IDLE_WINDOW_S = 2.0
SETTLE_S = 0.5
"""Time for the records of an ended request to reach Redis; the request's window includes it."""
READY_TIMEOUT_S = 60.0
EVERY_TOKEN = 0.9
MAX_LISTED_ITEMS = 4
"""Longer tuples and lists are data, not the values that a token travels in."""


@dataclass(slots=True)
class Window:
    """Calls seen while the window was open, and the value types of each function."""

    calls: Counter[CodeType] = field(default_factory=Counter)
    values: Counter[tuple[CodeType, str]] = field(default_factory=Counter)

    def value_types(self, functions: list[CodeType]) -> Counter[str]:
        """Counts the value types that these functions took and returned."""
        counts: Counter[str] = Counter()
        for (code, name), count in self.values.items():
            if code in functions:
                counts[name] += count
        return counts


@dataclass(frozen=True, slots=True)
class PathProfile:
    """Counts of one streamed chat. `*_names` are sorted; a function is named `file:qualified name`."""

    request_functions: tuple[str, ...]
    idle_functions: tuple[str, ...]
    token_calls: float
    token_functions: tuple[str, ...]
    token_value_types: tuple[str, ...]
    token_generators: tuple[str, ...]
    frame_functions: tuple[str, ...] = ()

    @property
    def request_files(self) -> set[str]:
        """Source files that the request passes."""
        return {name.split(":")[0] for name in self.request_functions}

    @property
    def token_files(self) -> set[str]:
        """Source files that every token passes."""
        return {name.split(":")[0] for name in self.token_functions}


class ProfileHook:
    """A `sys.setprofile` hook that counts into the open window."""

    def __init__(self) -> None:
        self.window: Window | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Called by the interpreter at every call and return of a Python function."""
        window, code = self.window, frame.f_code
        if window is None or event not in ("call", "return"):
            return
        if not code.co_filename.startswith(OWN_SOURCES) or code.co_filename.startswith(GENERATED_SOURCES):
            return
        if event == "return":
            _count_value(window, code, arg)
            return
        window.calls[code] += 1
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            _count_value(window, code, frame.f_locals.get(name))


def _count_value(window: Window, code: CodeType, value: object) -> None:
    items = value if isinstance(value, tuple | list) and len(value) <= MAX_LISTED_ITEMS else (value,)
    for item in items:
        kind = type(item)
        own = kind.__module__.startswith(("baton.", "services."))
        frozen = own and dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        if frozen or isinstance(item, Message) or (own and isinstance(item, msgspec.Struct)):
            window.values[code, kind.__name__] += 1


async def stream_chat(port: int, num_tokens: int, on_event: Callable[[int], None] = lambda seen: None) -> None:
    """Sends one streamed chat over a connection of its own; `on_event` receives the number of events so far.

    Raises `RuntimeError` when the stream ends with fewer events than tokens.
    """
    message = {"role": "user", "content": "Hello!"}
    body = {"model": MODEL, "messages": [message], "stream": True, "temperature": 0}
    content = json.dumps({**body, "max_tokens": num_tokens, "ignore_eos": True}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + content)
        seen = 0
        while line := await reader.readline():
            if line.startswith(b"data: "):
                seen += 1
                on_event(seen)
    finally:
        writer.close()
    if seen < num_tokens:
        raise RuntimeError(f"{seen} events for {num_tokens} tokens")


async def measure(redis_url: str, num_tokens: int) -> PathProfile:
    """Runs a router in this process against the workers that are registered at `redis_url`, and profiles it."""
    async with router_in_process(redis_url) as port:
        return await _profile(port, num_tokens)


@contextlib.asynccontextmanager
async def router_in_process(redis_url: str, *, sessions: bool | None = None) -> AsyncIterator[int]:
    """Runs a router on this loop, ready and warm; yields its port. `sessions`: the setting; None: its default."""
    settings = RouterSettings(redis_url=redis_url, worker_ttl_s=3600.0)
    if sessions is not None:
        settings = settings.model_copy(update={"sessions": sessions})
    text = TextModel.load(resolve_model(settings.model, ModelFiles.TEXT))
    sock, stop = listen("127.0.0.1", 0), asyncio.Event()
    port = sock.getsockname()[1]
    serving = asyncio.create_task(run(settings, text, await connect(redis_url), sock, stop))
    try:
        await _wait_until_ready(port)
        for _ in range(3):
            await stream_chat(port, SKIPPED_TOKENS)
        await asyncio.sleep(SETTLE_S)
        yield port
    finally:
        stop.set()
        await serving
        sock.close()


async def _profile(port: int, num_tokens: int) -> PathProfile:
    hook, idle, requests, token = ProfileHook(), Window(), [Window() for _ in range(NUM_CHATS)], Window()
    first, last, num_seen = NUM_STREAMS * SKIPPED_TOKENS, NUM_STREAMS * (num_tokens - SKIPPED_TOKENS), 0

    def watch_token(_: int) -> None:
        nonlocal num_seen
        num_seen += 1
        hook.window = token if first <= num_seen < last else None

    sys.setprofile(hook)
    try:
        hook.window = idle
        await asyncio.sleep(IDLE_WINDOW_S)
        for hook.window in requests:
            await stream_chat(port, num_tokens)
            await asyncio.sleep(SETTLE_S)
        hook.window = None
        await asyncio.gather(*[stream_chat(port, num_tokens, watch_token) for _ in range(NUM_STREAMS)])
    finally:
        sys.setprofile(None)
    return _summarize(idle, requests, token, last - first)


def _summarize(idle: Window, requests: Sequence[Window], token: Window, num_tokens: int) -> PathProfile:
    request = set.intersection(*(set(window.calls) for window in requests))
    enough = EVERY_TOKEN * num_tokens
    per_token = [code for code, count in token.calls.items() if count >= enough]
    num_frames = token.calls[MessageSession.receive.__code__]
    per_frame = [code for code, count in token.calls.items() if EVERY_TOKEN * num_frames <= count < enough]
    return PathProfile(
        request_functions=_names([code for code in request if code not in idle.calls]),
        idle_functions=_names([code for code in request if code in idle.calls]),
        token_calls=sum(token.calls.values()) / num_tokens,
        token_functions=_names(per_token),
        token_value_types=tuple(sorted(name for name, n in token.value_types(per_token).items() if n >= enough)),
        token_generators=_names([code for code in per_token if code.co_flags & inspect.CO_ASYNC_GENERATOR]),
        frame_functions=_names(per_frame) if num_frames else (),
    )


def _names(codes: list[CodeType]) -> tuple[str, ...]:
    return tuple(sorted(f"{code.co_filename[len(str(ROOT)) + 1 :]}:{code.co_qualname}" for code in codes))


async def _wait_until_ready(port: int) -> None:
    async with asyncio.timeout(READY_TIMEOUT_S):
        while True:
            if await _is_ready(port):
                return
            await asyncio.sleep(0.05)


async def _is_ready(port: int) -> bool:
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            return b" 200 " in await reader.readline()
        finally:
            writer.close()
    return False


def profile_router(num_tokens: int = DEFAULT_TOKENS) -> PathProfile:
    """Profiles one streamed chat of `num_tokens` tokens on a Redis and workers of its own."""
    capacity = DecodeCapacity(64, TOKEN_INTERVAL_S)
    with LocalRedis() as redis, mock_workers(redis.url, capacity):
        return asyncio.run(measure(redis.url, num_tokens))


def _report(profile: PathProfile) -> Iterator[tuple[str, str]]:
    yield "functions a request", f"{len(profile.request_functions)} + {len(profile.idle_functions)} of an idle router"
    yield "files a request", str(len(profile.request_files))
    yield "calls a token", f"{profile.token_calls:.1f}"
    yield "functions a token", str(len(profile.token_functions))
    yield "files a token", str(len(profile.token_files))
    yield "value types a token", f"{len(profile.token_value_types)}: {', '.join(profile.token_value_types)}"
    yield "functions a frame", str(len(profile.frame_functions))
    yield "async generators a token", f"{len(profile.token_generators)}: {', '.join(profile.token_generators)}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS)
    parser.add_argument("--list", action="store_true", help="also list the functions")
    options = parser.parse_args()
    profile = profile_router(options.tokens)
    console = Console(soft_wrap=True)
    for name, value in _report(profile):
        console.print(f"{name:26} {value}", highlight=False)
    if options.list:
        lists = {"token": profile.token_functions, "frame": profile.frame_functions}
        for title, names in (*lists.items(), ("request", profile.request_functions)):
            console.print(f"\n{title}", *names, sep="\n  ", highlight=False)


if __name__ == "__main__":
    main()
