"""UCX watches no memory where nothing registers it, and an operator's variables stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.settings import ucx


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The environment of a process that has not loaded NIXL, on a host with one kind of device that is not there."""
    variables: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(ucx, "_LIBRARIES", ())
    monkeypatch.setattr(ucx, "_DEVICES", (tmp_path / "other", tmp_path / "device"))
    return variables


def found(variables: dict[str, str]) -> dict[str, str]:
    """Those of NIXL and UCX."""
    return {name: value for name, value in variables.items() if name.startswith(("NIXL_", "UCX_"))}


def test_without_devices_memory_is_not_watched(variables):
    for _ in range(2):  # as a worker and its agents do
        ucx.prepare_environment({})
        assert found(variables) == {**ucx.DEFAULTS, "UCX_MEM_EVENTS": "n"}


def test_with_a_device_the_library_decides(variables, tmp_path):
    (tmp_path / "device").touch()
    ucx.prepare_environment({})
    assert found(variables) == ucx.DEFAULTS


def test_variables_that_are_set_stay(variables):
    variables["UCX_MEM_EVENTS"] = "y"
    ucx.prepare_environment({})
    assert variables["UCX_MEM_EVENTS"] == "y"
