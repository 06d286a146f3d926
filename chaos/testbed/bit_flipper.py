"""Flips bits in page bytes that pass a proxy, or in messages, and in nothing else.

Page bytes cross a page connection as answers (`baton.transfer.stream.page_wire`: nine bytes of head, the first the
kind, the others the length), and a gRPC connection as the payload of large HTTP/2 DATA frames (RFC 9113, section 4.1:
nine bytes of header, the first three the payload's length, the fourth its type). Messages are the payload of its other
DATA frames, behind five bytes of gRPC's, and all that a worker sends on a session connection, behind their lengths
(`baton.session.wires.socket_connection`). All else passes unchanged: a flip there would break the connection, which is
another fault. Called by `proxy`; knows no connection.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.session.wires import socket_connection
from baton.transfer.stream import page_wire

_HEADER_BYTES = 9
_DATA = 0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MIN_PAYLOAD_BYTES = 4096
"""Smaller frames carry messages, not pages."""
MIN_MESSAGE_BYTES = 12
"""The middle of a larger payload lies behind gRPC's prefix."""


class PortKind(enum.Enum):
    """Ports of a server: of gRPC (or Redis), of page connections, and of session connections; names of flags."""

    CALLS = ""
    PAGES = "page"
    SESSIONS = "session"


@dataclass(slots=True)
class FlipBudget:
    """Number of frames that may still be damaged, shared by all connections of a proxy. None: all.

    `messages`: frames with messages, not those with page bytes.
    """

    left: int | None
    num_flipped: int = 0
    messages: bool = False

    def spend(self) -> bool:
        """Takes one frame from the budget; False if it is used up."""
        if self.left == 0:
            return False
        self.left = None if self.left is None else self.left - 1
        self.num_flipped += 1
        return True


@dataclass(slots=True)
class BitFlipper:
    """Follows the frames that a server sends on one connection to a port of this kind, in pieces of any size.

    Counts those with page bytes, and the messages of a session connection.
    """

    kind: PortKind = PortKind.CALLS

    num_page_frames: int = 0
    num_session_messages: int = 0
    _header: bytearray = field(default_factory=bytearray)
    _payload_left: int = 0
    _payload_bytes: int = 0
    _is_page_data: bool = False
    _is_message: bool = False
    _is_refused: bool = False
    _preface_left: bytes = _PREFACE

    def feed(self, piece: bytes, budget: FlipBudget | None) -> bytes:
        """Returns `piece` with a bit flipped in the middle of each frame of the budget's kind, while it lasts."""
        out = bytearray(piece)
        at = self._skip_preface(piece)
        while at < len(piece):
            if self._payload_left == 0:
                at = self._read_header(piece, at)
                continue
            num_bytes = min(self._payload_left, len(piece) - at)
            offset = at + self._payload_left - self._payload_bytes // 2  # index of the payload's middle in `out`
            if at <= offset < at + num_bytes and budget is not None and self._is_of(budget) and budget.spend():
                out[offset] ^= 0x10
            self._payload_left -= num_bytes
            at += num_bytes
        return bytes(out)

    def _is_of(self, budget: FlipBudget) -> bool:
        return self._is_message if budget.messages else self._is_page_data

    def _skip_preface(self, piece: bytes) -> int:
        """Skips the fixed preface of a client's connection."""
        if not self._preface_left or self.kind is not PortKind.CALLS:
            return 0
        if not self._preface_left.startswith(piece[: len(self._preface_left)]):
            self._preface_left = b""
            return 0
        num_bytes = min(len(piece), len(self._preface_left))
        self._preface_left = self._preface_left[num_bytes:]
        return num_bytes

    def _read_header(self, piece: bytes, at: int) -> int:
        num_bytes = socket_connection.LENGTH.size if self.kind is PortKind.SESSIONS else _HEADER_BYTES
        missing = num_bytes - len(self._header)
        self._header += piece[at : at + missing]
        if len(self._header) == num_bytes:
            match self.kind:
                case PortKind.CALLS:
                    self._begin_http_frame()
                case PortKind.PAGES:
                    self._begin_answer()
                case PortKind.SESSIONS:
                    self._begin_session_message()
            self._header.clear()
            self.num_page_frames += self._is_page_data
        return min(at + missing, len(piece))

    def _begin_http_frame(self) -> None:
        self._begin_payload(int.from_bytes(self._header[:3]))
        is_data = self._header[3] == _DATA
        self._is_page_data = is_data and self._payload_bytes >= MIN_PAYLOAD_BYTES
        self._is_message = is_data and MIN_MESSAGE_BYTES <= self._payload_bytes < MIN_PAYLOAD_BYTES

    def _begin_answer(self) -> None:
        self._begin_payload(int.from_bytes(self._header[1:]))
        self._is_page_data = self._header[0] == page_wire.PAGES and self._payload_bytes > 0

    def _begin_session_message(self) -> None:
        """A refusal is no message: it stands in place of a length, and what follows is a reason with its own."""
        (length,) = socket_connection.LENGTH.unpack(self._header)
        is_refusal = length == socket_connection.REFUSED
        self._begin_payload(0 if is_refusal else length)
        self._is_message = not (is_refusal or self._is_refused)
        self._is_refused |= is_refusal
        self.num_session_messages += self._is_message

    def _begin_payload(self, num_bytes: int) -> None:
        self._payload_bytes = self._payload_left = num_bytes
