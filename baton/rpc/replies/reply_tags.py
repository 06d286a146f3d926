"""Tags of replies: proof that the called worker sent them, in this order, to this call. Pure: no gRPC.

Callers and workers with a cluster secret use them where calls are not encrypted. A tag is a keyed BLAKE2b-128 (RFC
7693) over the header of the call token, which no other call has, the reply's number and its bytes. It follows the reply
as a field that no message has, so a caller of an older build skips it.

Without tags: sessions, whose frames have their own; pages, which have digests and tags of their own; statuses. Who can
forge a status can end a call, as by cutting its connection.
"""

from __future__ import annotations

import hmac
import itertools
import struct
from hashlib import blake2b

from baton.domain.trust import ClusterTrust
from baton.rpc.call_token import HEADER_BYTES

UNTAGGED_METHODS = frozenset({"/baton.v1.Handoff/ReadPages"})
"""Calls whose replies are page bytes."""

_TAG_BYTES = 16
_FIELD = b"\xfa\x7f\x10"
"""The key of field 2047, of type bytes, and its length."""
TAGGED_BYTES = len(_FIELD) + _TAG_BYTES
"""Bytes that a tag adds to a reply."""
_NUMBER = struct.Struct(">Q")


def reply_key(trust: ClusterTrust) -> bytes | None:
    """The key of the tags that a caller expects; None: replies have none."""
    return None if trust.tls is not None else trust.key("call-token")


def has_tag(reply: bytes) -> bool:
    """True if a reply ends as a tagged one does, right or wrong; older builds send none."""
    return reply[-TAGGED_BYTES:].startswith(_FIELD)


class ReplyTags:
    """Tags of the replies of one call, on either side. `token`: its call token, or the token's header."""

    __slots__ = ("_keyed", "_numbers")

    def __init__(self, key: bytes, token: bytes) -> None:
        self._keyed = blake2b(token[:HEADER_BYTES], key=key, digest_size=_TAG_BYTES, person=b"baton/reply")
        self._numbers = itertools.count()

    def add(self, reply: bytes) -> bytes:
        """The next reply with its tag."""
        return b"".join((reply, _FIELD, self._next(reply)))

    def remove(self, tagged: bytes) -> bytes | None:
        """The next reply without its tag; None if it has no valid one. No reply after that is valid."""
        reply, tag = tagged[:-TAGGED_BYTES], tagged[-TAGGED_BYTES:]
        return reply if hmac.compare_digest(tag, _FIELD + self._next(reply)) else None

    def _next(self, reply: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(_NUMBER.pack(next(self._numbers)))
        keyed.update(reply)
        return keyed.digest()
