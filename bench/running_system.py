"""A system of Baton's own for an experiment: `baton up` on a free port, stopped at the end. Called by experiments."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from baton.settings.process import child_environment
from services.cli.plan import free_ports

START_S = 600.0
STOP_S = 60.0
_ASK_S = 0.25
_ASK_TIMEOUT_S = 5.0
_TAIL_CHARS = 2000


@contextlib.contextmanager
def running_system(model: str, shape: str | None, seed: int, flags: Sequence[str], console: Console) -> Iterator[str]:
    """The URL of `baton up MODEL`, or of a random model of `shape`. Raises `RuntimeError`, `TimeoutError`."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        if shape is not None:
            with console.status(f"making a random {shape}"):
                model = _random_model(shape, Path(directory) / shape, seed)
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "services.cli.main", "up", model, "--port", str(port), *flags]
        with (
            console.status("starting the system"),
            running_server(command, f"http://127.0.0.1:{port}", "/ready") as url,
        ):
            yield url


@contextlib.contextmanager
def running_server(
    command: Sequence[str], url: str, ready_path: str, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """A server while the context lasts, from the first 200 of `ready_path` on; its output goes to a file.

    Raises `RuntimeError` when it ends by itself, with its last words, and `TimeoutError` when it never answers.
    """
    with tempfile.NamedTemporaryFile("w+b", prefix="baton-bench-", suffix=".log") as log:
        environment = child_environment(variables or {})
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait_until_it_answers(url + ready_path, process, Path(log.name))
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)


def _random_model(shape: str, directory: Path, seed: int) -> str:
    # Imported here: an experiment on a running system needs no torch.
    from bench.random_models import save_random_model
    from bench.shapes import SHAPES

    return str(save_random_model(SHAPES[shape], directory, seed=seed))


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if _answers(url):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ASK_S)
            raise RuntimeError(f"{process.args!r} ended by itself:\n{_last_words(log)}")
    raise TimeoutError(f"no answer from {url} within {START_S:.0f} s:\n{_last_words(log)}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_ASK_TIMEOUT_S):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _last_words(log: Path) -> str:
    return log.read_text(errors="replace")[-_TAIL_CHARS:]
