"""`baton top`: shows workers, queues, pages, links and streams, again and again. Registered by
`baton.services.cli.main`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.live import Live

from baton.services.cli.settings import COMMANDS, TopSettings
from baton.services.cli.top.screen import ScreenOptions, draw
from baton.services.cli.top.snapshot_reader import ClusterUnreadable, SnapshotReader
from baton.services.router.cluster.snapshot import UNREAD, ClusterSnapshot
from baton.settings.base import refuse_unknown_variables

_LISTING_WIDTH = 120
_SHARE_WAIT_S = 3.0
_POLL_S = 0.3


def top(
    *,
    once: Annotated[bool, Parameter(negative=(), help="Print one snapshot and leave; the default in a pipe.")] = False,
    json: Annotated[bool, Parameter(negative=(), help="Print one snapshot as JSON and leave.")] = False,
    settings: Annotated[TopSettings | None, Parameter(name="*")] = None,
) -> int:
    """Show workers, queues, pages by owner, links and streams of the cluster, live."""
    refuse_unknown_variables(COMMANDS.values())
    chosen = settings or TopSettings()
    console = Console()
    if json or once or not (console.is_terminal and sys.stdin.isatty()):
        return asyncio.run(_print_once(chosen, console, as_json=json))
    return asyncio.run(_show(chosen, console))


def _reader(settings: TopSettings) -> SnapshotReader:
    key = None if settings.api_key is None else settings.api_key.get_secret_value()
    return SnapshotReader([url.strip() for url in settings.router.split(",") if url.strip()], key)


async def _print_once(settings: TopSettings, console: Console, *, as_json: bool) -> int:
    reader = _reader(settings)
    try:
        snapshot = await _whole(reader)
    finally:
        await reader.close()
    if as_json:
        print(reader.last_json.decode())
        return 0
    width = console.width if console.is_terminal else _LISTING_WIDTH
    console.print(draw(snapshot, ScreenOptions(width), keys=False), soft_wrap=True, highlight=False)
    return 0


async def _whole(reader: SnapshotReader) -> ClusterSnapshot:
    """A snapshot with the requests of all routers that answer within `_SHARE_WAIT_S`: they share when asked."""
    snapshot = await reader.read()
    for _ in range(round(_SHARE_WAIT_S / _POLL_S)):
        if all(router.status != UNREAD for router in snapshot.routers):
            break
        await asyncio.sleep(_POLL_S)
        snapshot = await reader.read()
    return snapshot


async def _show(settings: TopSettings, console: Console) -> int:
    """Draws until `q` or Ctrl-C. While no router answers, the last snapshot stays, with the reason."""
    reader = _reader(settings)
    try:
        snapshot = await reader.read()
        with _pressed_keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            options = ScreenOptions()
            while True:
                options = replace(options, width=console.width, height=console.height)
                live.update(draw(snapshot, options, keys=True), refresh=True)
                key = await _key(keys, settings.interval_s)
                if key == "q":
                    return 0
                options = _pressed(key, options)
                if not options.paused:
                    snapshot, options = await _next(reader, snapshot, options)
    finally:
        await reader.close()


async def _next(
    reader: SnapshotReader, last: ClusterSnapshot, options: ScreenOptions
) -> tuple[ClusterSnapshot, ScreenOptions]:
    try:
        return await reader.read(), replace(options, problem="")
    except ClusterUnreadable as error:
        return last, replace(options, problem=str(error))


def _pressed(key: str, options: ScreenOptions) -> ScreenOptions:
    if key == "p":
        return replace(options, paused=not options.paused)
    if key == "s":
        return replace(options, order=options.order.next)
    return options


async def _key(keys: asyncio.Queue[str], timeout_s: float) -> str:
    """The next key; "" if none is pressed in time."""
    try:
        return await asyncio.wait_for(keys.get(), timeout_s)
    except TimeoutError:
        return ""


@contextlib.contextmanager
def _pressed_keys() -> Iterator[asyncio.Queue[str]]:
    """Keys as they are pressed, without Enter. The terminal is as before afterwards."""
    keys: asyncio.Queue[str] = asyncio.Queue()
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    loop = asyncio.get_running_loop()
    tty.setcbreak(file)
    loop.add_reader(file, lambda: keys.put_nowait(os.read(file, 1).decode(errors="replace")))
    try:
        yield keys
    finally:
        loop.remove_reader(file)
        termios.tcsetattr(file, termios.TCSADRAIN, before)
