"""Call tokens: proof on every call that the caller holds the cluster's secret. Pure: no gRPC, no clock.

A token is the header (session, counter, audience) and the HMAC-SHA256 (RFC 2104) of header, method and request bytes.
`audience` is the incarnation of the called worker: a captured call is invalid for the worker's successor. `session` is
random for each channel and `counter` counts its calls, so the worker refuses replays with one bit window a session
(RFC 4303, section 3.4.3).
"""

from __future__ import annotations

import enum
import hmac
import itertools
import secrets
import struct
from collections import OrderedDict
from dataclasses import dataclass

from baton.domain.ids import Incarnation

CALL_TOKEN_METADATA_KEY = "baton-call-token-bin"
WINDOW_CALLS = 4096
"""Largest number of later calls of a channel that may overtake a call."""
MAX_SESSIONS = 4096
"""Channels that a worker remembers. Beyond it the least recently used one is forgotten."""

_HEADER = struct.Struct(">16sQQ")
_MAC_BYTES = 32


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
        header = _HEADER.pack(self._session, next(self._numbers), self._audience)
        return header + _mac(self._key, header, method, body)


class CallTokenVerifier:
    """Verifies the tokens of calls to one worker. Owned by its event loop."""

    def __init__(self, key: bytes, incarnation: Incarnation) -> None:
        self._key = key
        self._incarnation = incarnation
        self._sessions: OrderedDict[bytes, _ReplayWindow] = OrderedDict()

    def check(self, method: str, body: bytes, token: bytes | None) -> CallTokenFault | None:
        """The fault of a call's token; None accepts it, once. A forged token changes no state."""
        if token is None:
            return CallTokenFault.MISSING
        header, mac = token[: _HEADER.size], token[_HEADER.size :]
        if len(mac) != _MAC_BYTES or not hmac.compare_digest(mac, _mac(self._key, header, method, body)):
            return CallTokenFault.FORGED
        session, number, audience = _HEADER.unpack(header)
        if audience != self._incarnation:
            return CallTokenFault.OTHER_INCARNATION
        return None if self._window(session).accept(number) else CallTokenFault.REPLAYED

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


def _mac(key: bytes, header: bytes, method: str, body: bytes) -> bytes:
    return hmac.digest(key, b"".join((header, method.encode(), b"\0", body)), "sha256")
