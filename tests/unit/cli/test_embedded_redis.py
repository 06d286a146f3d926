"""The Redis of `baton up` comes back whenever it ends: a real server under `run_plan`, beside a tiny service."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis
from rich.console import Console

from baton.services.cli import up as up_module
from baton.services.cli.processes import embedded_redis as redis_module
from baton.services.cli.processes import restart_budget
from baton.services.cli.processes.child_command import ChildCommand
from baton.services.cli.processes.embedded_redis import REDIS, EmbeddedRedis, embedded_redis
from baton.services.cli.processes.local_redis import find_server
from baton.services.cli.processes.restart_budget import MAX_RESTARTS, WINDOW_S, RestartBudget
from baton.services.cli.processes.supervisor import Child, Supervisor
from baton.services.cli.settings import UpSettings
from baton.services.cli.up import run_plan
from baton.store.store import StoreUnavailable
from tests.redis_server import require_redis
from tests.unit.cli.children import DEADLINE_S, exists
from tests.unit.cli.test_up import plan_of


class UpWithRedis:
    """`run_plan` with a server of its own. `act` runs once all are started, or serve; its error is that of `run`."""

    def __init__(self, redis: EmbeddedRedis, folder: Path) -> None:
        self.redis = redis
        self.started: asyncio.Queue[Child] = asyncio.Queue()
        self.services: asyncio.Queue[Child] = asyncio.Queue()
        self.children: list[Child] = []
        self.failures: asyncio.Queue[OSError] = asyncio.Queue()
        self.output = io.StringIO()
        self.logs = folder
        self._running: asyncio.Task[int] | None = None

    def end(self) -> None:
        """Sends SIGTERM; not once `run_plan` has returned: it would end this process."""
        assert self._running is not None
        if not self._running.done():
            os.kill(os.getpid(), signal.SIGTERM)

    def note(self, child: Child) -> None:
        self.children.append(child)
        (self.started if child.name == REDIS else self.services).put_nowait(child)

    async def server(self) -> Child:
        """The next server that is started, once it answers."""
        child = await asyncio.wait_for(self.started.get(), DEADLINE_S)
        while not await self.redis._answers():
            done, _ = await asyncio.wait([child.exit], timeout=0.01)
            assert not done, child.log_tail()
        return child

    async def run(self, act: Callable[[], Awaitable[None]], **services: str) -> int:
        plan = replace(plan_of("", **services), redis=self.redis)
        settings = UpSettings(start_timeout_s=DEADLINE_S, drain_timeout_s=10 * DEADLINE_S)
        acting = asyncio.ensure_future(act())
        console = Console(file=self.output, width=500)
        self._running = running = asyncio.ensure_future(run_plan(plan, settings, self.logs, console, None))
        try:
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.wait([acting, running], return_when=asyncio.FIRST_COMPLETED)
                if acting.done():
                    await acting
                return await running
        finally:
            acting.cancel()
            running.cancel()
            await asyncio.gather(acting, running, return_exceptions=True)
            assert not [child.name for child in self.children if exists(child.process.pid)]


@pytest.fixture
async def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[UpWithRedis]:
    require_redis()
    start = Supervisor.start
    with embedded_redis() as redis:
        logs = tmp_path / "logs"
        logs.mkdir()
        made = UpWithRedis(redis, logs)

        async def start_and_note(self: Supervisor, command: ChildCommand) -> Child:
            try:
                child = await start(self, command)
            except OSError as error:
                made.failures.put_nowait(error)
                raise
            made.note(child)
            return child

        monkeypatch.setattr(Supervisor, "start", start_and_note)
        yield made
    assert not redis._socket.parent.exists()


async def client_of(up: UpWithRedis) -> Redis:
    return Redis(unix_socket_path=str(up.redis._socket), socket_timeout=DEADLINE_S)


async def test_a_killed_server_comes_back_with_what_it_had_acknowledged(up: UpWithRedis):
    async def kill_it() -> None:
        await up.services.get()
        for number, end in enumerate([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV]):
            child = await up.server()
            async with await client_of(up) as client:
                assert [await client.get(str(before)) for before in range(number)] == [b"kept"] * number
                await client.set(str(number), "kept")
            os.kill(child.process.pid, end)
        await up.server()
        up.end()

    assert await up.run(kill_it) == 0
    told = up.output.getvalue()
    assert told.count("redis ended by itself with exit code") == 3
    assert told.count("It is started again.") == 3
    assert "redis ended by itself with exit code -9. Its last log lines:" in told
    assert "did not stop in time" not in told


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once the system serves."""
    event = asyncio.Event()

    def welcome(*_: object, **told: object) -> str:
        event.set()
        return "up"

    monkeypatch.setattr(up_module, "_welcome", welcome)
    return event


