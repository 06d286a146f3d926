"""The vocabulary as llguidance needs it, from a model's `tokenizer.json`. Built once by a router or a worker."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from llguidance import LLTokenizer

CAPABILITY = f"llguidance/{version('llguidance')}"
"""Library and version, as workers register them: two versions may allow different tokens."""

WORD_BITS = 32

_SPACES = r"[\x20\x0A\x0D\x09]+"
_SAMPLE = '{"A": [1, "b c"]}'
_PREFIX_SPACE = re.compile(r'"add_prefix_space"\s*:\s*true')


class GrammarTokenizer:
    """Bytes of each token id below `vocab_size`. Immutable; may be used by several threads."""

    def __init__(self, source: str, vocab_size: int, eos: Collection[int]) -> None:
        """`source`: the content of a `tokenizer.json`; `vocab_size`: of the model's logits, at least the tokenizer's.

        Raises `ValueError` if the library cannot use it.
        """
        if not eos or max(eos) >= vocab_size:
            raise ValueError("grammars need a token that ends the text")
        words = _without_prefix_space(source)
        self.ll = LLTokenizer(words, n_vocab=vocab_size, eos_token=sorted(eos), slices=slices())
        if self.ll.decode_str(self.ll.tokenize_str(_SAMPLE)) != _SAMPLE:
            raise ValueError("the tokenizer changes texts, so that no grammar could force one")
        self.vocab_size = vocab_size
        self.eos = frozenset(eos)

    @classmethod
    def of_directory(cls, directory: Path, vocab_size: int) -> GrammarTokenizer:
        """Reads the `tokenizer.json` and the end tokens of a model directory. Raises `OSError` or `ValueError`.

        One of the same content that this process has is returned: from before it was forked, say, in shared memory.
        """
        source, eos = (directory / "tokenizer.json").read_text(encoding="utf-8"), _eos(directory)
        key = f"{hashlib.sha256(source.encode()).hexdigest()}:{vocab_size}:{sorted(eos)}"
        found = _present.get(key)
        if found is None:
            found = _present[key] = cls(source, vocab_size, eos)
        return found

    @property
    def num_words(self) -> int:
        """Words of 32 bits of a mask over the vocabulary."""
        return (self.vocab_size + WORD_BITS - 1) // WORD_BITS


def slices() -> list[str]:
    """Texts whose tokens are looked up at once in masks where all of them are allowed. Masks do not depend on it.

    Those of the library, but for runs of spaces and line ends: 10 MiB with 150,000 tokens, and no mask is faster.
    """
    return [text for text in LLTokenizer.general_slices() if text != _SPACES]


_present: WeakValueDictionary[str, GrammarTokenizer] = WeakValueDictionary()
"""Those of this process, by their content."""


def logits_size(directory: Path) -> int | None:
    """The `vocab_size` of `config.json`, or of its text model; None without one. Raises `OSError` or `ValueError`."""
    sizes = (part.get("vocab_size") for part in reversed(list(_configs(directory / "config.json"))))
    return next((size for size in sizes if isinstance(size, int)), None)


def _without_prefix_space(source: str) -> str:
    """The same tokenizer, adding no space before a text: the library tokenizes parts of a text, which would get one."""
    if not _PREFIX_SPACE.search(source):
        return source
    tokenizer = json.loads(source)
    parts = [tokenizer.get("pre_tokenizer") or {}]
    for part in parts:
        parts += part.get("pretokenizers", ())
        if "add_prefix_space" in part:
            part["add_prefix_space"] = False
    return json.dumps(tokenizer)


def _eos(directory: Path) -> frozenset[int]:
    """The end tokens of `generation_config.json`, else of `config.json`, perhaps of its text model."""
    for name in ("generation_config.json", "config.json"):
        for part in _configs(directory / name):
            if (value := part.get("eos_token_id")) is not None:
                return frozenset(value if isinstance(value, list) else [value])
    return frozenset()


def _configs(path: Path) -> Iterator[dict[str, Any]]:
    """A configuration, and that of its text model if it has one."""
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    yield config
    if config.get("text_config"):
        yield config["text_config"]
