"""Prompts in parts of bounded size, so that no other message of a session waits for a long one. Pure.

A short prompt is in the message that opens its stream, where the worker knows that.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from baton.domain.errors import InvalidRequest
from baton.rpc.gen import session_pb2 as pb

PART_BYTES = 48 << 10
MAX_OPEN_TOKENS = 1024
"""Longest prompt of an opening message: 5 KiB at most, so that messages behind it need not wait."""
TOKEN_BYTES = 4


def split_prompt(tokens: Iterable[int]) -> list[pb.PromptPart]:
    """The parts of a prompt, u32 little-endian; an empty prompt has one."""
    packed = array("I", tokens)
    if sys.byteorder != "little":
        packed.byteswap()
    data = packed.tobytes()
    starts = range(0, max(1, len(data)), PART_BYTES)
    return [pb.PromptPart(tokens=data[at : at + PART_BYTES], last=at + PART_BYTES >= len(data)) for at in starts]


class ReceivedPrompt:
    """The parts of one prompt that have come."""

    def __init__(self, max_tokens: int) -> None:
        self._max_bytes = TOKEN_BYTES * max_tokens
        self._data = bytearray()
        self.is_complete = False

    def add(self, part: pb.PromptPart) -> None:
        """Adds the next part. Raises `InvalidRequest` for one too many, too long, or that divides a token."""
        if self.is_complete or len(part.tokens) % TOKEN_BYTES:
            raise InvalidRequest("a part of a prompt after its last one, or that divides a token")
        if len(self._data) + len(part.tokens) > self._max_bytes:
            raise InvalidRequest(f"a prompt of more than {self._max_bytes // TOKEN_BYTES} tokens")
        self._data += part.tokens
        self.is_complete = part.last

    def take_tokens(self) -> array[int]:
        """The tokens so far, which are not kept any longer."""
        packed = array("I")
        packed.frombytes(self._data)
        self._data.clear()
        if sys.byteorder != "little":
            packed.byteswap()
        return packed