async def test_a_server_that_is_killed_while_services_start_comes_back(up: UpWithRedis, serving: asyncio.Event):
    """The services do not need it to start, and `baton up` begins to watch it while they do."""

    async def kill_it() -> None:
        child = await up.server()
        await up.services.get()
        child.process.kill()
        await up.server()
        await serving.wait()
        up.end()

    assert await up.run(kill_it) == 0


async def test_a_server_that_keeps_ending_is_tried_again(up: UpWithRedis, monkeypatch: pytest.MonkeyPatch):
    """Requests are served without it, so it ends nothing else; the user is told once."""
    monkeypatch.setattr(restart_budget, "FIRST_PAUSE_S", 0.001)

    async def kill_it() -> None:
        await up.services.get()
        for _ in range(MAX_RESTARTS + 3):
            (await up.server()).process.kill()
        await up.server()
        up.end()

    assert await up.run(kill_it) == 0
    told = up.output.getvalue()
    assert told.count("redis ended by itself with exit code -9") == MAX_RESTARTS + 1
    assert told.count("It is started again.\n") == MAX_RESTARTS
    assert told.count(redis_module.TOO_OFTEN) == 1


async def test_a_restart_that_fails_is_tried_again(up: UpWithRedis, serving: asyncio.Event):
    """The folder of logs is away for a while."""
    away = up.logs.with_name("away")

    async def kill_it() -> None:
        child = await up.server()
        await serving.wait()
        up.logs.rename(away)
        child.process.kill()
        await up.failures.get()
        await up.failures.get()
        away.rename(up.logs)
        await up.server()
        up.end()

    assert await up.run(kill_it) == 0
    told = up.output.getvalue()
    assert "redis could not be started again: [Errno 2]" in told
    assert told.index("redis ended by itself with exit code -9") < told.index("redis could not be started again")


