"""Choice of a worker's device and pool, and the messages for impossible choices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from structlog.testing import capture_logs

from baton.bundled import MODEL_DIR
from baton.engine import build
from baton.engine.build import resolve_device
from baton.engine.fake_runner import fake_geometry
from baton.engine.pool.memory import allocate_pool, host_memory
from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.kv.memory import MemoryKind
from baton.kv.windows.plan import PoolPlan
from baton.model.linears.packing import WeightLayout
from baton.model.loading.kernel_choice import KernelUse
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from baton.model.smaps import WeightMemory
from baton.model.storage import PageStorage
from baton.settings.base import SettingsError
from baton.settings.choices import Device
from baton.settings.core_plan import SLOT_BYTES, CorePlan
from baton.telemetry import metrics
from tests.kernels import kernel_levels

GEOMETRY = fake_geometry(4)


@pytest.mark.parametrize("found", [True, False])
def test_auto_selects_a_gpu_if_there_is_one(found: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    assert resolve_device(Device.CPU) == "cpu"
    assert resolve_device(Device.AUTO) == ("cuda" if found else "cpu")


@pytest.mark.parametrize(("built_for", "why"), [(None, "built for CPUs"), ("13.0", "no GPU that it can use")])
def test_a_missing_gpu_is_refused_with_the_reason(built_for: str | None, why: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(SettingsError, match=why):
        resolve_device(Device.CUDA)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device(Device.CUDA) == "cuda"


@dataclass(frozen=True)
class Loaded:
    """The part of a loaded model that a pool needs."""

    device: str
    geometry: KVGeometry = GEOMETRY


def no_room(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def no_capture(*_: object, **__: object) -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_a_pool_too_large_for_the_gpu_is_a_settings_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PageStorage, "allocate", no_room)
    with pytest.raises(SettingsError, match=r"8 pages, .* too little memory.*--kv-memory-mib"):
        allocate_pool(cast(LoadedModel, Loaded("cuda")), PoolPlan(8), None)


def test_cpu_pages_are_in_the_memory_that_transfers_read():
    storage, memory = allocate_pool(cast(LoadedModel, Loaded("cpu")), PoolPlan(8), None)
    assert storage.address == memory.address
    assert memory.kind is MemoryKind.DRAM
    assert storage.scratch_page is None


def test_both_tiers_have_the_parts_of_the_geometry():
    geometry = KVGeometry.of_layers((LayerGeometry(4, 64, 64),) * 3, "float32", 4, head_groups=2)
    _, memory = allocate_pool(cast(LoadedModel, Loaded("cpu", geometry)), PoolPlan(2), None)
    assert memory.part_ends == host_memory(2, geometry).part_ends == geometry.part_ends
    assert len(memory.part_ends) == 2


def test_a_failed_capture_names_the_flag_to_use(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "ModelRunner", no_capture)
    model, storage = cast(LoadedModel, Loaded("cuda")), PageStorage.allocate(GEOMETRY, 2)
    with pytest.raises(SettingsError, match=r"not permitted.*--no-cuda-graphs"):
        build._runner(model, storage, 8)
    with pytest.raises(RuntimeError, match="not permitted"):
        build._runner(model, storage, 0)


def test_a_failure_on_the_cpu_is_no_capture_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "ModelRunner", no_capture)
    with pytest.raises(RuntimeError, match="not permitted"):
        build._runner(cast(LoadedModel, Loaded("cpu")), PageStorage.allocate(GEOMETRY, 2), 8)


def test_the_measured_share_of_huge_pages_is_a_metric():
    model = load_model(MODEL_DIR)
    labels = {"layout": model.report.weights.layout.value}
    metrics.WEIGHTS_HUGE_FRACTION.clear()
    build._report(replace(model, report=replace(model.report, memory=None)), plan=PoolPlan(8), max_model_len=64)
    assert metrics.REGISTRY.get_sample_value("baton_weights_huge_fraction", labels) is None, "absent, not 0"
    for share in (0.25, 1.0):
        report = replace(model.report, memory=WeightMemory(400, int(400 * share), 0))
        build._report(replace(model, report=report), plan=PoolPlan(8), max_model_len=64)
        assert metrics.REGISTRY.get_sample_value("baton_weights_huge_fraction", labels) == share


def slot_of(path: Path, number: int) -> int:
    """The first word of a worker's slot."""
    return int.from_bytes(path.read_bytes()[number * SLOT_BYTES :][:8], "little")


@pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")
def test_a_worker_lends_its_cores_once_its_model_is_loaded(tmp_path: Path):
    path, model = tmp_path / "cores", load_model(MODEL_DIR)
    path.write_bytes(CorePlan({"first": (0,), "second": (1,)}).as_bytes())
    before = slot_of(path, 1)
    with capture_logs() as logged:
        build._lend_cores(path, "second", model)
    assert model.kernels is not None
    model.kernels.leave_lease()
    assert [entry["event"] for entry in logged] == ["cores_lent"]
    assert before == slot_of(path, 1) == 2**63 - 1, "after the test as before"
    for name in ("baton_borrowed_core_seconds", "baton_borrowed_core_wait_seconds"):
        assert metrics.REGISTRY.get_sample_value(name) is not None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"decoder": DecoderChoice.STOCK}, "stock decoder: asked for"),
        ({"layout": WeightLayout.PLAIN}, "plain weights"),
        ({"kernels": KernelUse.NEVER}, "no native kernels"),
        ({}, "does not know third"),
    ],
)
@pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")
def test_a_worker_that_cannot_show_when_it_computes_keeps_its_cores(tmp_path: Path, changes: dict[str, Any], why: str):
    path = tmp_path / "cores"
    path.write_bytes(CorePlan({"first": (0,), "second": (1,)}).as_bytes())
    with capture_logs() as logged:
        build._lend_cores(path, "second" if changes else "third", load_model(MODEL_DIR, **changes))
    [entry] = logged
    assert (entry["event"], entry["log_level"]) == ("cores_not_lent", "warning")
    assert why in entry["why"]
    assert slot_of(path, 1) == 2**63 - 1
