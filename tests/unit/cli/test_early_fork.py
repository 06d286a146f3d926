"""`baton up` forks its fork server from itself: a process as a started one, which shares what both have imported."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.services.cli.processes.fork_process import ForkedServer
from baton.services.cli.processes.fork_server import can_fork
from tests.unit.cli.children import DEADLINE_S

pytestmark = pytest.mark.skipif(not can_fork(), reason="processes cannot be adopted here")

FORKS = """
import signal
signal.signal(signal.SIGTERM, lambda *_: None)
import baton.services.cli.main
from baton.services.cli.processes.fork_process import start_early, take_early
{before}
start_early(["up"])
process = take_early()

import asyncio, contextlib, gc, json, os, sys
from pathlib import Path
from baton.services.cli.processes.fork_server import ServiceForkServer
from baton.services.cli.processes.supervisor import Supervisor
from tests.unit.cli.children import wait_for_log
from tests.unit.cli.test_fork_server import arguments_of, parent_of, router

def shared_kib(pid):
    sizes = Path(f"/proc/{{pid}}/smaps_rollup").read_text().split("Shared_Dirty:")[1]
    return int(sizes.split()[0])

def held_by(pid):
    found = []
    for descriptor in Path(f"/proc/{{pid}}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(descriptor))
    return found

async def main():
    log_dir = Path(sys.argv[1])
    server = ServiceForkServer([router("router")], log_dir, process)
    async with Supervisor(log_dir, server) as supervisor:
        child = await supervisor.start(router("router"))
        await wait_for_log(child, "router_listening")
        pid = process.popen.pid
        caught = Path(f"/proc/{{pid}}/status").read_text().split("SigCgt:")[1].split()[0]
        found = {{
            "popen": type(process.popen).__name__,
            "parents": [parent_of(pid) == os.getpid(), parent_of(child.process.pid) == os.getpid()],
            "groups": [os.getpgid(pid) == pid, os.getpgid(child.process.pid) == child.process.pid],
            "server": arguments_of(pid),
            "child": arguments_of(child.process.pid),
            "expected": child.command.arguments,
            "room": len(b" ".join(map(os.fsencode, sys.orig_argv))),
            "input": os.readlink(f"/proc/{{pid}}/fd/0"),
            "catches_sigterm": bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1),
            "shared_kib": shared_kib(pid),
            "held": [held_by("self"), held_by(pid), held_by(child.process.pid)],
            "frozen": gc.get_freeze_count(),
        }}
        await supervisor.stop((), grace_s=60.0)
        server.close()
    found["ends"] = [child.process.returncode, process.popen.returncode]
    print(json.dumps(found))

asyncio.run(main())
"""
A_THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
MIN_SHARED_KIB = 8 * 1024


def facts(tmp_path: Path, before: str = "", inherited: Sequence[int] = ()) -> dict[str, Any]:
    """What a program finds that starts an early fork server and a router; its own command line is short.

    `inherited`: descriptors that it has from its parent, too.
    """
    (tmp_path / "up.py").write_text(FORKS.format(before=before))
    command = [sys.executable, "up.py", "."]
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * DEADLINE_S,
        env=environment,
        pass_fds=inherited,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_it_is_a_process_of_its_own_and_shares_imports(tmp_path: Path):
    found = facts(tmp_path)
    assert found["popen"] == ForkedServer.__name__
    assert found["parents"] == found["groups"] == [True, True]
    assert found["input"] == os.devnull
    assert not found["catches_sigterm"], "the handler is that of `baton up`"
    assert found["shared_kib"] > MIN_SHARED_KIB
    assert found["frozen"] > 0, "a collection would copy what is shared"
    child, server = found["ends"]
    assert child == 0
    assert server in (0, -signal.SIGKILL), "killed, unless it has seen the end of its socket before"


def test_what_up_inherits_is_not_held_by_its_processes(tmp_path: Path):
    """A script that waits for the end of a pipe, or for a lock of `flock`, would wait for services that live on."""
    read, write = os.pipe()
    with (tmp_path / "lock").open("w") as lock:
        names = {os.readlink(f"/proc/self/fd/{number}") for number in (write, lock.fileno())}
        up, *others = facts(tmp_path, inherited=[write, lock.fileno()])["held"]
    os.close(read)
    os.close(write)
    assert names <= set(up)
    assert [names.intersection(other) for other in others] == [set(), set()]


def _may_move_arguments() -> bool:
    """True if the kernel knows PR_SET_MM_MAP: it tells the size of its table."""
    size = ctypes.c_uint32()
    set_mm, map_size = 35, 15
    return bool(ctypes.CDLL(None).prctl(set_mm, map_size, ctypes.byref(size), 0, 0) == 0)


@pytest.mark.skipif(not _may_move_arguments(), reason="the kernel gives no other place for arguments (PR_SET_MM_MAP)")
def test_ps_shows_commands_that_are_longer_than_that_of_up(tmp_path: Path):
    found = facts(tmp_path)
    assert found["server"][-1].endswith("fork_program")
    assert found["child"] == found["expected"]
    assert len(" ".join(found["child"])) > found["room"]


def test_beside_a_thread_it_is_started(tmp_path: Path):
    """A fork would have the thread's locks, but not the thread."""
    assert facts(tmp_path, before=A_THREAD)["popen"] == "Popen"


@pytest.fixture
def waiting() -> Iterator[tuple[ForkedServer, int]]:
    """A child of this process that ends with the code that it is written, and the descriptor for that."""
    read, write = os.pipe()
    program = "import sys; sys.exit(int(sys.stdin.readline()))"
    actions = [(os.POSIX_SPAWN_DUP2, read, 0)]
    server = ForkedServer(os.posix_spawn(sys.executable, [sys.executable, "-c", program], {}, file_actions=actions))
    os.close(read)
    yield server, write
    os.close(write)
    server.kill()
    server.wait(DEADLINE_S)


def test_the_end_of_a_forked_server_is_waited_for(waiting):
    server, write = waiting
    assert server.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(0.01)
    os.write(write, b"7\n")
    assert server.wait(DEADLINE_S) == 7
    server.kill()  # not another process that has its pid by now
    assert server.poll() == 7


def test_a_killed_forked_server_has_the_signal_as_its_code(waiting):
    server, _ = waiting
    server.kill()
    assert server.wait(DEADLINE_S) == -signal.SIGKILL


def test_each_of_two_callers_gets_the_end_of_a_forked_server(waiting, monkeypatch: pytest.MonkeyPatch):
    """The second one reaps it before the first one can."""
    server, write = waiting
    seconds: list[int] = []

    def reaped_meanwhile(*arguments: Any) -> Any:
        monkeypatch.undo()
        found = select.select(*arguments)
        seconds.append(server.wait(DEADLINE_S))
        return found

    monkeypatch.setattr(select, "select", reaped_meanwhile)
    os.write(write, b"7\n")
    assert server.wait(DEADLINE_S) == 7
    assert seconds == [7]
