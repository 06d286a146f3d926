"""A signal stops an experiment's servers and keeps its finished rotations."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request

import pytest

from baton.services.cli.processes.ports import free_ports
from bench.harness.signals import EXIT_INTERRUPTED
from bench.report import load_result

WAIT_S = 60.0
EXPERIMENT = """
import asyncio, io, sys
from pathlib import Path

import uvloop
from rich.console import Console

from bench.harness.signals import run_command
from bench.harness.rotations import ResultFile, make_finding, rotate
from bench.harness.running_system import running_server

port, path = int(sys.argv[1]), Path(sys.argv[2])
url = f"http://127.0.0.1:{port}"
server = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]


def found(blocks):
    return [make_finding("arm", "", blocks, ("arm",), lambda group: group[0].values[0])]


async def wait_for_ever(said=[]):
    if said:
        print("measuring", flush=True)
        await asyncio.Event().wait()
    said.append(True)
    return [1.0]


def main():
    with running_server(server, url, "/"), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        keep = ResultFile(path, "name", 2, found).write
        arms = {"arm": lambda: runner.run(wait_for_ever())}
        rotate(arms, lambda _: 1.0, num_rotations=2, seed=0, console=Console(file=io.StringIO()), on_rotation=keep)


run_command(main)
"""


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_servers_and_keeps_finished_rotations(sent, in_background, tmp_path):
    """A shell without job control starts background processes with SIGINT ignored."""
    (port,) = free_ports(1)
    path = tmp_path / "run.json"
    command = [sys.executable, "-c", EXPERIMENT, str(port), str(path)]
    if in_background:
        command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as experiment:
        assert experiment.stdout is not None
        assert experiment.stdout.readline() == "measuring\n"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=WAIT_S) as answer:
            assert answer.status == 200
        experiment.send_signal(sent)
        _, said = experiment.communicate(timeout=WAIT_S)
    assert experiment.returncode == EXIT_INTERRUPTED
    assert said.startswith("stopped;")
    assert load_result(path).progress == "1 of 2 rotations"
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=WAIT_S)
