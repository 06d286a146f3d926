"""`baton up` has a fork server once its own program is imported, which then serves it, or ends with it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.services.cli import entry, up
from baton.services.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, StartFailed
from baton.services.cli.plan import LaunchPlan
from baton.services.cli.processes import fork_process
from baton.services.cli.processes.fork_process import ForkProcess, close_early, start_early, take_early
from baton.services.cli.processes.fork_server import LOG_NAME, ServiceForkServer, can_fork
from baton.services.cli.processes.supervisor import Supervisor
from tests.unit.cli.children import DEADLINE_S, exists, fork_server_of, wait_for_log
from tests.unit.cli.test_fork_server import router

SAYS_EARLY_AND_LATE = """
import os
fork = os.fork
def told():
    os.write(2, b"late ")
    return fork()
os.fork = told
os.write(2, b"early ")
"""
BEFORE_HANDLERS = """
def stays(settings, console):
    print("waits", flush=True)
    threading.Event().wait()
up._with_deployment = stays
"""
AFTER_HANDLERS = """
async def stays(*_):
    with shutdown_event():
        pass
    print("waits", flush=True)
    threading.Event().wait()
up._with_deployment = lambda settings, console: settings
up.run_plan = stays
"""
FAILS = """
async def fails(*_):
    raise StartFailed("a worker ended by itself")
up._with_deployment = lambda settings, console: settings
up.run_plan = fails
"""
CLEANS_SLOWLY = """
@contextlib.contextmanager
def waits(given):
    with secret_file(given) as file:
        try:
            yield file
        finally:
            print("cleans", flush=True)
            sys.stdin.readline()
secret_file, up._secret_file = up._secret_file, waits
"""
STAYING = """
import contextlib, sys, threading
from baton.rpc.shutdown import shutdown_event
from baton.services.cli import entry, up
from baton.services.cli.errors import StartFailed
{}
sys.argv = ["baton", "up", "--port=0", "--kv-memory-mib=64"]
entry.main()
"""

pytestmark = pytest.mark.skipif(not can_fork(), reason="processes cannot be adopted here")


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """These tests are no process to fork: theirs are started. `test_early_fork` has the others."""
    monkeypatch.setattr(fork_process, "_can_be_forked", lambda: False)
    yield
    close_early()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None], list[str]], None]:
    """Runs the entry point with a command line, and a function in place of the command's own `main`."""

    def run(main: Callable[[], None], words: list[str]) -> None:
        module = types.ModuleType("a_program")
        module.main = main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(entry, "PROGRAM", module.__name__)
        monkeypatch.setattr(sys, "argv", ["baton", *words])
        entry.main()

    return run


def test_up_has_a_fork_server_when_its_own_program_is_imported(program):
    taken: list[ForkProcess | None] = []
    program(lambda: taken.append(take_early()), ["up", "bundled"])
    [process] = taken
    assert process is not None
    assert process.popen.poll() is None, "what was taken goes on"
    process.close()


@pytest.mark.parametrize("words", [[], ["serve", "router"], ["up", "--help"]])
def test_other_commands_start_no_fork_server(program, words):
    taken: list[ForkProcess | None] = []
    program(lambda: taken.append(take_early()), words)
    assert taken == [None]


def test_a_fork_server_that_nobody_takes_ends_with_the_command(program):
    servers: list[int] = []

    def fails() -> None:
        servers.extend(process.popen.pid for process in fork_process._early)
        sys.exit(2)

    with pytest.raises(SystemExit):
        program(fails, ["up"])
    assert [exists(server) for server in servers] == [False]


def test_ctrl_c_while_the_program_is_imported_is_an_exit_code(program):
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as raised:
        program(interrupted, ["serve"])
    assert raised.value.code == EXIT_INTERRUPTED == entry.EXIT_INTERRUPTED


