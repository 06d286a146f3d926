"""Messages of broken or hostile peers: field values at and beyond every edge, and corrupted bytes."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.fuzz.worker_pair import (
    DECODE,
    DECODE_INCARNATION,
    MODEL,
    NUM_PAGES,
    PREFILL,
    PREFILL_INCARNATION,
    VOCAB_SIZE,
)

FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)

FLOATS = st.sampled_from([0.0, 1.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e-45, 3e38, 30.0])
UINT32 = st.sampled_from([0, 1, 2, 3, NUM_PAGES - 1, NUM_PAGES, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31, 2**32 - 1])
NAMES = [
    "", "r", PREFILL, DECODE, MODEL, "stream", "nixl", "r/1#1", "\0", "x" * 300, "ünï\u2028code", "a" * 100_000,
]  # fmt: skip
BYTES = st.sampled_from([b"", b"\0" * 16, b"\xff" * 16, b"k" * 15, b"\0" * 5000])

VALUES_BY_TYPE: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_DOUBLE: FLOATS,
    FieldDescriptor.TYPE_FLOAT: FLOATS.filter(lambda value: math.isinf(value) or abs(value) != 3e38),
    FieldDescriptor.TYPE_UINT32: UINT32,
    FieldDescriptor.TYPE_INT32: st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31)]),
    FieldDescriptor.TYPE_SINT32: st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31)]),
    FieldDescriptor.TYPE_INT64: st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]),
    FieldDescriptor.TYPE_UINT64: st.sampled_from([0, 1, PREFILL_INCARNATION, DECODE_INCARNATION, 2**63, 2**64 - 1]),
    FieldDescriptor.TYPE_FIXED32: UINT32,
    FieldDescriptor.TYPE_FIXED64: st.sampled_from([0, 1, 2**64 - 1]),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.sampled_from(NAMES),
    FieldDescriptor.TYPE_BYTES: BYTES,
    FieldDescriptor.TYPE_ENUM: st.sampled_from([0, 1, 2, 3, 2**31 - 1, -1]),
}


@st.composite
def arbitrary_message(draw: st.DrawFn, descriptor: Any) -> Message:
    """A message of a descriptor's type. Each field is independently absent, ordinary or beyond an edge."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw(st.booleans()):
            _set_field(draw, message, field)
    return message


def _set_field(draw: st.DrawFn, message: Message, field: FieldDescriptor) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (VALUES_BY_TYPE[field.message_type.fields_by_name[name].type] for name in ("key", "value"))
        getattr(message, field.name).update(draw(st.dictionaries(key, value, max_size=4)))
    elif field.message_type is not None:
        values = draw(st.lists(arbitrary_message(field.message_type), max_size=3 if field.is_repeated else 1))
        if field.is_repeated:
            getattr(message, field.name).extend(values)
        elif values:
            getattr(message, field.name).CopyFrom(values[0])
    elif field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(VALUES_BY_TYPE[field.type], max_size=40)))
    else:
        setattr(message, field.name, draw(VALUES_BY_TYPE[field.type]))


@st.composite
def corrupted(draw: st.DrawFn, good: bytes) -> bytes:
    """Returns `good` cut short, with flipped bits, with a repeated piece, or with an insertion."""
    body = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(body) - 1)))
        match draw(st.sampled_from(["cut", "flip", "repeat", "put"])):
            case "cut":
                del body[at:]
            case "flip" if body:
                body[at] ^= 1 << draw(st.integers(0, 7))
            case "repeat":
                body += body[at:]
            case "put":
                body[at:at] = draw(st.binary(min_size=1, max_size=8))
    return bytes(body)