async def test_a_server_that_cannot_read_its_file_says_so(up: UpWithRedis, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(restart_budget, "FIRST_PAUSE_S", 0.001)

    async def damage() -> None:
        child = await up.server()
        await up.services.get()
        async with await client_of(up) as client:
            await client.set("a", "b")
        for file in up.redis._socket.parent.rglob("*.aof"):
            file.write_bytes(b"no commands\r\n" * 100)
        child.process.kill()
        for _ in range(MAX_RESTARTS + 1):
            await (await up.started.get()).exit
        up.end()

    assert await up.run(damage) == 0
    assert re.search(r"redis ended by itself with exit code 1[\s\S]*append only file", up.output.getvalue())


HANGING = {"decode-0": "import signal; signal.pause()"}


async def test_a_server_comes_back_while_a_service_is_restarted(up: UpWithRedis, monkeypatch, serving: asyncio.Event):
    """The restart of a service may take the import of PyTorch; here it takes for ever."""
    restart, hangs = Supervisor.restart, asyncio.Event()

    async def restart_redis_alone(self: Supervisor, child: Child) -> Child:
        if child.name != REDIS:
            hangs.set()
            await asyncio.Event().wait()
        return await restart(self, child)

    async def kill_both() -> None:
        server, _, worker = await up.server(), await up.services.get(), await up.services.get()
        await serving.wait()
        worker.process.kill()
        await hangs.wait()
        server.process.kill()
        await up.server()
        up.end()

    monkeypatch.setattr(Supervisor, "restart", restart_redis_alone)
    assert await up.run(kill_both, **HANGING) == 0


async def test_a_service_comes_back_while_redis_has_a_pause(up: UpWithRedis, monkeypatch, serving: asyncio.Event):
    for name in ("FIRST_PAUSE_S", "MAX_PAUSE_S"):
        monkeypatch.setattr(restart_budget, name, 10 * DEADLINE_S)

    async def kill_both() -> None:
        server, _, worker = await up.server(), await up.services.get(), await up.services.get()
        await serving.wait()
        server.process.kill()
        second = await up.server()
        second.process.kill()
        await second.exit
        worker.process.kill()
        assert (await up.services.get()).name == "decode-0"
        up.end()

    assert await up.run(kill_both, **HANGING) == 0


async def test_a_service_that_ends_beside_redis_is_restarted_too(up: UpWithRedis, serving: asyncio.Event):
    async def kill_both() -> None:
        server, router, worker = await up.server(), await up.services.get(), await up.services.get()
        assert (router.name, worker.name) == ("router", "decode-0")
        await serving.wait()
        server.process.kill()
        await up.server()
        worker.process.kill()
        assert (await up.services.get()).name == "decode-0"
        up.end()

    assert await up.run(kill_both, **HANGING) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_baton_up_ends_while_redis_is_away(up: UpWithRedis, number: signal.Signals):
    async def end_both() -> None:
        child = await up.server()
        os.kill(child.process.pid, number)
        up.end()

    up.redis.command = replace(up.redis.command, stop_s=0.2)
    assert await up.run(end_both) == 0


async def test_a_server_that_does_not_start_is_explained(tmp_path: Path):
    failing = tmp_path / "redis-server"
    failing.write_text("#!/bin/sh\necho no memory\nexit 3\n")
    failing.chmod(0o755)
    async with Supervisor(tmp_path) as supervisor:
        with pytest.raises(StoreUnavailable, match="redis-server exited with status 3: no memory"):
            await EmbeddedRedis(failing, tmp_path).start(supervisor)


async def test_a_server_that_is_killed_before_its_first_answer_comes_back(tmp_path: Path):
    require_redis()
    killed_once = tmp_path / "redis-server"
    killed_once.write_text(f'#!/bin/sh\n[ -e "$0.killed" ] && exec {find_server()} "$@"\n: > "$0.killed"\nkill -9 $$\n')
    killed_once.chmod(0o755)
    with embedded_redis() as redis:
        server = EmbeddedRedis(killed_once, redis._socket.parent)
        async with Supervisor(tmp_path) as supervisor:
            await server.start(supervisor)
            assert [child.running for child in supervisor.children] == [True]


async def test_a_server_that_does_not_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redis_module, "START_TIMEOUT_S", 0.3)
    silent = tmp_path / "redis-server"
    silent.write_text(f"#!{sys.executable}\nimport signal\nsignal.pause()\n")
    silent.chmod(0o755)
    async with Supervisor(tmp_path) as supervisor:
        with pytest.raises(StoreUnavailable, match="redis-server has not answered within"):
            await EmbeddedRedis(silent, tmp_path).start(supervisor)
        [child] = supervisor.children
    assert not exists(child.process.pid)


def test_restarts_are_bounded_within_a_minute():
    budget = RestartBudget()
    assert [budget.allows(float(now)) for now in range(MAX_RESTARTS + 1)] == [True] * MAX_RESTARTS + [False]
    assert budget.allows(WINDOW_S + 1.5), "the first two were longer ago"


def test_a_second_end_within_a_minute_waits_longer_than_the_first():
    budget, pauses = RestartBudget(), []
    for now in (0.0, 1.0, 2.0, 3.0, 4.0):
        budget.allows(now)
        pauses.append(budget.pause_s)
    first = restart_budget.FIRST_PAUSE_S
    assert pauses == [0.0, first, 2 * first, 4 * first, 8 * first]
    for now in range(5, 20):
        budget.allows(float(now))
    assert budget.pause_s == restart_budget.MAX_PAUSE_S
    budget.allows(WINDOW_S + 30.0)
    assert budget.pause_s == 0.0
