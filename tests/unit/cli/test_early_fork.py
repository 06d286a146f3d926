"""`baton up` forks its fork server from itself: a process as a started one, which shares what both have imported."""

from __future__ import annotations

import ctypes
import errno
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
open("/proc/self/comm", "w").write("baton")
import baton.services.cli.main
from baton.services.cli.processes.fork_process import start_early, take_early
{before}
start_early(["up"])
process = take_early()

import asyncio, contextlib, gc, json, os, select, sys
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
    assert select.select([process.requests], [], [], 60.0)[0], "it serves, and has forked nothing"
    shared_before_forks = shared_kib(process.popen.pid)
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
            "names": [Path(f"/proc/{{one}}/comm").read_text() for one in (os.getpid(), pid, child.process.pid)],
            "shared_kib": shared_before_forks,
            "held": [held_by("self"), held_by(pid), held_by(child.process.pid)],
            "frozen": gc.get_freeze_count(),
        }}
        await supervisor.stop((), grace_s=60.0)
        server.close()
    found["ends"] = [child.process.returncode, process.popen.returncode]
    Path("found.json").write_text(json.dumps(found))

asyncio.run(main())
"""
EARLY = """
import os, signal, sys
from pathlib import Path
from baton.services.cli import up
from baton.services.cli.plan import LaunchPlan
from baton.services.cli.processes import fork_process

def refuses(*_):
    raise OSError(int(sys.argv[1]), os.strerror(int(sys.argv[1])))

if int(sys.argv[1]):
    {refused} = refuses
fork_process.start_early(["up"])
[process] = fork_process._early
with up._fork_server(LaunchPlan((), "", (), (), (), ""), Path(sys.argv[2])) as fork_server:
    print(type(process.popen).__name__, fork_server is not None, process.popen.poll() is None)
"""
FAILS_IN_THE_FORK = """
import json, os, socket, sys
from baton.services.cli import main
from baton.services.cli.processes import fork_process
from baton.services.cli.processes.orphans import adopt_orphans

def fails(*_):
    raise RuntimeError("nobody can be told")

def service(process):
    adopt_orphans()
    process.requests.setblocking(True)
    process.requests.recv(4096)
    start, other = socket.socketpair()
    socket.send_fds(process.requests, [b'["serve", "router"]'], [os.open("/dev/full", os.O_WRONLY), other.fileno()])
    pid = json.loads(process.requests.recv(4096))["pid"]
    start.send(b"1")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    process.end()
    return code

def server(process):
    return process.popen.wait()

caller = os.getpid()
{failing} = fails
fork_process.start_early(["up"])
process = fork_process.take_early()
with open("reached", "a") as file:
    print(os.getpid() == caller, file=file)
print({kind}(process))
"""
A_THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
MIN_SHARED_KIB = 8 * 1024
STARTED_NAME = os.path.basename(sys.executable)[:15] + "\n"


def output_of(tmp_path: Path, program: str, *words: str, redirected: str = "", inherited: Sequence[int] = ()) -> str:
    """What a program prints, whose streams have buffers. `redirected`: as a shell has it.

    `inherited`: descriptors that it has from its parent, too.
    """
    (tmp_path / "up.py").write_text(program)
    command = ["/bin/sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "up.py", *words]
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": ""}
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
    return ended.stdout


def facts(tmp_path: Path, before: str = "", redirected: str = "", inherited: Sequence[int] = ()) -> dict[str, Any]:
    """What a program finds that starts an early fork server and a router; its own command line is short."""
    output_of(tmp_path, FORKS.format(before=before), ".", redirected=redirected, inherited=inherited)
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    return found


def test_it_is_a_process_of_its_own_and_shares_imports(tmp_path: Path):
    found = facts(tmp_path)
    assert found["popen"] == ForkedServer.__name__
    assert found["parents"] == found["groups"] == [True, True]
    assert found["input"] == os.devnull
    assert not found["catches_sigterm"], "the handler is that of `baton up`"
    assert found["shared_kib"] > MIN_SHARED_KIB
    assert found["names"] == ["baton\n", STARTED_NAME, STARTED_NAME], "`pkill -x baton` would end all at once"
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
    found = facts(tmp_path, before=A_THREAD)
    assert found["popen"] == "Popen"
    assert found["shared_kib"] < MIN_SHARED_KIB
    assert found["names"] == ["baton\n", STARTED_NAME, STARTED_NAME]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_without_a_standard_stream_it_is_started(closed, tmp_path: Path):
    """Its files would take the place of the stream, and be replaced by its output."""
    found = facts(tmp_path, redirected=closed)
    assert found["popen"] == "Popen"
    assert found["ends"][0] == 0


@pytest.mark.parametrize("refused", ["os.pidfd_open", "signal.pidfd_send_signal"])
@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_where_the_kernel_refuses_to_watch_it_is_started_and_ends(error, refused, tmp_path: Path):
    """`baton up` then starts its services by themselves."""
    found = output_of(tmp_path, EARLY.format(refused=refused), str(error), str(tmp_path))
    assert found.split() == ["Popen", "False", "False"]


def test_where_forks_can_be_watched_the_forked_one_is_used(tmp_path: Path):
    found = output_of(tmp_path, EARLY.format(refused="os.pidfd_open"), "0", str(tmp_path))
    assert found.split() == [ForkedServer.__name__, "True", "True"]


@pytest.mark.parametrize(
    ("kind", "failing"), [("server", "fork_process.die_with_parent.end_with_parent"), ("service", "main.run")]
)
def test_a_fork_that_fails_and_cannot_say_so_ends(kind, failing, tmp_path: Path):
    """It must not go on with what `baton up` does: Redis, ports and workers would be there twice."""
    program = FAILS_IN_THE_FORK.format(kind=kind, failing=failing)
    assert output_of(tmp_path, program, redirected="2>/dev/full") == "1\n"
    assert (tmp_path / "reached").read_text() == "True\n"


@pytest.fixture(params=[True, False], ids=["watched", "polled"])
def waiting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ForkedServer, int]]:
    """A child of this process that ends with the code that it is written, and the descriptor for that.

    The kernel gives a descriptor of it, or refuses that.
    """

    def refuses(_: int) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if not request.param:
        monkeypatch.setattr(os, "pidfd_open", refuses)
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


@pytest.mark.parametrize("waiting", [True], ids=["watched"], indirect=True)
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
