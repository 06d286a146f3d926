"""Services as forks of one process: each is a process as any other, and outlives the one that forked it."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from baton.services.cli.errors import StartFailed
from baton.services.cli.processes import fork_program
from baton.services.cli.processes import fork_server as fork_server_module
from baton.services.cli.processes.child_command import ChildCommand
from baton.services.cli.processes.fork_server import LOG_NAME, ForkedService, ServiceForkServer, can_fork
from baton.services.cli.processes.supervisor import Supervisor
from baton.settings.process import thread_variables
from tests.unit.cli.children import DEADLINE_S, exists, fork_server_of, supervising_program, wait_for_log

pytestmark = pytest.mark.skipif(not can_fork(), reason="processes cannot be adopted here")

SERVES = ("--model=bundled", "--port=0", "--metrics-port=0", "--redis-url=memory://")

FOREIGN_THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
FAILING_ONCE = """
import errno, os
fork = os.fork
def fail():
    os.fork = fork
    raise OSError(errno.EAGAIN, "no process to be had")
os.fork = fail
"""
WITHOUT_KERNELS = """
import sys, types
choice = types.SimpleNamespace(kernels=None, note="no native kernels: built from other sources")
module = types.ModuleType("baton.model.loading.kernel_choice")
module.best_kernels = lambda: choice
sys.modules[module.__name__] = module
"""
WITH_A_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""

KILLED = "import os, signal; print('started', flush=True); os.kill(os.getpid(), signal.SIGKILL)"

ORPHANING = """
import asyncio, sys
from pathlib import Path
from baton.services.cli.processes.fork_server import ServiceForkServer
from baton.services.cli.processes.supervisor import Supervisor
from tests.unit.cli.children import wait_for_log
from tests.unit.cli.test_fork_server import router

