"""Check numbers of the tokens in a reply: CRC-32 over indices, tokens, log-probabilities and the finish reason.

Replies carry no call token. A flipped bit in a token would still parse, and reach the client as another token. The
sender of `Sealed`, `Seal` and `Tokens` sets the number, the receiver compares it. It detects damage, not forgery.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from baton.domain.errors import LinkBroken
from baton.rpc.gen import common_pb2, decode_pb2, handoff_pb2, prefill_pb2

_TOKEN = struct.Struct("<II?f")
_ENTRY = struct.Struct("<If")
_FINISH = struct.Struct("<Ii")

Checked = prefill_pb2.Sealed | handoff_pb2.Seal | decode_pb2.Tokens


def set_check(message: Checked) -> None:
    """Sets `message.check`; call it when the other fields are set."""
    message.check = _check_number(message)


def verify_check(message: Checked) -> None:
    """Raises `LinkBroken` if the tokens are not those that were sent. Accepts a message without a number.

    A message without a token is another one: a flipped bit turns `Accepted` into an empty `Sealed`.
    """
    if not (message.tokens if isinstance(message, decode_pb2.Tokens) else message.HasField("first_token")):
        raise LinkBroken("a message of tokens came without a token")
    if message.HasField("check") and message.check != _check_number(message):
        raise LinkBroken("tokens were damaged on their way: their check number differs")


def _check_number(message: Checked) -> int:
    tokens: Sequence[common_pb2.OutputToken]
    tokens = message.tokens if isinstance(message, decode_pb2.Tokens) else (message.first_token,)
    packed = [_FINISH.pack(len(tokens), message.finish_reason)]
    for token in tokens:
        packed.append(_TOKEN.pack(token.index, token.token, token.HasField("logprob"), token.logprob))
        if token.top:
            packed += [_ENTRY.pack(entry.token, entry.logprob) for entry in token.top]
    return zlib.crc32(b"".join(packed))
