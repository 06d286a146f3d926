"""Tokenizer, chat template and request bounds of one model.

`app` loads it once from the model's directory. All requests share it; it is immutable and thread-safe. Reads
`tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`, `config.json` and `generation_config.json`. It must
not import torch or transformers: the router's image is small.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from baton.domain.errors import InvalidRequest
from baton.services.router.text.byte_alphabet import BYTE_OF
from baton.services.router.text.chat_template import ChatTemplate, Message, RenderOptions
from baton.services.router.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from baton.services.router.text.parsers.registry import (
    AUTO,
    HARMONY,
    REASONING_FIELDS,
    REASONING_FORMATS,
    OutputFormats,
    reasoning_format,
    tool_format,
)
from baton.services.router.text.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from baton.services.router.text.token_lower_bound import read_token_lower_bound
from baton.services.router.text.token_table import TokenTable
from baton.settings.text_digest import text_digest

Json = Mapping[str, object]

MAX_CONTEXT_TOKENS = 8
"""Prompt tokens that the detokenizer of a completion gets as context."""

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextModel:
    """Converts between text and token ids. `eos_token_ids` end a sequence.

    `vocab_size` bounds the ids in a request. `max_position_tokens` is None where the config has none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tokenizer_config: Json,
        config: Json,
        template: str | None,
        sampling_defaults: SamplingDefaults = OPENAI_DEFAULTS,
        digest: str = "",
    ) -> None:
        """`digest`: of the files (`baton.settings.text_digest`); "" where there are none."""
        self.sampling_defaults = sampling_defaults
        self.digest = digest
        self._tokenizer = tokenizer
        self._special_tokens = _special_tokens(tokenizer_config)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._add_missing_special_tokens()
        tokenizer_json = json.loads(tokenizer.to_str())
        self._byte_level = _is_byte_level(tokenizer_json)
        self._token_bound = read_token_lower_bound(tokenizer_json)
        self.chat_template = template
        self._template = ChatTemplate(template, self._special_tokens) if template is not None else None
        self.choose_formats()
        added = tokenizer.get_added_tokens_decoder()
        self._added_tokens = {entry.content: token for token, entry in added.items()}
        self._special_ids: frozenset[int] = frozenset(token for token, entry in added.items() if entry.special)
        self._tokens = TokenTable(self._compute_bytes)
        self._text_tokens = TokenTable(lambda token: b"" if token in self._special_ids else self._tokens[token].data)
        self.vocab_size: int = _int(config.get("vocab_size")) or tokenizer.get_vocab_size(with_added_tokens=True)
        self.max_position_tokens: int | None = _int(config.get("max_position_embeddings"))
        self.eos_token_ids: frozenset[int] = self._ids(
            config.get("eos_token_id"), self._special_tokens.get("eos_token")
        )

    @classmethod
    def load(cls, directory: Path, chat_template: Path | None = None) -> TextModel:
        """Reads a model's directory, and `chat_template` in place of its own template.

        Raises `OSError` for a missing file, `ValueError` for a malformed one.
        """
        config = _read_json(directory / "config.json")
        text_config = config.get("text_config")
        merged = {**config, **text_config} if isinstance(text_config, dict) else dict(config)
        defaults = OPENAI_DEFAULTS
        if (directory / "generation_config.json").is_file():
            generation = _read_json(directory / "generation_config.json")
            merged["eos_token_id"] = generation.get("eos_token_id", merged.get("eos_token_id"))
            defaults = SamplingDefaults.read(generation)
        tokenizer_json = (directory / "tokenizer.json").read_text(encoding="utf-8")
        path = directory / "tokenizer_config.json"
        tokenizer_config = _read_json(path) if path.is_file() else {}
        own = _template(directory, tokenizer_config)
        template = own if chat_template is None else chat_template.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(tokenizer_json)
        return cls(tokenizer, tokenizer_config, merged, template, defaults, text_digest(directory, chat_template))

    def choose_formats(
        self, reasoning: str = AUTO, tools: str = AUTO, reasoning_fields: tuple[str, ...] = REASONING_FIELDS
    ) -> None:
        """Reads answers by the formats of these names; `auto`: by the template's, `none`: as text. Before any request.

        Raises `KeyError`.
        """
        template = None if self._template is None else self._template.source
        found = OutputFormats(reasoning_format(reasoning, template), tool_format(tools, template), reasoning_fields)
        self.formats = replace(found, reasoning=REASONING_FORMATS[HARMONY]) if found.is_harmony else found

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The special tokens by name, e.g. `bos_token` -> `<s>`."""
        return self._special_tokens

    def added_tokens(self, texts: Iterable[str]) -> dict[str, int]:
        """The ids of those of `texts` that are added tokens."""
        return {text: self._added_tokens[text] for text in texts if text in self._added_tokens}

    def added_token(self, text: str) -> int | None:
        """The id of the added token that is `text`; None if there is none."""
        return self._added_tokens.get(text)

    def added_tokens_in(self, text: str) -> dict[str, int]:
        """The added tokens that `text` holds, with their ids."""
        return {token: id for token, id in self._added_tokens.items() if token in text}

    def tokenizer_json(self) -> str:
        """The tokenizer, in the form of a `tokenizer.json`."""
        text: str = self._tokenizer.to_str()
        return text

    @property
    def has_chat_template(self) -> bool:
        """True when `render_chat` works."""
        return self._template is not None

    def render_chat(self, messages: Sequence[Message], options: RenderOptions | None = None) -> str:
        """Renders the prompt of a chat, special tokens included. Raises `InvalidRequest`."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        return self._template.render(messages, options or RenderOptions())

    def may_set(self, variable: str) -> bool:
        """True if clients may set this variable of the chat template."""
        return self._template is None or self._template.may_set(variable)

    def reads(self, variable: str) -> bool:
        """True if the chat template reads this variable."""
        return self._template is not None and self._template.reads(variable)

    def mentions(self, name: str) -> bool:
        """True if the chat template may read a field of messages with this name."""
        return self._template is not None and self._template.mentions(name)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Returns the token ids of `text`. `add_special_tokens` frames them as in tokenizer.json, e.g. with a BOS.

        As in transformers, a tokenizer.json overrides `add_bos_token` in tokenizer_config.json.
        """
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def min_tokens(self, text: str) -> int:
        """Returns a lower bound of the tokens of `text`, without encoding it; 0 when no bound is known."""
        return 0 if self._token_bound is None else self._token_bound.min_tokens(text)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of `tokens`. Ids that the tokenizer does not know are skipped."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, *, skip_special_tokens: bool, context: Sequence[int] = ()) -> Detokenizer:
        """Returns a new detokenizer. `context`: the tokens before the sequence, if its text continues theirs."""
        if self._byte_level:
            return ByteDetokenizer(self._text_tokens if skip_special_tokens else self._tokens)
        return WindowDetokenizer(
            lambda tokens: self.decode(tokens, skip_special_tokens=skip_special_tokens), context[-MAX_CONTEXT_TOKENS:]
        )

    def token_bytes(self, token: int) -> bytes:
        """Returns the UTF-8 bytes of one token. A byte-level token may be part of a character."""
        return self._tokens[token].data

    def token_text(self, token: int) -> str:
        """Returns the text of one token alone, for `logprobs`. A part of a character shows as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def _compute_bytes(self, token: int) -> bytes:
        if not self._byte_level:
            return self.decode([token], skip_special_tokens=False).encode()
        name: str | None = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        try:
            return bytes(BYTE_OF[char] for char in name)
        except KeyError:  # an added token is tokenizer_json as it is
            return name.encode()

    def _ids(self, ids: object, *names: str | None) -> frozenset[int]:
        found: list[object] = list(ids) if isinstance(ids, list) else [ids]
        found += [self._tokenizer.token_to_id(name) for name in names if name is not None]
        return frozenset(i for i in found if isinstance(i, int))

    def _add_missing_special_tokens(self) -> None:
        """Marks tokens as special that only tokenizer_config.json lists. Others keep their declaration."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        known = {entry.content for entry in added if entry.special}
        missing = sorted({*self._special_tokens.values()} - known)
        self._tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])


def _special_tokens(config: Json) -> dict[str, str]:
    """Returns the model's special tokens by name, e.g. `bos_token` -> `<s>`."""
    found = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _template(directory: Path, config: Json) -> str | None:
    """Returns the source of the chat template: from its own file, else the default one in tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, object]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _is_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    """True when the tokenizer decodes only by joining the bytes of its tokens."""
    decoder = tokenizer.get("decoder") or {}
    steps = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    return len(steps) == 1 and steps[0].get("type") == "ByteLevel"
