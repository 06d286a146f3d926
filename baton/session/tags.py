"""Keys and tags of a connection: keyed BLAKE2b (RFC 7693). Pure.

The counter of a connection's frames is part of each tag but is not sent. So a frame that was dropped, repeated,
swapped, reflected or flipped has a wrong tag. In an open cluster the key is public: tags detect damage, not forgery.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from hashlib import blake2b

from baton.domain.trust import ClusterTrust

OPEN_SESSION_KEY = b"baton/open-cluster/session"
NONCE_BYTES = 16
PROOF_BYTES = 32
TAG_BYTES = 16

_DIALLER, _LISTENER = b"dialler", b"listener"


def session_keys(trust: ClusterTrust) -> tuple[bytes, ...]:
    """The valid keys of handshakes, the one that dials first; a public one in an open cluster."""
    return trust.keys("session") or (OPEN_SESSION_KEY,)


def handshake_tag(key: bytes, step: bytes, *parts: bytes) -> bytes:
    """Proof of 32 bytes that its maker holds `key`: of one step of a handshake and all bodies so far."""
    mac = blake2b(key=key, digest_size=PROOF_BYTES)
    for part in (step, *parts):
        mac.update(len(part).to_bytes(8, "little"))
        mac.update(part)
    return mac.digest()


def same_tag(one: bytes, other: bytes) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(one, other)


@dataclass(frozen=True, slots=True)
class ConnectionKeys:
    """The keys of one connection's frames, by direction."""

    sent: bytes = field(repr=False)
    received: bytes = field(repr=False)

    @classmethod
    def of_dialler(cls, key: bytes, hello: bytes, challenge: bytes) -> ConnectionKeys:
        """The dialler's view. Both bodies hold a nonce, so no two connections have the same keys."""
        dialler, listener = [handshake_tag(key, b"frames/" + side, hello, challenge) for side in (_DIALLER, _LISTENER)]
        return cls(sent=dialler, received=listener)

    def reversed(self) -> ConnectionKeys:
        """The view of the other side."""
        return ConnectionKeys(self.received, self.sent)


class FrameTagger:
    """Tags the frames of one connection in one direction, in order."""

    __slots__ = ("_keyed", "_num_frames")

    def __init__(self, key: bytes) -> None:
        self._keyed = blake2b(key=key, digest_size=TAG_BYTES)
        self._num_frames = 0

    def tag(self, body: bytes) -> bytes:
        """The tag of the next frame, 16 bytes."""
        mac = self._keyed.copy()
        mac.update(self._num_frames.to_bytes(8, "little"))
        mac.update(body)
        self._num_frames += 1
        return mac.digest()