async def main():
    log_dir = Path(sys.argv[1])
    supervisor = Supervisor(log_dir, ServiceForkServer([router("router")], log_dir))
    child = await supervisor.start(router("router"))
    await wait_for_log(child, "router_listening")
    print(child.process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def router(name: str, flags: Sequence[str] = SERVES) -> ChildCommand:
    words = ("serve", "router", *flags)
    arguments = (sys.executable, "-m", "baton.services.cli.main", *words)
    return ChildCommand(name, arguments, thread_variables(2), words)


@pytest.fixture
def fork_server(tmp_path: Path) -> Iterator[ServiceForkServer]:
    fork_server = ServiceForkServer([router("router")], tmp_path)
    yield fork_server
    fork_server.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def arguments_of(pid: int) -> tuple[str, ...]:
    return tuple(map(os.fsdecode, Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")))


def exit_code_of(pid: int) -> int:
    """Waits for the end of a child."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def assert_has_its_own_group_in_this_session(pid: int) -> None:
    """Signals of a terminal do not reach it, and the kernel shares cores among the threads of all services."""
    assert os.getpgid(pid) == pid
    assert os.getsid(pid) == os.getsid(0)
    scheduled = Path(f"/proc/{pid}/autogroup")
    if scheduled.exists():
        assert scheduled.read_text() == Path("/proc/self/autogroup").read_text()


async def test_a_fork_is_a_child_with_arguments_group_and_log(fork_server, tmp_path):
    async with Supervisor(tmp_path, fork_server) as supervisor:
        child = await supervisor.start(router("router"))
        await wait_for_log(child, "router_listening")
        pid = child.process.pid
        assert parent_of(pid) == os.getpid()
        assert_has_its_own_group_in_this_session(pid)
        assert_has_its_own_group_in_this_session(fork_server_of(os.getpid()))
        assert arguments_of(pid) == child.command.arguments
        assert await supervisor.stop((), grace_s=DEADLINE_S) == []
    assert child.process.returncode == 0


async def test_ends_of_forks_are_told_by_exit_code_and_signal(fork_server, tmp_path):
    async with Supervisor(tmp_path, fork_server) as supervisor:
        wrong = await supervisor.start(router("wrong", ["--nonsense=1"]))
        assert await asyncio.wait_for(supervisor.first_exit(), DEADLINE_S) is wrong
        assert wrong.process.returncode == 2
        assert "--nonsense" in wrong.log_tail()
        killed = await supervisor.start(router("killed"))
        await wait_for_log(killed, "router_listening")
        supervisor.end(killed, graceful=False)
        assert await asyncio.wait_for(killed.exit, DEADLINE_S) == -signal.SIGKILL


async def test_forks_outlive_their_server_which_is_started_again(fork_server, tmp_path):
    async with Supervisor(tmp_path, fork_server) as supervisor:
        first = await supervisor.start(router("first"))
        await wait_for_log(first, "router_listening")
        server = fork_server_of(os.getpid())
        os.kill(server, signal.SIGKILL)
        second = await supervisor.start(router("second"))
        await wait_for_log(second, "router_listening")
        assert first.running
        assert fork_server_of(os.getpid()) != server


async def test_a_server_killed_before_its_first_fork_is_started_again(fork_server, tmp_path):
    fork_server.start()
    process = fork_server._process.popen
    process.kill()
    assert await asyncio.to_thread(process.wait, DEADLINE_S) == -signal.SIGKILL
    async with Supervisor(tmp_path, fork_server) as supervisor:
        child = await supervisor.start(router("router"))
        await wait_for_log(child, "router_listening")
        assert isinstance(child.process, ForkedService)


async def test_a_server_that_is_killed_again_is_given_up(with_startup_code, tmp_path):
    command, fork_server = with_startup_code(KILLED)
    async with Supervisor(tmp_path, fork_server) as supervisor:
        with pytest.raises(StartFailed, match="exit code -9"):
            await asyncio.wait_for(supervisor.start(command), DEADLINE_S)
    assert (tmp_path / LOG_NAME).read_text().count("started") == 2


async def test_a_server_that_ends_while_importing_tells_why(tmp_path):
    broken = ChildCommand("broken", (sys.executable,), {}, ("serve", "nowhere"))
    fork_server = ServiceForkServer([broken], tmp_path)
    async with Supervisor(tmp_path, fork_server) as supervisor:
        with pytest.raises(StartFailed, match=r"exit code 1[\s\S]*No module named 'baton.services.nowhere'"):
            await supervisor.start(broken)
    assert (tmp_path / LOG_NAME).read_text().count("No module named") == 1, "an exit is final at once"


async def test_a_fork_whose_supervisor_has_not_heard_of_it_ends(fork_server, tmp_path, monkeypatch):
    """Its socket is closed without a byte: nobody would watch it."""
    pids: list[int] = []

    def lost(pid: int) -> None:
        pids.append(pid)
        raise RuntimeError("lost")

    monkeypatch.setattr("baton.services.cli.processes.fork_server.ForkedService", lost)
    async with Supervisor(tmp_path, fork_server) as supervisor:
        with pytest.raises(RuntimeError, match="lost"):
            await supervisor.start(router("router"))
    assert exit_code_of(pids[0]) == 1
    assert (tmp_path / "router.log").read_bytes() == b""


def test_commands_that_need_other_libraries_are_not_forked(fork_server):
    other = ChildCommand("other", (sys.executable, "-c", "pass"), thread_variables(2))
    more_threads = ChildCommand("more", (), thread_variables(3), ("serve", "router"))
    traced = ChildCommand("traced", (), {**thread_variables(2), "MALLOC_CHECK_": "3"}, ("serve", "router"))
    commands = (router("router"), other, more_threads, traced)
    assert [fork_server.takes(command) for command in commands] == [True, False, True, False]


@pytest.mark.parametrize("missing", [(os, "pidfd_open"), (signal, "pidfd_send_signal")])
def test_a_python_without_pidfds_cannot_fork(missing, monkeypatch):
    monkeypatch.delattr(*missing)
    assert not can_fork()


def test_nothing_is_forked_beside_a_thread():
    """A fork would have the thread's locks, but not the thread."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        with pytest.raises(OSError, match="threads run in the fork server") as raised:
            fork_program.fork_orphan()
        assert raised.value.errno == errno.EDEADLK
    finally:
        ended.set()
        thread.join()


def test_forks_end_with_a_killed_supervisor(tmp_path):
    with supervising_program(ORPHANING, tmp_path) as (parent, child):
        server = os.pidfd_open(fork_server_of(parent.pid))
        try:
            parent.kill()
            for process in (child, server):
                assert select.select([process], [], [], DEADLINE_S)[0] == [process]
        finally:
            os.close(server)


@pytest.fixture
def with_startup_code(tmp_path):
    """A router whose interpreter, and the fork server's, runs given code first; and its fork server."""
    servers: list[ServiceForkServer] = []

    def make(code: str) -> tuple[ChildCommand, ServiceForkServer]:
        (tmp_path / "sitecustomize.py").write_text(code)
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = replace(router("router"), variables={**thread_variables(2), "PYTHONPATH": path})
        servers.append(ServiceForkServer([command], tmp_path))
        return command, servers[0]

    yield make
    for server in servers:
        server.close()


async def test_beside_a_foreign_thread_services_start_by_themselves(with_startup_code, tmp_path, caplog):
    command, fork_server = with_startup_code(FOREIGN_THREAD)
    async with Supervisor(tmp_path, fork_server) as supervisor:
        for _ in range(2):
            child = await supervisor.start(command)
            assert not isinstance(child.process, ForkedService)
        await wait_for_log(child, "router_listening")
    assert caplog.text.count("router could not be forked, and is started by itself") == 2
    assert "1 threads run in the fork server" in caplog.text


async def test_after_a_failed_fork_the_next_service_is_forked(with_startup_code, tmp_path, caplog):
    command, fork_server = with_startup_code(FAILING_ONCE)
    async with Supervisor(tmp_path, fork_server) as supervisor:
        first = await supervisor.start(command)
        assert not isinstance(first.process, ForkedService)
        assert "no process to be had" in caplog.text
        second = await supervisor.start(command)
        assert isinstance(second.process, ForkedService)
        for child in (first, second):
            await wait_for_log(child, "router_listening")


async def test_missing_kernels_are_told_once(with_startup_code, tmp_path, caplog):
    command, fork_server = with_startup_code(WITHOUT_KERNELS)
    async with Supervisor(tmp_path, fork_server) as supervisor:
        for _ in range(2):
            await wait_for_log(await supervisor.start(command), "router_listening")
    assert caplog.text.count("no native kernels: built from other sources. Steps take longer") == 1


async def test_a_server_that_does_not_answer_is_killed(fork_server, tmp_path, monkeypatch):
    async with Supervisor(tmp_path, fork_server) as supervisor:
        await wait_for_log(await supervisor.start(router("first")), "router_listening")  # it has its arguments by then
        server = fork_server_of(os.getpid())
        os.kill(server, signal.SIGSTOP)
        monkeypatch.setattr(fork_server_module, "FORK_TIMEOUT_S", 0.1)
        with pytest.raises(StartFailed, match="has not answered within 0 s, asked for second"):
            await asyncio.wait_for(supervisor.start(router("second")), DEADLINE_S)
        assert not exists(server)


async def test_an_orphan_of_a_killed_service_is_reaped(fork_server, tmp_path):
    """Its parent is killed, so it becomes a child of this process, and ends at the end of its input."""
    parent = ChildCommand("parent", (sys.executable, "-c", WITH_A_CHILD), {})
    async with Supervisor(tmp_path, fork_server) as supervisor:
        fork_server.start()  # adopts orphans
        child = await supervisor.start(parent)
        await wait_for_log(child, "\n")
        orphan = int(child.log.read_text().split()[0])
        supervisor.end(child, graceful=False)
        await child.exit

        async def reaped() -> None:
            while exists(orphan):
                await asyncio.to_thread(select.select, [], [], [], 0.01)

        await asyncio.wait_for(reaped(), DEADLINE_S)
        assert child.process.returncode == -signal.SIGKILL
