"""Call tokens: proof on every call that the caller holds the cluster's secret. Pure: no gRPC, no clock.

A token is a header (session, counter, audience, number of request bytes) and two HMAC-SHA256 (RFC 2104): one of the
header and the method, one of the header and the request. The first is verified before the request is read, so a
stranger's request costs no memory. `audience` is the incarnation of the called worker: a captured call is invalid for
the worker's successor. `session` is random for each channel and `counter` counts its calls, so the worker refuses
replays with one bit window a session (RFC 4303, section 3.4.3).

In an open cluster the key is public. A token then proves nothing about the caller, but detects damaged requests.
"""

from __future__ import annotations

import enum
import hmac
import itertools
import secrets
import struct
from collections import OrderedDict
from dataclasses import dataclass, field

from baton.domain.ids import Incarnation

CALL_TOKEN_METADATA_KEY = "baton-call-token-bin"
WINDOW_CALLS = 4096
"""Largest number of later calls of a channel that may overtake a call."""
MAX_SESSIONS = 4096
"""Channels that a worker remembers. Beyond it the least recently used one is forgotten."""

OPEN_CLUSTER_KEY = b"baton/open-cluster"

_HEADER = struct.Struct(">16sQQQ")
HEADER_BYTES = _HEADER.size
_MAC_BYTES = 32
TOKEN_BYTES = HEADER_BYTES + 2 * _MAC_BYTES


class CallTokenFault(enum.Enum):
    """Reason to reject a call; the value is the metric's label."""

    MISSING = "missing"
    FORGED = "forged"
    OTHER_INCARNATION = "other_incarnation"
    REPLAYED = "replayed"


class CallTokenIssuer:
    """Issues one channel's call tokens. May be used from any thread."""

    def __init__(self, key: bytes, audience: Incarnation) -> None:
        self._key = key
        self._audience = audience
        self._session = secrets.token_bytes(16)
        self._numbers = itertools.count(1)

    def issue(self, method: str, body: bytes) -> bytes:
        """The token of the next call: of `method` (`/package.Service/Name`), with the serialised request `body`."""
        header = _HEADER.pack(self._session, next(self._numbers), self._audience, len(body))
        return header + _header_mac(self._key, header, method) + _body_mac(self._key, header, body)


@dataclass(frozen=True, slots=True)
class CallToken:
    """The token of a call whose header was accepted. `num_bytes`: length of the request."""

    key: bytes = field(repr=False)
    header: bytes
    body_mac: bytes = field(repr=False)
    num_bytes: int

    def covers(self, body: bytes) -> bool:
        """True if `body` is the request that the token was issued for."""
        if len(body) != self.num_bytes:
            return False
        return hmac.compare_digest(self.body_mac, _body_mac(self.key, self.header, body))


class CallTokenVerifier:
    """Verifies the tokens of calls to one worker. Owned by its event loop. Each of `keys` is valid."""

    def __init__(self, keys: tuple[bytes, ...], incarnation: Incarnation) -> None:
        self._keys = keys
        self._incarnation = incarnation
        self._sessions: OrderedDict[bytes, _ReplayWindow] = OrderedDict()

    def accept(self, method: str, token: bytes | None) -> CallToken | CallTokenFault:
        """Accepts the header of a call's token, once, or returns its fault. A forged token changes no state."""
        if token is None:
            return CallTokenFault.MISSING
        if len(token) != TOKEN_BYTES:
            return CallTokenFault.FORGED
        header, macs = token[:HEADER_BYTES], token[HEADER_BYTES:]
        header_mac, body_mac = macs[:_MAC_BYTES], macs[_MAC_BYTES:]
        valid = [key for key in self._keys if hmac.compare_digest(header_mac, _header_mac(key, header, method))]
        if not valid:
            from_open = hmac.compare_digest(header_mac, _header_mac(OPEN_CLUSTER_KEY, header, method))
            return CallTokenFault.MISSING if from_open else CallTokenFault.FORGED
        session, number, audience, num_bytes = _HEADER.unpack(header)
        if audience != self._incarnation:
            return CallTokenFault.OTHER_INCARNATION
        if not self._window(session).accept(number):
            return CallTokenFault.REPLAYED
        return CallToken(valid[0], header, body_mac, num_bytes)

    def _window(self, session: bytes) -> _ReplayWindow:
        window = self._sessions.get(session)
        if window is None:
            window = self._sessions[session] = _ReplayWindow()
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(session)
        return window


@dataclass(slots=True)
class _ReplayWindow:
    """The calls seen in one session: bit `i` of `seen` stands for number `newest - i`."""

    newest: int = 0
    seen: int = 0

    def accept(self, number: int) -> bool:
        """Records a call. Returns False if it was recorded before, or is older than the window."""
        if number > self.newest:
            shift = min(number - self.newest, WINDOW_CALLS)
            self.seen = (self.seen << shift | 1) & ((1 << WINDOW_CALLS) - 1)
            self.newest = number
            return True
        bit = 1 << (self.newest - number) if self.newest - number < WINDOW_CALLS else 0
        if not bit or self.seen & bit:
            return False
        self.seen |= bit
        return True


def _header_mac(key: bytes, header: bytes, method: str) -> bytes:
    return hmac.digest(key, b"".join((b"header\0", header, method.encode())), "sha256")


def _body_mac(key: bytes, header: bytes, body: bytes) -> bytes:
    return hmac.digest(key, b"".join((b"body\0", header, body)), "sha256")
