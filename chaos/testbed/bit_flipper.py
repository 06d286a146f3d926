"""Flips bits in page bytes that pass a proxy, or in messages, and in nothing else.

Page bytes cross a page connection as answers (`baton.transfer.stream.page_wire`: nine bytes of head, the first the
kind, the others the length), and a gRPC connection as the payload of large HTTP/2 DATA frames (RFC 9113, section 4.1:
nine bytes of header, the first three the payload's length, the fourth its type). Messages are the payload of its other
DATA frames, behind five bytes of gRPC's. All else passes unchanged: a flip there would break the connection, which is
another fault. Called by `proxy`; knows no connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.transfer.stream import page_wire

_HEADER_BYTES = 9
_DATA = 0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MIN_PAYLOAD_BYTES = 4096
"""Smaller frames carry messages, not pages."""
MIN_MESSAGE_BYTES = 12
"""The middle of a larger payload lies behind gRPC's prefix."""


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
    """Follows the frames of one direction of one connection, in pieces of any size; counts those with page bytes.

    `answers`: the frames are answers of a page connection.
    """

    answers: bool = False

    num_page_frames: int = 0
    _header: bytearray = field(default_factory=bytearray)
    _payload_left: int = 0
    _payload_bytes: int = 0
    _is_page_data: bool = False
    _is_message: bool = False
    _preface_left: bytes = _PREFACE

    def feed(self, piece: bytes, budget: FlipBudget | None) -> bytes:
        """Returns `piece` with a bit flipped in the middle of each DATA frame of its kind within the budget."""
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
        if not self._preface_left or self.answers:
            return 0
        if not self._preface_left.startswith(piece[: len(self._preface_left)]):
            self._preface_left = b""
            return 0
        num_bytes = min(len(piece), len(self._preface_left))
        self._preface_left = self._preface_left[num_bytes:]
        return num_bytes

    def _read_header(self, piece: bytes, at: int) -> int:
        missing = _HEADER_BYTES - len(self._header)
        self._header += piece[at : at + missing]
        if len(self._header) == _HEADER_BYTES:
            kind, length = (0, slice(1, 9)) if self.answers else (3, slice(3))
            self._payload_bytes = self._payload_left = int.from_bytes(self._header[length])
            is_data = self._header[kind] == (page_wire.PAGES if self.answers else _DATA)
            self._is_page_data = is_data and self._payload_bytes >= (1 if self.answers else MIN_PAYLOAD_BYTES)
            is_small = MIN_MESSAGE_BYTES <= self._payload_bytes < MIN_PAYLOAD_BYTES
            self._is_message = is_data and not self.answers and is_small
            self._header.clear()
            self.num_page_frames += self._is_page_data
        return min(at + missing, len(piece))
