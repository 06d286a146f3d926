"""Reads pages of one process in another one, perhaps across two network and process namespaces; prints the path.

    python -m tests.unit.transfer.namespace_pair DIRECTORY [apart]

`apart`: source and reader have namespaces of their own, joined by a virtual cable, as two containers do.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import time
from pathlib import Path

from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.kv.memory import PageMemory
from baton.settings.process import child_environment
from baton.transfer.base import SourceInfo
from baton.transfer.nixl import NixlPuller, NixlSource
from baton.transfer.probe import probe_bandwidth

ID, NUM_PAGES, PAGE_BYTES = WorkerId("prefill-0"), 64, 65536
MOUNT = 'mount -t sysfs none /sys && exec "$@"'
"""UCX lists network devices from /sys."""
UP_TIMEOUT_S = 10.0
DEVICES = {"source": "btn0", "reader": "btn1"}
UNSHARE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")


def start(role: str, directory: Path, apart: bool) -> subprocess.Popen[str]:
    """Starts one side; it begins when a line arrives on its standard input."""
    own = [sys.executable, "-m", "tests.unit.transfer.namespace_pair", str(directory), role]
    command = [*UNSHARE, "sh", "-c", MOUNT, "sh", *own] if apart else own
    # As in compose.yaml: otherwise UCX would offer the loopback device, which leads nowhere.
    environment = child_environment({"UCX_NET_DEVICES": DEVICES[role]} if apart else {})
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def join_by_cable(first: subprocess.Popen[str], second: subprocess.Popen[str]) -> None:
    """Gives each namespace one end of a cable, and an address."""
    run("ip", "link", "add", DEVICES["source"], "netns", str(first.pid), "type", "veth",
        "peer", DEVICES["reader"], "netns", str(second.pid))  # fmt: skip
    for number, process in enumerate((first, second)):
        inside = ("nsenter", "--net", f"--target={process.pid}", "ip")
        device = list(DEVICES.values())[number]
        run(*inside, "address", "add", f"10.77.0.{number + 1}/24", "dev", device)
        run(*inside, "link", "set", device, "up")
        run(*inside, "link", "set", "lo", "up")
    for device, process in zip(DEVICES.values(), (first, second), strict=True):
        wait_until_up(device, process.pid)


def wait_until_up(device: str, pid: int) -> None:
    """UCX uses no device whose carrier is not there yet, and the kernel reports it late."""
    deadline = time.monotonic() + UP_TIMEOUT_S
    show = ("nsenter", "--net", f"--target={pid}", "ip", "-o", "link", "show", "dev", device)
    while "state UP" not in subprocess.run(show, check=True, capture_output=True, text=True).stdout:
        assert time.monotonic() < deadline, f"{device} did not come up"
        time.sleep(0.02)  # between two looks


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def main(directory: Path, apart: bool) -> str:
    """Runs both sides and returns the path that the reader found."""
    source, reader = start("source", directory, apart), start("reader", directory, apart)
    try:
        assert [answer(source), answer(reader)] == ["here", "here"]
        if apart:
            join_by_cable(source, reader)
        tell(source)
        assert answer(source) == "serving"
        tell(reader)
        return answer(reader)
    finally:
        for process in (reader, source):
            with contextlib.suppress(BrokenPipeError):
                process.communicate("\n", timeout=30)


def serve(file: Path) -> None:
    memory = PageMemory(NUM_PAGES, PAGE_BYTES)
    source = NixlSource(ID, Incarnation(1), memory)
    file.write_bytes(pickle.dumps((source.metadata(), memory.address)))
    say("serving")
    sys.stdin.readline()
    source.close()


def read(file: Path) -> str:
    metadata, address = pickle.loads(file.read_bytes())
    puller = NixlPuller(WorkerId("decode-0"), Incarnation(2), PageMemory(NUM_PAGES, PAGE_BYTES), lambda _: None)
    info = SourceInfo(ID, Incarnation(1), "", "nixl", metadata, address, NUM_PAGES, PAGE_BYTES)
    try:
        puller.connect(info)
        pages = [PageId(page) for page in range(NUM_PAGES)]
        probe_bandwidth(puller, info, pages, NUM_PAGES, deadline_s=30.0, on_pages_free=lambda: None)
        return puller.path(ID)
    finally:
        puller.close()


if __name__ == "__main__":
    directory, role = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    if role in ("source", "reader"):
        say("here")
        sys.stdin.readline()
        serve(directory / "source") if role == "source" else say(read(directory / "source"))
    else:
        say(main(directory, apart=role == "apart"))
