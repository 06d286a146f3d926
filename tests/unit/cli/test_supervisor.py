"""Child processes: logs, the order of their stop, and their end with this process."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.services.cli.processes.child_command import ChildCommand
from baton.services.cli.processes.supervisor import Child, Supervisor
from tests.unit.cli.children import DEADLINE_S, supervising_program, wait_for_log

# Says hello, waits for SIGTERM, notes its name in a shared file.
POLITE = """
import os, signal, sys
def stop(*_):
    with open(sys.argv[2], "a") as file:
        file.write(sys.argv[1] + "\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
print("hello from", sys.argv[1], os.environ["MARK"], flush=True)
while True:
    signal.pause()
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('hello', flush=True); signal.pause()"

ORPHANING = """
import asyncio, os, sys
from pathlib import Path
from baton.services.cli.processes.child_command import ChildCommand
from baton.services.cli.processes.supervisor import Supervisor

async def main():
    supervisor = Supervisor(Path(sys.argv[1]))
    child = await supervisor.start(ChildCommand("child", (sys.executable, "-c", "import signal; signal.pause()"), {}))
    print(child.process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def polite(name: str, notes: Path) -> ChildCommand:
    return ChildCommand(name, (sys.executable, "-c", POLITE, name, str(notes)), {"MARK": "marked"})


async def test_children_stop_stage_by_stage(tmp_path):
    notes = tmp_path / "notes"
    async with Supervisor(tmp_path) as supervisor:
        for name in ("prefill-0", "decode-0", "decode-1", "router"):
            await supervisor.start(polite(name, notes))
        for child in supervisor.children:
            await wait_for_log(child, f"hello from {child.name} marked")
        assert await supervisor.stop(("router", "decode"), grace_s=DEADLINE_S) == []
    order = notes.read_text().split()
    assert order[0] == "router"
    assert set(order[1:3]) == {"decode-0", "decode-1"}
    assert order[3] == "prefill-0"


async def test_a_child_that_does_not_stop_is_killed_and_named(tmp_path):
    async with Supervisor(tmp_path) as supervisor:
        child = await supervisor.start(ChildCommand("mule", (sys.executable, "-c", STUBBORN), {}))
        await wait_for_log(child, "hello")
        assert await supervisor.stop((), grace_s=0.1) == ["mule"]
    assert child.process.returncode == -signal.SIGKILL


async def test_signals_reap_no_child(tmp_path, monkeypatch):
    """Those of asyncio do by `Popen.poll`, and the exit code is lost to its watcher."""

    def poll(_: object) -> None:
        raise AssertionError("the child would be reaped")

    async with Supervisor(tmp_path) as supervisor:
        child = await supervisor.start(ChildCommand("mule", (sys.executable, "-c", STUBBORN), {}))
        await wait_for_log(child, "hello")
        with monkeypatch.context() as patched:
            patched.setattr(subprocess.Popen, "poll", poll)
            supervisor.end(child, graceful=True)
            supervisor.kill()
            assert await supervisor.stop((), grace_s=DEADLINE_S) == ["mule"]


async def test_the_first_ended_child_is_returned_with_its_log(tmp_path):
    async with Supervisor(tmp_path) as supervisor:
        await supervisor.start(polite("lasting", tmp_path / "notes"))
        program = "import sys; [print('line', i) for i in range(100)]; sys.exit(7)"
        await supervisor.start(ChildCommand("short", (sys.executable, "-c", program), {}))
        child = await asyncio.wait_for(supervisor.first_exit(), DEADLINE_S)
        assert (child.name, child.process.returncode) == ("short", 7)
        assert child.log_tail(2) == "line 98\nline 99"


async def test_leaving_the_context_kills_every_child(tmp_path):
    async def start_and_fail() -> None:
        async with Supervisor(tmp_path) as supervisor:
            children.append(await supervisor.start(ChildCommand("mule", (sys.executable, "-c", STUBBORN), {})))
            pid = children[0].process.pid
            assert os.getpgid(pid) == pid, "signals of a terminal do not reach it"
            assert os.getsid(pid) == os.getsid(0), "the kernel shares cores among sessions first"
            raise ZeroDivisionError

    children: list[Child] = []
    with pytest.raises(ZeroDivisionError):
        await start_and_fail()
    assert children[0].process.returncode is not None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_children_die_when_their_supervisor_is_killed(tmp_path):
    with supervising_program(ORPHANING, tmp_path) as (parent, child):
        parent.kill()
        assert select.select([child], [], [], DEADLINE_S)[0] == [child]
