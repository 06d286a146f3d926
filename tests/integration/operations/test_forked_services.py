"""Every service can be forked, whatever its number of compute threads."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.services.cli.processes.child_command import ChildCommand
from baton.services.cli.processes.fork_server import ServiceForkServer, can_fork
from baton.services.cli.processes.supervisor import Supervisor
from baton.settings.process import thread_variables
from tests.unit.cli.children import fork_server_of

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not can_fork(), reason="processes cannot be adopted here")]

TIMEOUT_S = 120.0
SERVICES = ("prefill", "decode", "encode", "router")
PER_PROCESS = ("nixl", "libucp", "libucs", "libcuda.so")
"""Libraries with threads, devices or memory that a fork cannot share."""


def refused(service: str) -> ChildCommand:
    """A service that ends as soon as it reads its flags."""
    return ChildCommand(service, (sys.executable,), thread_variables(2), ("serve", service, "--nonsense=1"))


def assert_shares_no_library_of_a_process(server: int) -> None:
    mapped = Path(f"/proc/{server}/maps").read_text()
    assert "libtorch_cpu" in mapped
    assert [library for library in PER_PROCESS if library in mapped] == []
    assert os.listdir(f"/proc/{server}/task") == [str(server)]


async def test_services_with_two_threads_are_forked_before_transports_load(tmp_path: Path) -> None:
    commands = [refused(service) for service in SERVICES]
    fork_server = ServiceForkServer(commands, tmp_path)
    try:
        async with asyncio.timeout(TIMEOUT_S), Supervisor(tmp_path, fork_server) as supervisor:
            children = [await supervisor.start(command) for command in commands]
            assert [await child.exit for child in children] == [2] * len(SERVICES)
            assert_shares_no_library_of_a_process(fork_server_of(os.getpid()))
    finally:
        fork_server.close()


FORKED_WORKER = """
import os
from baton.bundled import MODEL_DIR
from baton.grammar import tokenizer
from baton.model.loading.config import read_config
from baton.services.cli.processes import fork_program

shared = fork_program.SharedParts()
shared.prepare(("serve", "prefill", "--model=bundled"))
vocab_size = read_config(MODEL_DIR).vocab_size
if os.fork() == 0:
    tokenizer.LLTokenizer = None  # nothing is built here
    tokenizer.GrammarTokenizer.of_directory(MODEL_DIR, vocab_size)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


TWO_THREADS = """
import os
from baton.services.cli.processes import fork_program
from baton.settings.process import limit_threads

limit_threads(1)
shared = fork_program.SharedParts()
shared.prepare(("serve", "prefill", "--model=nowhere"))
if os.fork() == 0:
    import torch
    from baton.model.cpu import configure_threads
    configure_threads(2)
    torch.rand(2048, 2048) @ torch.rand(2048, 2048)
    os._exit(len(os.listdir("/proc/self/task")))
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def output_of(program: str) -> str:
    environment = {**os.environ, **thread_variables(1)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_forked_worker_finds_the_vocabulary_for_grammars() -> None:
    assert output_of(FORKED_WORKER) == "7\n"


def test_a_fork_computes_with_more_threads_than_its_server() -> None:
    assert int(output_of(TWO_THREADS)) >= 2
