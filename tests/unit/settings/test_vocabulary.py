"""A draft model must number tokens as the model does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.bundled import MODEL_DIR
from baton.settings.base import SettingsError
from baton.settings.vocabulary import require_same_tokens

SOURCE = (MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8")


def with_tokenizer(directory: Path, source: str) -> Path:
    (directory / "tokenizer.json").write_text(source, encoding="utf-8")
    return directory


def test_equal_tokens_in_files_that_differ_will_do(tmp_path: Path) -> None:
    require_same_tokens(MODEL_DIR, with_tokenizer(tmp_path, json.dumps(json.loads(SOURCE), indent=1)))


def test_a_token_under_another_id_is_refused(tmp_path: Path) -> None:
    tokenizer = json.loads(SOURCE)
    vocab = tokenizer["model"]["vocab"]
    by_id = {id: token for token, id in vocab.items()}
    first, second = sorted(by_id)[-2:]
    vocab[by_id[first]], vocab[by_id[second]] = second, first
    with pytest.raises(SettingsError, match=f"first in id {first}.*same family"):
        require_same_tokens(MODEL_DIR, with_tokenizer(tmp_path, json.dumps(tokenizer)))


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tokenizer\.json cannot be read"):
        require_same_tokens(MODEL_DIR, with_tokenizer(tmp_path, "{"))
