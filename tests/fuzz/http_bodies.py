"""Nearly valid request bodies, and bytes of every kind."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.http_app import MODEL, VOCAB_SIZE

PATHS = {"/v1/chat/completions": "ChatRequest", "/v1/completions": "CompletionRequest"}

BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    "/v1/completions": {"model": MODEL, "prompt": "hello", "max_tokens": 3},
}
SHARED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "seed": 7,
    "n": 2,
    "max_completion_tokens": 2,
    "min_tokens": 1,
    "stop": ["a", "b"],
    "stop_token_ids": [1, 2],
    "logit_bias": {"5": 1.5},
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "cache_salt": "s",
    "response_format": {"type": "text"},
    "priority": 1,
    "user": "me",
    "min_new_tokens": 1,
    "guided_json": None,
    "use_beam_search": False,
    "n_predict": -1,
    "unheard_of": 1,
}
NUMBERS = st.sampled_from(
    [
        0,
        -0.0,
        -1,
        1,
        0.5,
        2,
        2.0000001,
        16,
        17,
        256,
        VOCAB_SIZE - 1,
        VOCAB_SIZE,
        2**31,
        -(2**31),
        2**63,
        -(2**63) - 1,
        10**400,
    ]
)
STRANGE_STRINGS = st.sampled_from(["", "\0", "\u2028", "\ufeff", "é" * 300, "💩" * 100, "a" * 257, "<|im_end|>", "%s"])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(),
    STRANGE_STRINGS,
    st.text(max_size=9),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["role", "content", "type", "text", "5", "x"]), inner, max_size=4),
    ),
    max_leaves=8,
)


@st.composite
def nearly_valid(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A valid body with a few changes anywhere."""
    chosen = draw(st.sets(st.sampled_from(sorted(SHARED)), max_size=6))
    body = copy.deepcopy({**BASES[path], **{name: SHARED[name] for name in sorted(chosen)}})
    for _ in range(draw(st.integers(0, 3))):
        _change(draw, body)
    return body


def _change(draw: st.DrawFn, body: dict[str, Any]) -> None:
    """Changes or removes the value at a random path."""
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys)) if keys else "x"
        inner = place[key] if keys else None
        if not isinstance(inner, dict | list) or draw(st.booleans()):
            break
        place = inner
    if keys and draw(st.integers(0, 3)) == 0:
        del place[key]
    elif keys or isinstance(place, dict):
        place[key] = draw(VALUES)
    else:
        place.append(draw(VALUES))


_TOKENS = [
    *(b'{ } [ ] , : " \\ null true false NaN Infinity -Infinity 1e999 -0 01 1. .5 0x10 +1 1e-999'.split()),
    b"1" * 400,
    b'"model"',
    b'"tiny"',
    b'"prompt"',
    b'"messages"',
    b'"\\ud800"',
    b'"\\udc00\\ud800"',
    b'"\xed\xa0\x80"',
    b'"\xff"',
    b"\x00",
    b"\xef\xbb\xbf",
    b"/* */",
    b"'",
]
TOKEN_SOUP = st.lists(st.sampled_from(_TOKENS), max_size=20).map(b"".join)
"""Bits of JSON in any order."""


@st.composite
def corrupted(draw: st.DrawFn, path: str) -> bytes:
    """A valid body with lost, repeated or changed bytes."""
    data = bytearray(json.dumps({**BASES[path], **SHARED}).encode())
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 40)))
        data[start:end] = draw(st.one_of(st.just(b""), st.binary(max_size=4), st.sampled_from(_TOKENS)))
    return bytes(data)


@st.composite
def deeply_nested(draw: st.DrawFn, path: str) -> bytes:
    """A body with deep nesting in one of its fields, closed or not."""
    depth = draw(st.sampled_from([1, 60, 62, 63, 64, 65, 200, 900, 1100, 5000]))
    opening, closing = draw(st.sampled_from([(b"[", b"]"), (b'{"a":', b"}"), (b'[{"content":', b"}]")]))
    name = draw(st.sampled_from(["prompt", "messages", "stop", "logit_bias", "response_format", "metadata", "tools"]))
    deep = opening * depth + b"1" + closing * (depth if draw(st.booleans()) else 0)
    return b'{"%b":%b,%b' % (name.encode(), deep, json.dumps(BASES[path]).encode()[1:])


@st.composite
def with_duplicate_keys(draw: st.DrawFn, path: str) -> bytes:
    """A body with repeated fields."""
    pairs = [*BASES[path].items(), *SHARED.items()]
    chosen = draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=8))
    fields = [*BASES[path].items(), *chosen, *((name, draw(VALUES)) for name, _ in chosen)]
    return (
        b"{" + b",".join(json.dumps(name).encode() + b":" + json.dumps(value).encode() for name, value in fields) + b"}"
    )


def raw(path: str) -> st.SearchStrategy[bytes]:
    """Bytes that may or may not be a body."""
    return st.one_of(
        st.binary(max_size=60), TOKEN_SOUP, corrupted(path), deeply_nested(path), with_duplicate_keys(path)
    )


@st.composite
def split_body(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The bytes in pieces, as they may arrive."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=3)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
