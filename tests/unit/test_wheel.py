"""The wheel contains the bundled models, the Lua scripts and the stubs, and nothing of the tests."""

from __future__ import annotations

import zipfile
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

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
        "baton/services/cli/main.py",
        "baton/services/router/app.py",
    }
    assert wanted <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "docs/", "scripts/"))]
