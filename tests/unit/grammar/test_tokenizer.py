"""One vocabulary for equal files, for as long as somebody has it."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

from baton.bundled import MODEL_DIR
from baton.grammar.tokenizer import GrammarTokenizer, logits_size


def test_equal_files_give_the_same_vocabulary_while_it_is_in_use(tmp_path: Path) -> None:
    size = logits_size(MODEL_DIR)
    assert size is not None
    model, copy = tmp_path / "model", tmp_path / "copy"
    shutil.copytree(MODEL_DIR, model)
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "  ")  # content that no other test of this process uses
    shutil.copytree(model, copy)
    first = GrammarTokenizer.of_directory(model, size)
    assert GrammarTokenizer.of_directory(copy, size) is first
    assert GrammarTokenizer.of_directory(model, size + 32) is not first
    tokenizer = copy / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    assert GrammarTokenizer.of_directory(copy, size) is not first
    first.mark = 7  # type: ignore[attr-defined]
    del first
    gc.collect()
    assert not hasattr(GrammarTokenizer.of_directory(model, size), "mark")


def test_the_size_of_logits_is_that_of_the_text_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    assert logits_size(tmp_path) is None
    config.write_text('{"vocab_size": 7}')
    assert logits_size(tmp_path) == 7
    config.write_text('{"vocab_size": 7, "text_config": {"vocab_size": 9}}')
    assert logits_size(tmp_path) == 9
