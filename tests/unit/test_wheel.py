"""The wheel contains the bundled models, Lua scripts, stubs, the page and the kernels, and nothing of the tests."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

from baton.model.kernels.build import build_all

ROOT = Path(__file__).resolve().parents[2]


def test_the_wheel_is_whole(tmp_path: Path) -> None:
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(wheel).namelist()
    wanted = {
        "baton/bundled/model/model.safetensors",
        "baton/bundled/model/tokenizer.json",
        "baton/bundled/head/model.safetensors",
        "baton/bundled/vision/model.safetensors",
        "baton/bundled/vision/preprocessor_config.json",
        "baton/store/redis/scripts/advance_sequence.lua",
        "baton/rpc/gen/handoff_pb2.py",
        "baton/services/cli/entry.py",
        "baton/services/cli/main.py",
        "baton/services/router/app.py",
    }
    ui = ROOT / "services" / "router" / "ui"
    page = {str(path.relative_to(ROOT)) for folder in ("static", "vendor") for path in (ui / folder).iterdir()}
    assert len(page) > 15
    kernels = {result.spec.path.name for result in build_all(os.environ.get("CXX")) if result.failure is None}
    assert {f"baton/{name}" for name in page} | wanted <= set(names)
    assert kernels <= {Path(name).name for name in names if name.startswith("baton/model/kernels/")}
    assert not [name for name in names if name.startswith(("tests/", "docs/", "scripts/"))]
