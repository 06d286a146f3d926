"""`tests/lateness.py`: only tests whose body saw nothing wrong are offered more runs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lateness import LATE_FILE_VARIABLE, MAX_LATE_TESTS, Late, in_time, is_late, met

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
CONFTEST = """
from pathlib import Path
from tests.lateness import LatenessPlugin

def pytest_configure(config):
    config.pluginmanager.register(LatenessPlugin(Path(__file__).parent))
"""
LATE_TEST = """
import pytest
from tests.lateness import Late

@pytest.fixture
def cluster():
    raise Late("no link")

def test_wait():
    raise Late("no answer")

def test_fixture(cluster):
    pass
"""
UNCLEAN_TEST = """
import gc
import pytest

class Left:
    def __del__(self):
        raise OSError("still open")

@pytest.fixture
def page():
    yield
    assert ["404"] == []

def test_clean_up(page):
    pass

def test_garbage():
    Left()
    gc.collect()
"""
WRONG_TEST = "def test_tokens():\n    assert [1] == [2]\n"


def late_tests(folder: Path, *arguments: str) -> list[str]:
    """What a run of pytest in `folder` writes for `scripts/test.sh`."""
    (folder / "conftest.py").write_text(CONFTEST)
    late_file = folder / "late"
    environment = {
        **os.environ,
        LATE_FILE_VARIABLE: str(late_file),
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    completed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert completed.returncode == 1, completed.stdout
    return late_file.read_text().splitlines()


def write_tests(folder: Path, name: str, text: str) -> None:
    folder.mkdir()
    (folder / name).write_text(text)


@pytest.mark.parametrize("folder", ["integration", "page"])
@pytest.mark.parametrize("arguments", [(), ("-p", "xdist", "--numprocesses=2")])
def test_late_tests_and_fixtures_are_written(tmp_path: Path, arguments: tuple[str, ...], folder: str):
    write_tests(tmp_path / folder, "test_a.py", LATE_TEST)
    expected = [f"{folder}/test_a.py::test_fixture", f"{folder}/test_a.py::test_wait"]
    assert sorted(late_tests(tmp_path, *arguments)) == expected


@pytest.mark.parametrize("arguments", [(), ("-p", "xdist", "--numprocesses=2")])
def test_unclean_tests_of_any_folder_are_written(tmp_path: Path, arguments: tuple[str, ...]):
    write_tests(tmp_path / "unit", "test_a.py", UNCLEAN_TEST)
    strict = ("-W", "error", *arguments)
    assert sorted(late_tests(tmp_path, *strict)) == ["unit/test_a.py::test_clean_up", "unit/test_a.py::test_garbage"]


def test_a_body_that_fails_is_final_whatever_its_clean_up_does(tmp_path: Path):
    write_tests(tmp_path / "unit", "test_a.py", UNCLEAN_TEST.replace("pass", "assert [1] == [2]"))
    assert late_tests(tmp_path, "-W", "error") == []


@pytest.mark.parametrize(
    "other", [("integration", WRONG_TEST), ("unit", LATE_TEST), ("integration", "import nothing_like_it\n")]
)
def test_nothing_is_written_if_another_test_is_wrong(tmp_path: Path, other: tuple[str, str]):
    write_tests(tmp_path / "service", "test_a.py", LATE_TEST)
    write_tests(tmp_path / other[0], "test_b.py", other[1])
    assert late_tests(tmp_path, "--continue-on-collection-errors") == []


def test_many_late_tests_are_no_accident(tmp_path: Path):
    late = "".join(f"def test_{n}():\n    raise TimeoutError\n" for n in range(MAX_LATE_TESTS + 1))
    write_tests(tmp_path / "chaos", "test_a.py", late)
    assert late_tests(tmp_path) == []


def test_a_wrong_answer_in_a_group_is_not_late():
    late = ExceptionGroup("", [TimeoutError(), Late("x")])
    assert is_late(late)
    assert not is_late(ExceptionGroup("", [late, AssertionError("tokens differ")]))
    assert not is_late(asyncio.CancelledError())


def test_what_did_not_meet_is_named_and_late():
    met(1, "a kill and an answer")
    with pytest.raises(Late, match="did not meet: a kill and an answer"):
        met(0, "a kill and an answer")


def test_a_limit_is_named():
    in_time(0.9, 1.0, "pages are free")
    with pytest.raises(Late, match=r"1\.20 s instead of 1 s: pages are free"):
        in_time(1.2, 1.0, "pages are free")
