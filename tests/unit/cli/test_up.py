"""`baton up` with tiny services: a good start, and every way in which a start can fail."""

import asyncio
import io
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from rich.console import Console

from baton.services.cli import smoke_request
from baton.services.cli import up as up_module
from baton.services.cli.errors import EXIT_INTERRUPTED, StartFailed
from baton.services.cli.plan import LaunchPlan
from baton.services.cli.processes.child_command import ChildCommand
from baton.services.cli.processes.fork_server import ServiceForkServer, can_fork
from baton.services.cli.processes.ports import free_ports
from baton.services.cli.processes.restart_budget import MAX_RESTARTS
from baton.services.cli.processes.supervisor import Child, Supervisor
from baton.services.cli.settings import UpSettings
from baton.services.cli.up import run_plan
from baton.services.router.settings import RouterSettings
from baton.settings.trust import read_trust
from tests.unit.cli.children import exists, fork_server_of, wait_for_log
from tests.unit.cli.test_fork_server import router as forked_router

TINY = Path(__file__).with_name("tiny_service.py")
DEADLINE_S = 30.0


@pytest.fixture
def arrivals(monkeypatch) -> asyncio.Queue[Child]:
    """Queues every child that is started."""
    queue: asyncio.Queue[Child] = asyncio.Queue()
    start = Supervisor.start

    async def announce(self, command):
        child = await start(self, command)
        queue.put_nowait(child)
        return child

    monkeypatch.setattr(Supervisor, "start", announce)
    return queue


def exit_codes(arrivals: asyncio.Queue[Child]) -> list[int | None]:
    """Exit codes of the children left in the queue; None for a running one."""
    return [arrivals.get_nowait().process.returncode for _ in range(arrivals.qsize())]


def plan_of(flaws: str, **extra: str) -> LaunchPlan:
    """A plan of one tiny service as router and decode worker; `extra`: further programs."""
    port = free_ports(1)[0]
    commands = [ChildCommand(name, (sys.executable, "-c", program), {}) for name, program in extra.items()]
    commands.append(ChildCommand("router", (sys.executable, str(TINY), str(port), flaws), {}))
    url = f"http://127.0.0.1:{port}"
    return LaunchPlan(tuple(commands), url, (), (f"{url}/metrics",), (), f"{url}/metrics")


async def run(
    plan: LaunchPlan,
    tmp_path: Path,
    start_timeout_s: float = DEADLINE_S,
    fork_server: ServiceForkServer | None = None,
) -> int:
    settings = UpSettings(start_timeout_s=start_timeout_s, drain_timeout_s=5)
    console = Console(file=io.StringIO())
    return await asyncio.wait_for(run_plan(plan, settings, tmp_path, console, None, fork_server), DEADLINE_S)


async def test_up_serves_until_sigterm(arrivals, tmp_path, monkeypatch, capsys):
    welcome = up_module._welcome

    def welcome_then_sigterm(plan, model, **told):
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        return welcome(plan, model, **told)

    monkeypatch.setattr(up_module, "_welcome", welcome_then_sigterm)
    plan = plan_of("")
    assert await run(plan, tmp_path) == 0
    out = capsys.readouterr().out
    assert f"curl -N {plan.router_url}/v1/chat/completions" in out
    assert '"model": "tiny"' in out
    assert out.splitlines()[1] == f"page     {plan.router_url}/"
    assert f"metrics  {plan.decode_metrics[0]}  decode-0" in out
    assert "kernels  tiny" in out
    assert exit_codes(arrivals) == [0]


async def test_a_model_without_a_template_gets_no_chat_line(arrivals, tmp_path, monkeypatch, capsys):
    welcome = up_module._welcome

    def welcome_then_sigterm(plan, model, **told):
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        return welcome(plan, model, **told)

    monkeypatch.setattr(up_module, "_welcome", welcome_then_sigterm)
    plan = replace(plan_of("has no template"), page=False)
    assert await run(plan, tmp_path) == 0
    out = capsys.readouterr().out
    assert f"curl -N {plan.router_url}/v1/completions" in out
    assert "chat" not in out
    assert "page" not in out


