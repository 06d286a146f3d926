"""Plants one bug at a time into a copy of the tree and runs the tests that must notice.

A bug is a change of one place in one file. The copy is made of hard links, so planting costs milliseconds, and the
tree itself is never touched. `python -m tests.planted` runs all bugs; `make test` checks that each still applies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 180.0
PYTEST_FAILED = 1
"""Exit status of a run in which tests failed; others mean that it could not run."""


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """One removed rule: `before` in `file` becomes `after`. `tests`: pytest's names of the tests that must notice."""

    promise: str
    name: str
    file: str
    before: str
    after: str
    tests: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.name}"

    def plant(self) -> str:
        """The file with the bug. Raises `ValueError` unless `before` is there exactly once."""
        source = (ROOT / self.file).read_text(encoding="utf-8")
        if source.count(self.before) != 1:
            raise ValueError(f"{self}: {self.file} has {source.count(self.before)} places to change, not one")
        return source.replace(self.before, self.after)


@dataclass(frozen=True, slots=True)
class PlantedResult:
    """Result of one bug. `problem` empty: its tests failed, as they must."""

    bug: PlantedBug
    problem: str
    seconds: float


def run_bug(bug: PlantedBug) -> PlantedResult:
    """Plants the bug and runs its tests."""
    with tempfile.TemporaryDirectory(prefix="baton-planted-") as folder:
        tree = Path(folder)
        _link_tree(tree)
        target = tree / bug.file
        target.unlink()
        target.write_text(bug.plant(), encoding="utf-8")
        began_s = time.monotonic()
        if target.suffix in (".cpp", ".h") and (why := _build_kernels(tree)):
            return PlantedResult(bug, f"the kernels were not built: {why}", time.monotonic() - began_s)
        status, output = _run_tests(tree, bug.tests.split())
        seconds = time.monotonic() - began_s
    if status == PYTEST_FAILED:
        return PlantedResult(bug, "", seconds)
    problem = "no test noticed" if status == 0 else f"the tests did not run (status {status}): {output[-500:]}"
    return PlantedResult(bug, problem, seconds)


def _build_kernels(tree: Path) -> str:
    """Builds the lowest level, the only one that is current then. Replaces the link, not what it is linked to.

    Returns why it failed; "" if it did not.
    """
    code = "from baton.model.kernels.build import build, build_specs; build(build_specs()[0], build_specs()[0].path)"
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    status, output = _run([sys.executable, "-c", code], tree, environment)
    return "" if status == 0 else output[-500:]


def _run_tests(tree: Path, tests: list[str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    return _run(command, tree, {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"})


def _run(command: list[str], tree: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and output; 124 for a command that took too long."""
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 124, f"not within {TIMEOUT_S:g} s"
    return done.returncode, done.stdout + done.stderr


def _link_tree(target: Path) -> None:
    """Links every tracked file, every new one, and the built kernels."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout  # fmt: skip
    built = [path.relative_to(ROOT) for path in (ROOT / "baton/model/kernels/built").glob("*.so")]
    for path in (*map(Path, filter(None, listed.decode().split("\0"))), *built):
        if (ROOT / path).is_file() or (ROOT / path).is_symlink():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            _link(ROOT / path, target / path)


def _link(source: Path, target: Path) -> None:
    """Copies where the temporary folder is on another file system."""
    if source.is_symlink():
        os.symlink(os.readlink(source), target)
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
