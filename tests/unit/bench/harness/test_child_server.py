"""A server in a process of its own says its port, and ends with its context."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.harness.child_server import child_server

SERVER = "import sys; print(4711, flush=True); sys.stdin.buffer.read()"


def test_a_child_serves_until_its_context_ends(tmp_path: Path):
    (tmp_path / "served_here.py").write_text(SERVER)
    with child_server("served_here", tree=tmp_path) as (url, pid):
        assert url == "http://127.0.0.1:4711"
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_child_that_does_not_start_is_told(tmp_path: Path):
    (tmp_path / "ends.py").write_text("")
    with pytest.raises(RuntimeError, match="ends did not start"), child_server("ends", tree=tmp_path):
        pass