async def kill_each(arrivals: asyncio.Queue[Child], name: str, times: int) -> None:
    """Kills the child of that name `times` times, each time after its restart; then sends SIGTERM."""
    for count in range(times + 1):
        while (child := await arrivals.get()).name != name:
            pass
        if count < times:
            child.process.kill()
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("times", "survives"), [(1, True), (MAX_RESTARTS + 1, False)])
async def test_an_ended_worker_is_restarted_a_bounded_number_of_times(arrivals, tmp_path, monkeypatch, times, survives):
    tasks = []

    def disturb(plan, model, **told):
        tasks.append(asyncio.create_task(kill_each(arrivals, "decode-0", times)))
        return "up"

    monkeypatch.setattr(up_module, "_welcome", disturb)
    plan = plan_of("", **{"decode-0": "import signal; signal.pause()"})
    try:
        if survives:
            assert await run(plan, tmp_path) == 0
        else:
            with pytest.raises(StartFailed, match="decode-0 ended by itself with exit code -9"):
                await run(plan, tmp_path)
    finally:
        assert tasks[0].done() is survives
        tasks[0].cancel()
    assert None not in exit_codes(arrivals)


@pytest.mark.parametrize(
    ("flaws", "words"),
    [
        ("dies at start", r"router ended by itself with exit code 1[\s\S]*no such weights"),
        ("dies of requests", r"router ended by itself with exit code 5[\s\S]*the request killed me"),
        ("fails requests", "first completion: HTTP 500"),
        ("moves nothing", "no page moved"),
    ],
)
async def test_a_failed_smoke_request_fails_the_start(arrivals, tmp_path, capsys, flaws, words):
    with pytest.raises(StartFailed, match=words):
        await run(plan_of(flaws), tmp_path)
    assert capsys.readouterr().out == ""
    assert None not in exit_codes(arrivals)


async def test_a_worker_that_ends_while_starting_fails_the_start(arrivals, tmp_path):
    plan = plan_of("never ready", **{"decode-0": "import sys; sys.exit('out of pages')"})
    with pytest.raises(StartFailed, match=r"decode-0 ended by itself with exit code 1[\s\S]*out of pages"):
        await run(plan, tmp_path)
    codes = exit_codes(arrivals)
    assert len(codes) == 2
    assert None not in codes


async def test_a_start_ends_at_its_deadline(arrivals, tmp_path):
    with pytest.raises(StartFailed, match="no request was served within 1 s"):
        await run(plan_of("never ready"), tmp_path, start_timeout_s=1.0)
    assert None not in exit_codes(arrivals)


async def test_a_signal_while_starting_ends_cleanly(arrivals, tmp_path):
    task = asyncio.create_task(run(plan_of("never ready"), tmp_path))
    child = await asyncio.wait_for(arrivals.get(), DEADLINE_S)
    os.kill(os.getpid(), signal.SIGINT)
    assert await task == 0
    assert child.process.returncode is not None


STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"


async def test_a_second_signal_kills_what_has_not_stopped(arrivals, tmp_path, monkeypatch):
    """The router stops, which is its turn; the worker never would."""
    tasks = []

    async def disturb() -> None:
        children = {child.name: child for child in [await arrivals.get(), await arrivals.get()]}
        await wait_for_log(children["decode-0"], "up")
        os.kill(os.getpid(), signal.SIGTERM)
        await children["router"].exit
        os.kill(os.getpid(), signal.SIGINT)
        assert await children["decode-0"].exit == -signal.SIGKILL

    monkeypatch.setattr(up_module, "_welcome", lambda *_, **__: tasks.append(asyncio.create_task(disturb())))
    monkeypatch.setattr(up_module, "_STOP_SLACK_S", 10 * DEADLINE_S)
    assert await run(plan_of("", **{"decode-0": STUBBORN}), tmp_path) == EXIT_INTERRUPTED
    await tasks[0]


async def test_two_signals_while_starting_end_it(arrivals, tmp_path):
    task = asyncio.create_task(run(plan_of("never ready", **{"decode-0": STUBBORN}), tmp_path))
    children = [await arrivals.get(), await arrivals.get()]
    for child in children:
        await wait_for_log(child, "up" if child.name == "decode-0" else "serving")
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == EXIT_INTERRUPTED
    assert None not in [child.process.returncode for child in children]


async def test_the_first_signal_after_a_failed_start_kills_what_stops(arrivals, tmp_path, monkeypatch):
    """The router ends by itself, and the worker would never stop."""
    monkeypatch.setattr(up_module, "_STOP_SLACK_S", 10 * DEADLINE_S)
    task = asyncio.create_task(run(plan_of("never ready", **{"decode-0": STUBBORN}), tmp_path))
    children = {child.name: child for child in [await arrivals.get(), await arrivals.get()]}
    await wait_for_log(children["decode-0"], "up")
    stopping, stop = asyncio.Event(), Supervisor.stop

    async def tell_and_stop(self, stages, grace_s):
        stopping.set()
        return await stop(self, stages, grace_s)

    monkeypatch.setattr(Supervisor, "stop", tell_and_stop)
    children["router"].process.kill()
    await stopping.wait()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(StartFailed, match="router ended by itself with exit code -9"):
        await task
    assert children["decode-0"].process.returncode == -signal.SIGKILL


