"""The text digest covers tokenizer, template, special tokens and sampling defaults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from baton.bundled import MODEL_DIR
from baton.settings.base import SettingsError
from baton.settings.text_digest import TEMPLATE_FILE, TEXT_FILES, text_digest


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_DIR, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors")))


def test_a_router_without_weights_has_the_same_digest(copy: Path):
    assert text_digest(copy) == text_digest(MODEL_DIR)


@pytest.mark.parametrize("name", TEXT_FILES)
def test_one_changed_byte_of_a_text_file_is_another_text_model(name: str, copy: Path):
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    assert text_digest(copy) != text_digest(MODEL_DIR)


def test_a_template_given_at_start_counts_as_the_models_own(copy: Path, tmp_path: Path):
    given = tmp_path / "given.jinja"
    given.write_text("{{ messages[0].content }}")
    digest = text_digest(copy, given)
    assert digest != text_digest(copy)
    shutil.copy(given, copy / TEMPLATE_FILE)
    assert digest == text_digest(copy)


@pytest.mark.parametrize("name", TEXT_FILES)
def test_an_empty_file_differs_from_a_missing_one(name: str, copy: Path):
    (copy / name).write_bytes(b"")
    empty = text_digest(copy)
    (copy / name).unlink()
    assert len({empty, text_digest(copy), text_digest(MODEL_DIR)}) == 3


def test_special_tokens_of_the_config_count_and_its_other_fields_do_not(copy: Path):
    path = copy / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "transformers_version": "x"}))
    assert text_digest(copy) == text_digest(MODEL_DIR)
    path.write_text(json.dumps({**config, "eos_token_id": 12345}))
    assert text_digest(copy) != text_digest(MODEL_DIR)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_an_unreadable_config_is_named(content: str, copy: Path):
    (copy / "config.json").write_text(content)
    with pytest.raises(SettingsError, match="cannot be read"):
        text_digest(copy)