@pytest.mark.parametrize(("words", "interrupts"), [(["up"], True), (["serve"], False)])
def test_sigterm_interrupts_up_alone_and_only_while_it_runs(program, words, interrupts):
    before = signal.getsignal(signal.SIGTERM)
    within: list[object] = []
    program(lambda: within.append(signal.getsignal(signal.SIGTERM)), words)
    assert (within != [before]) is interrupts
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("stage", [BEFORE_HANDLERS, AFTER_HANDLERS], ids=["before", "after"])
def test_up_leaves_nothing_when_no_loop_waits_for_sigterm(stage, tmp_path: Path):
    """It has folders for Redis and for logs, and a secret by then."""
    command = [sys.executable, "-c", STAYING.format(stage)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
            made = {path.name.rpartition("-")[0] for path in tmp_path.iterdir()}
            assert made >= {"baton-redis", "baton-secret", "baton-logs"}
            process.terminate()
            assert process.wait(DEADLINE_S) == EXIT_INTERRUPTED
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stage", "exit_code"),
    [(BEFORE_HANDLERS, EXIT_INTERRUPTED), (AFTER_HANDLERS, EXIT_INTERRUPTED), (FAILS, EXIT_FAILED)],
    ids=["before", "after", "failed"],
)
def test_signals_do_not_interrupt_what_removes_the_files(stage, exit_code, tmp_path: Path):
    command = [sys.executable, "-c", STAYING.format(CLEANS_SLOWLY + stage)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            if stage is not FAILS:
                assert process.stdout.readline() == "waits\n"
                process.terminate()
            assert process.stdout.readline() == "cleans\n"
            assert list(tmp_path.iterdir()) != []
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                process.send_signal(number)
            process.stdin.write("\n")
            process.stdin.close()
            assert process.wait(DEADLINE_S) == exit_code
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []


def test_without_a_file_in_memory_nothing_is_started_early(program, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    taken: list[ForkProcess | None] = []
    program(lambda: taken.append(take_early()), ["up"])
    assert taken == [None]


def test_an_early_server_that_cannot_be_used_ends(tmp_path: Path, monkeypatch):
    start_early(["up"])
    [process] = fork_process._early
    monkeypatch.setattr(up, "can_fork", lambda: False)
    with up._fork_server(LaunchPlan((), "", (), (), (), ""), tmp_path) as fork_server:
        assert fork_server is None
        assert not exists(process.popen.pid)


def test_an_early_server_ends_without_a_folder_for_its_log(tmp_path: Path):
    folder = tmp_path / "logs"
    folder.mkdir()
    start_early(["up"])
    process = take_early()
    assert process is not None
    fork_server = ServiceForkServer([router("router")], folder, process)
    shutil.rmtree(folder)
    fork_server.close()
    assert not exists(process.popen.pid)


async def test_what_an_early_server_wrote_first_is_first_in_the_log(tmp_path: Path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(SAYS_EARLY_AND_LATE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    start_early(["up"])
    fork_server = ServiceForkServer([router("router")], tmp_path, take_early())
    try:
        async with Supervisor(tmp_path, fork_server) as supervisor:
            await supervisor.start(router("router"))
            assert (tmp_path / LOG_NAME).read_text().split() == ["early", "late", "late"]
    finally:
        fork_server.close()


async def test_an_early_server_forks_services_and_writes_the_log(tmp_path: Path):
    start_early(["up"])
    process = take_early()
    fork_server = ServiceForkServer([router("router")], tmp_path, process)
    try:
        async with Supervisor(tmp_path, fork_server) as supervisor:
            child = await supervisor.start(router("router"))
            await wait_for_log(child, "router_listening")
            server = fork_server_of(os.getpid())
            assert process is not None
            assert server == process.popen.pid
            assert os.readlink(f"/proc/{server}/fd/1") == str(tmp_path / LOG_NAME)
    finally:
        fork_server.close()


async def test_an_early_server_that_cannot_import_tells_why(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(fork_process, "FIRST_SERVICE", "nowhere")
    start_early(["up"])
    fork_server = ServiceForkServer([router("router")], tmp_path, take_early())
    async with Supervisor(tmp_path, fork_server) as supervisor:
        with pytest.raises(StartFailed, match=r"exit code 1[\s\S]*No module named 'baton.services.nowhere'"):
            await asyncio.wait_for(supervisor.start(router("router")), DEADLINE_S)
    assert (tmp_path / LOG_NAME).read_text().count("ModuleNotFoundError") == 1