@pytest.fixture
def forking(tmp_path):
    """A plan with a service that is forked, and its fork server."""
    plan = plan_of("")
    plan = replace(plan, commands=(forked_router("decode-0"), *plan.commands))
    fork_server = ServiceForkServer(plan.commands, tmp_path)
    yield plan, fork_server
    fork_server.close()


@pytest.mark.skipif(not can_fork(), reason="processes cannot be adopted here")
async def test_a_signal_ends_a_restart_that_hangs(arrivals, tmp_path, monkeypatch, forking):
    """The fork server is stopped, and a service is killed."""
    plan, fork_server = forking
    servers: list[int] = []
    restart = Supervisor.restart

    async def restart_and_sigterm(self, child):
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        return await restart(self, child)

    async def disturb() -> None:
        while (child := await arrivals.get()).name != "decode-0":
            pass
        servers.append(fork_server_of(os.getpid()))
        os.kill(servers[0], signal.SIGSTOP)
        child.process.kill()

    tasks = []
    monkeypatch.setattr(Supervisor, "restart", restart_and_sigterm)
    monkeypatch.setattr(up_module, "_welcome", lambda *_, **__: tasks.append(asyncio.create_task(disturb())))
    assert await run(plan, tmp_path, fork_server=fork_server) == 0
    await tasks[0]
    assert not exists(servers[0])
    assert None not in exit_codes(arrivals)


@pytest.mark.skipif(not can_fork(), reason="processes cannot be adopted here")
async def test_a_fork_server_that_hangs_ends_the_start_at_its_deadline(arrivals, tmp_path, forking):
    plan, fork_server = forking
    fork_server.start()
    server = fork_server_of(os.getpid())
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(StartFailed, match="no request was served within 1 s"):
        await run(plan, tmp_path, start_timeout_s=1.0, fork_server=fork_server)
    assert not exists(server)
    assert exit_codes(arrivals) == [0]


def test_temporary_logs_are_removed_and_kept_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with up_module._log_dir(None) as directory:
        (directory / "router.log").write_text("x")
    assert list(tmp_path.iterdir()) == []
    with up_module._log_dir(tmp_path / "a" / "b") as directory:
        assert directory.is_dir()
    assert (tmp_path / "a" / "b").is_dir()


def test_a_system_without_a_secret_file_gets_its_own_secret():
    with up_module._secret_file(None) as one, up_module._secret_file(None) as other:
        assert one.stat().st_mode & 0o777 == 0o600
        assert len(one.read_text()) == 2 * up_module.SECRET_BYTES
        assert one.read_text() != other.read_text()
        settings = RouterSettings(cluster_secret_file=one)
        assert read_trust(settings).secret == one.read_bytes()
    assert not one.exists()


def test_a_given_secret_file_is_used_unchanged(tmp_path):
    given = tmp_path / "secret"
    given.write_text("s" * 32)
    with up_module._secret_file(given) as path:
        assert path == given
    assert given.exists()


@pytest.mark.parametrize(
    ("called", "on_path", "expected"),
    [
        (".venv/bin/baton", False, ".venv/bin/baton"),
        ("/a b/baton", False, "'/a b/baton'"),
        ("bin/baton", True, "baton"),
        ("-c", False, "baton"),
    ],
)
def test_the_banner_names_the_program_as_the_shell_finds_it(called, on_path, expected, monkeypatch, tmp_path):
    program = tmp_path / "bin" / "baton"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(program.parent) if on_path else "/nonexistent")
    monkeypatch.setattr("sys.argv", [called])
    assert up_module._program() == expected


async def test_the_router_is_asked_last_whether_it_is_ready():
    """Workers that come and go meanwhile change its answer."""
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.path)
        return httpx2.Response(503 if len(asked) in (1, 4) else 200)

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
        waiting = smoke_request.wait_until_ready(client, "http://router", ["http://a/a", "http://b/b"], asyncio.Event())
        await asyncio.wait_for(waiting, DEADLINE_S)
    assert asked == ["/a", "/a", "/b", "/ready", "/ready"]
