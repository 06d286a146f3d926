"""One end of a connection of `SocketWire`: messages over TCP, each behind its length.

    dialler   MAGIC, a call token, then messages
    listener  messages; or REFUSED, the length of a reason, and the reason, instead of the first one

A message is its length as u32, little-endian, and a serialised `SessionMessage`. Nothing here is checked further: the
session finds what is damaged, missing or doubled. A length beyond the bound ends the connection.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import cast

from google.protobuf.message import DecodeError

from baton.domain.errors import LinkBroken
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.sockets.options import send_at_once
from baton.session.wires.wire import ConnectionRefused

MAGIC = b"BATONSE1"
METHOD = "session connection/Connect"
"""What call tokens are issued for: a token of the gRPC call `Session.Connect` is no token here, nor the other way."""
LENGTH = struct.Struct("<I")
REFUSED = 0xFFFFFFFF
"""In place of a length: a reason follows."""
MAX_MESSAGE_BYTES = 4 << 20
"""A frame has 1 MiB at most, beside its last message."""
MAX_REASON_BYTES = 1024
ROOM_BYTES = 256 << 10
"""Received bytes that wait for the reader before the socket is read no further, and sent ones before `send` waits."""
CLOSE_S = 2.0
"""How long a closed connection may take to send what it has taken."""


class SocketConnection(asyncio.Protocol):
    """Either end; see `DirectConnection`. Owned by one event loop."""

    wire = "socket"

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._partial = bytearray()
        self._received: deque[bytes] = deque()
        self._received_bytes = 0
        self._is_reading = True
        self._reader: asyncio.Future[None] | None = None
        self._take: Callable[[pb.SessionMessage], bool] | None = None  # while `hand_over` waits for `_reader`
        self._on_room: Callable[[], None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._has_room = True
        self._failure: BaseException | None = None  # what the next `receive` raises
        self._ended = False
        self.was_answered = False
        """The other end has sent something that can be read."""

    async def send(self, message: pb.SessionMessage) -> None:
        """See `WireConnection`."""
        self.write(message)
        while not self._has_room:
            self._writer = self._loop.create_future()
            await self._writer
            if self._ended:
                raise LinkBroken("the connection has ended")

    async def receive(self) -> pb.SessionMessage | None:
        """See `WireConnection`."""
        while not self._received:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return None
            self._reader = self._loop.create_future()
            await self._reader
        data = self._received.popleft()
        self._received_bytes -= len(data)
        if not self._is_reading and self._received_bytes <= ROOM_BYTES:
            self._read_on()
        return _parse(data)

    async def hand_over(self, take: Callable[[pb.SessionMessage], bool]) -> None:
        """See `DirectConnection`. The event loop's call that brings a message is the one that `take` is called in."""
        while self._received:
            message = await self.receive()  # it has come: this does not wait
            if message is None or not take(message):
                return
        if self._failure is None and not self._ended:
            self._reader, self._take = self._loop.create_future(), take
            try:
                await self._reader
            finally:
                self._take = None
        if self._failure is not None:
            raise self._failure

    def write(self, message: pb.SessionMessage) -> bool:
        """See `DirectConnection`."""
        data = message.SerializeToString()
        self._write(LENGTH.pack(len(data)) + data)
        return self._has_room

    def call_with_room(self, call: Callable[[], None]) -> None:
        """See `DirectConnection`."""
        self._on_room = call

    def close(self) -> None:
        """See `WireConnection`. What was sent still leaves, within `CLOSE_S`."""
        transport = self._transport
        if not self._ended and transport is not None:
            self._received.clear()
            self._end()
            transport.close()
            self._loop.call_later(CLOSE_S, transport.abort)

    def begin(self, preamble: bytes) -> None:
        """Sends what a dialler's first message comes behind. Raises `LinkBroken` after the end."""
        self._write(preamble)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such base
        connection = transport.get_extra_info("socket")
        if connection is not None:
            send_at_once(connection)
        self._transport.set_write_buffer_limits(high=ROOM_BYTES)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop. What has come may still be read."""
        self._end()

    def pause_writing(self) -> None:
        """Called by the event loop."""
        self._has_room = False

    def resume_writing(self) -> None:
        """Called by the event loop."""
        self._has_room = True
        _wake(self._writer)
        if self._on_room is not None:
            self._on_room()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._partial:
            self._partial += data
            data = bytes(self._partial) if self._is_whole() else b""
        if data:
            rest = self._split(data)
            self._partial = bytearray(data[rest:])
        if self._received_bytes > ROOM_BYTES and self._is_reading and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()
        if self._received or self._failure is not None:
            _wake(self._reader)

    def _is_whole(self) -> bool:
        """True if the bytes that wait may begin with a whole message: a long one is not split again at each part."""
        if len(self._partial) < LENGTH.size:
            return False
        length: int = LENGTH.unpack_from(self._partial)[0]
        return length > MAX_MESSAGE_BYTES or len(self._partial) >= LENGTH.size + length

    def _split(self, data: bytes) -> int:
        """Takes the whole messages at the beginning of `data`. Returns where the rest begins."""
        start = 0
        while self._failure is None and not self._ended and len(data) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data, start)
            if length > MAX_MESSAGE_BYTES:
                self._fail(data, start, length)
                break
            end = start + LENGTH.size + length
            if end > len(data):
                break
            self.was_answered = True
            self._on_message(data[start + LENGTH.size : end])
            start = end
        return start

    def _on_message(self, data: bytes) -> None:
        """Hands it over, or keeps it for the reader. Raises nothing: it is called by the event loop."""
        take, reader = self._take, self._reader
        if take is None or reader is None or reader.done():
            self._received.append(data)
            self._received_bytes += len(data)
            return
        try:
            if not take(_parse(data)):
                _wake(reader)
        except BaseException as error:  # it is the reader's
            self._failure = error
            _wake(reader)

    def _fail(self, data: bytes, start: int, length: int) -> None:
        """The other end refuses this one, or has sent no message."""
        if length != REFUSED or self.was_answered:
            self._failure = LinkBroken(f"a message of {length} bytes")
            return
        reason_at = start + 2 * LENGTH.size
        if len(data) >= reason_at:
            (num_bytes,) = LENGTH.unpack_from(data, start + LENGTH.size)
            reason = data[reason_at : reason_at + min(num_bytes, MAX_REASON_BYTES)]
            self.was_answered = True
            self._failure = ConnectionRefused(f"the listener refuses this process: {reason.decode(errors='replace')}")

    def _write(self, data: bytes) -> None:
        """Raises `LinkBroken` after the end."""
        if self._ended or self._transport is None:
            raise LinkBroken("the connection has ended")
        self._transport.write(data)

    def _read_on(self) -> None:
        self._is_reading = True
        if self._transport is not None and not self._ended:
            self._transport.resume_reading()

    def _end(self) -> None:
        self._ended, self._on_room = True, None
        _wake(self._reader)
        _wake(self._writer)


def refusal(reason: str) -> bytes:
    """What a listener sends instead of its first message."""
    data = reason.encode()[:MAX_REASON_BYTES]
    return LENGTH.pack(REFUSED) + LENGTH.pack(len(data)) + data


def _parse(data: bytes) -> pb.SessionMessage:
    try:
        return pb.SessionMessage.FromString(data)
    except DecodeError:
        raise LinkBroken("bytes that are no message") from None


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
