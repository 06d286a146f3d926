"""`tests/plugins/order.py`: what a module keeps running does not run beside tests that do not use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
from pathlib import Path
from tests.plugins.order import put_in_order

def pytest_collection_modifyitems(items):
    put_in_order(items, Path(__file__).parent)
"""
TESTS = """
import pytest

@pytest.fixture(scope="module")
def model():
    return 1

@pytest.fixture(scope="module", params=["stream", "nixl"])
def cluster(request, model):
    yield request.param

@pytest.fixture
def client(cluster):
    return cluster

def test_b(client): pass
def test_a(client): pass
def test_d(model): pass
def test_c(): pass
"""
SERVICE_TEST = "def test_e(): pass\n"


def test_users_of_a_modules_cluster_come_last_in_their_file(tmp_path: Path) -> None:
    for name, text in {"unit/test_x.py": TESTS, "service/test_y.py": SERVICE_TEST}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "unit", "service"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    completed = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60.0, check=True
    )
    names = [line.partition("::test_")[2] for line in completed.stdout.splitlines() if "::" in line]
    assert names == ["e", "d", "c", "b[stream]", "a[stream]", "b[nixl]", "a[nixl]"]
