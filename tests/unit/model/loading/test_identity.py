"""The identity of a checkpoint covers every byte of every tensor, config, tokenizer, quantization and sampler."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import torch as torch_files
from safetensors.numpy import save_file

from baton.bundled import MODEL_DIR
from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.model.errors import UnreadableModel
from baton.model.loading import identity
from baton.model.loading.identity import SAMPLER_VERSION, checkpoint_root, draft_identity, model_fingerprint
from baton.model.loading.quantization import Quantization
from baton.settings.text_digest import text_digest

WEIGHTS = "model.safetensors"
GEOMETRY = KVGeometry.of_layers((LayerGeometry(2, 8, 8),), "float32", 16)


def copy_of(directory: Path, to: Path) -> Path:
    return Path(shutil.copytree(directory, to))


def fingerprint(directory: Path, geometry: KVGeometry = GEOMETRY, quantization: Quantization = Quantization.NONE):
    return model_fingerprint(directory, checkpoint_root(directory), text_digest(directory), geometry, quantization)


def test_a_copy_has_the_same_root(tmp_path: Path) -> None:
    assert checkpoint_root(copy_of(MODEL_DIR, tmp_path / "copy")) == checkpoint_root(MODEL_DIR)


def test_one_flipped_bit_in_any_tensor_is_another_model(tmp_path: Path) -> None:
    """Reads the header, then flips one bit in the middle of each tensor in turn."""
    changed = copy_of(MODEL_DIR, tmp_path / "changed") / WEIGHTS
    data = bytearray(changed.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    roots = {checkpoint_root(MODEL_DIR)}
    for tensor in header.values():
        first, last = tensor["data_offsets"]
        middle = start + (first + last) // 2
        data[middle] ^= 1
        changed.write_bytes(data)
        roots.add(checkpoint_root(changed.parent))
        data[middle] ^= 1
    assert len(roots) == 1 + len(header)


def test_names_dtypes_and_shapes_are_part_of_the_root(tmp_path: Path) -> None:
    ones = np.ones((2, 8), np.float32)
    roots = set()
    for number, tensors in enumerate(
        [{"a": ones}, {"b": ones}, {"a": ones.reshape(4, 4)}, {"a": ones.view(np.int32)}, {"a": ones, "b": ones}]
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        save_file(tensors, directory / WEIGHTS)
        roots.add(checkpoint_root(directory))
    assert len(roots) == 5


def test_other_files_for_the_same_tensors_are_the_same_model(tmp_path: Path) -> None:
    tensors = torch_files.load_file(MODEL_DIR / WEIGHTS)
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        torch_files.save_file({name: tensors[name] for name in part}, tmp_path / f"model-{number}.safetensors")
    assert checkpoint_root(tmp_path) == checkpoint_root(MODEL_DIR)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 8, b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]", b"\x04" + b"\0" * 7 + b"{}"]
)
def test_a_file_that_is_no_checkpoint_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(UnreadableModel, match=WEIGHTS):
        checkpoint_root(tmp_path)


def test_a_tensor_that_ends_after_the_file_is_refused(tmp_path: Path) -> None:
    data = (MODEL_DIR / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(data[:-1])
    with pytest.raises(UnreadableModel, match="ends after the file"):
        checkpoint_root(tmp_path)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("config.json", "config"),
        ("tokenizer.json", "tokenizer"),
        ("tokenizer_config.json", "tokenizer"),
        ("chat_template.jinja", "tokenizer"),
    ],
)
def test_a_changed_file_changes_its_part(name: str, part: str, tmp_path: Path) -> None:
    changed = copy_of(MODEL_DIR, tmp_path / "changed")
    (changed / name).write_text((MODEL_DIR / name).read_text() + " ")
    ours, theirs = fingerprint(MODEL_DIR), fingerprint(changed)
    assert ours.digest != theirs.digest
    difference = ours.difference(theirs.digest, theirs.parts)
    assert difference is not None
    assert difference.startswith(f"{part}: ")


def test_quantization_and_geometry_are_named() -> None:
    ours = fingerprint(MODEL_DIR)
    int8 = fingerprint(MODEL_DIR, quantization=Quantization.INT8)
    wide = fingerprint(MODEL_DIR, KVGeometry.of_layers(GEOMETRY.layers, "float32", 32))
    assert ours.difference(int8.digest, int8.parts) == "quantization: none here, int8 there"
    assert ours.difference(wide.digest, wide.parts) == "page_size: 16 here, 32 there"


def test_another_sampler_is_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = fingerprint(MODEL_DIR)
    monkeypatch.setattr(identity, "SAMPLER_VERSION", SAMPLER_VERSION + 1)
    theirs = fingerprint(MODEL_DIR)
    assert ours.difference(theirs.digest, theirs.parts) == "sampler_version: 2 here, 3 there"


def test_a_draft_model_is_named_and_its_absence_changes_nothing(tmp_path: Path) -> None:
    changed = copy_of(MODEL_DIR, tmp_path / "changed")
    (changed / "config.json").write_text((MODEL_DIR / "config.json").read_text() + " ")
    drafts = [draft_identity(path, root) for path, root in ((MODEL_DIR, "a"), (MODEL_DIR, "b"), (changed, "a"))]
    assert len(set(drafts)) == 3
    plain, geometry = fingerprint(MODEL_DIR), GEOMETRY.with_draft_layers(GEOMETRY.group.attention_layers[:1])
    with_a, with_b = (
        model_fingerprint(
            MODEL_DIR, checkpoint_root(MODEL_DIR), text_digest(MODEL_DIR), geometry, Quantization.NONE, draft
        )
        for draft in drafts[:2]
    )
    assert "draft_model" not in {part.name for part in plain.parts}
    assert plain.difference(with_a.digest, with_a.parts) == f"draft_model: None here, {drafts[0]} there"
    assert with_a.difference(with_b.digest, with_b.parts) == f"draft_model: {drafts[0]} here, {drafts[1]} there"
