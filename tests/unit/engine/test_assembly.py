"""Where a worker computes: what is asked for, what is there, and what is said when they differ."""

from __future__ import annotations

import pytest
import torch

from baton.engine.assembly import resolve_device
from baton.settings.base import SettingsError
from baton.settings.groups import Device


@pytest.mark.parametrize("found", [True, False])
def test_a_gpu_is_taken_where_there_is_one_and_nobody_says_otherwise(found: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    assert resolve_device(Device.CPU) == "cpu"
    assert resolve_device(Device.AUTO) == ("cuda" if found else "cpu")


@pytest.mark.parametrize(("built_for", "why"), [(None, "built for CPUs"), ("13.0", "no GPU that it can use")])
def test_a_gpu_that_is_asked_for_and_not_there(built_for: str | None, why: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(SettingsError, match=why):
        resolve_device(Device.CUDA)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device(Device.CUDA) == "cuda"
