"""Starts `baton up`, or any server, for an experiment and stops it at the end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from baton.services.cli.processes.ports import free_ports
from baton.settings.process import child_environment

START_S = 600.0
STOP_S = 60.0
_POLL_S = 0.25
_POLL_TIMEOUT_S = 5.0
_TAIL_CHARS = 2000

UP_MESSAGE = "Ctrl-C stops everything."
"""Last line of the output of `baton up`, printed after the first answered request."""


@dataclass(frozen=True, slots=True)
class RunningSystem:
    """A running `baton up`: URLs of the router and of the metrics of all processes."""

    url: str
    metrics_urls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadyServer:
    """A running server: id of its first process, and seconds from its start until it was ready."""

    pid: int
    start_s: float


@contextlib.contextmanager
def running_system(
    model: str, shape: str | None, seed: int, flags: Sequence[str], console: Console
) -> Iterator[RunningSystem]:
    """Runs `baton up` with `model`, or with a random model of `shape`, and yields after its first answer.

    Raises `RuntimeError` with the end of its log if it exits, `TimeoutError` if it does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        if shape is not None:
            with console.status(f"making a random {shape}"):
                model = _random_model(shape, Path(directory) / shape, seed)
        (port,) = free_ports(1)
        up = [sys.executable, "-m", "baton.services.cli.entry", "up", model, "--port", str(port)]
        names_workers = {"--prefill", "--deployment"} & {*flags}
        command = [*up, *(() if names_workers else ("--deployment", "split")), *flags]
        with _running(command, {}) as (process, log):
            with console.status("starting the system"):
                _wait_until(lambda: UP_MESSAGE in log.read_text(errors="replace"), "baton up", process, log)
            yield RunningSystem(f"http://127.0.0.1:{port}", metrics_urls(log.read_text(errors="replace")))


def metrics_urls(banner: str) -> tuple[str, ...]:
    """Metrics URLs in the output of `baton up`."""
    words = (line.split() for line in banner.splitlines())
    return tuple(line[1] for line in words if len(line) >= 2 and line[0] == "metrics")


@contextlib.contextmanager
def running_server(
    command: Sequence[str], url: str, ready_path: str, variables: Mapping[str, str] | None = None
) -> Iterator[ReadyServer]:
    """Runs a server and yields after the first 200 of `ready_path`; its output goes to a file.

    Raises as `running_system` does.
    """
    began_s = time.perf_counter()
    with _running(command, variables or {}) as (process, log):
        _wait_until(lambda: _answers(url + ready_path), url + ready_path, process, log)
        yield ReadyServer(process.pid, time.perf_counter() - began_s)


@contextlib.contextmanager
def _running(command: Sequence[str], variables: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Runs a process and yields it with the file of its output; stops it at the end."""
    with tempfile.NamedTemporaryFile("w+b", prefix="baton-bench-", suffix=".log") as log:
        environment = child_environment(variables)
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process, Path(log.name)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)


def _random_model(shape: str, directory: Path, seed: int) -> str:
    # Imported here: an experiment on a running system needs no torch.
    from bench.harness.model_shapes import SHAPES
    from bench.harness.random_models import save_random_model

    return str(save_random_model(SHAPES[shape], directory, seed=seed))


def _wait_until(is_up: Callable[[], bool], what: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if is_up():
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            raise RuntimeError(f"{process.args!r} exited:\n{_log_tail(log)}")
    raise TimeoutError(f"no answer from {what} within {START_S:.0f} s:\n{_log_tail(log)}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_POLL_TIMEOUT_S):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _log_tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_TAIL_CHARS:]
