"""`weights_digest` distinguishes checkpoints and is equal for copies."""

from __future__ import annotations

import shutil
from pathlib import Path

from baton.bundled import MODEL_DIR
from baton.model.loading.fingerprint import weights_digest


def test_a_copy_has_the_same_digest(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(MODEL_DIR, tmp_path / "copy"))
    assert weights_digest(copy) == weights_digest(MODEL_DIR)


def test_one_changed_byte_at_either_end_is_another_model(tmp_path: Path) -> None:
    for position in (1024, -1):
        changed = Path(shutil.copytree(MODEL_DIR, tmp_path / str(position)))
        weights = changed / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[position] ^= 1
        weights.write_bytes(data)
        assert weights_digest(changed) != weights_digest(MODEL_DIR)


def test_another_config_is_another_model(tmp_path: Path) -> None:
    changed = Path(shutil.copytree(MODEL_DIR, tmp_path / "config"))
    (changed / "config.json").write_text((MODEL_DIR / "config.json").read_text() + " ")
    assert weights_digest(changed) != weights_digest(MODEL_DIR)
