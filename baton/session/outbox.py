"""What one end of a session has posted and the other has not applied yet. Pure.

    post, post_row -> waiting -> take_new -> retained (framed, numbered) -> acknowledge

A message is serialised once, when it is posted, and a frame is put together from bytes.

At most `window_bytes` and one frame are retained. Beyond that nothing is framed: rows wait, and a stream's next row
joins the one that waits, so rows get longer, not more. Prompt parts wait behind everything else. Streams
take turns with them, so a short prompt does not wait for long ones.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import lru_cache

from baton.rpc.gen import session_pb2 as pb

_ROW_BYTES = 24
_TOKEN_BYTES = 5
_SCORED_BYTES = 16
"""Estimates, above the real size; the one of a frame is taken from its bytes."""

_MESSAGES_KEY = pb.Frame.DESCRIPTOR.fields_by_name["messages"].number << 3 | 2
"""What stands before the length of each message in the bytes of a frame."""


@dataclass(frozen=True, slots=True)
class OutboxLimits:
    """`window_bytes`: retained. `frame_bytes`: a frame is ended beyond that. A message is never divided."""

    window_bytes: int = 1 << 20
    frame_bytes: int = 256 << 10


@dataclass(slots=True)
class _PlainRow:
    """A row with nothing but tokens, as almost all rows; becomes a message in its frame."""

    stream: int
    first_index: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _RetainedFrame:
    seq: int
    body: bytes


class Outbox:
    """Owned by a `MessageSession`."""

    def __init__(self, limits: OutboxLimits) -> None:
        self._limits = limits
        self._waiting: deque[bytes | pb.TokenRow | _PlainRow] = deque()  # bytes: a serialised message
        self._prompts: OrderedDict[int, deque[bytes]] = OrderedDict()  # by stream; the next turn first
        self._open_rows: dict[int, pb.TokenRow | _PlainRow] = {}  # by stream: the waiting row that its next may join
        self._retained: deque[_RetainedFrame] = deque()
        self._num_resent: int | None = None  # retained frames sent on this connection; None: all of them
        self.last_seq = 0  # of the newest frame
        self.retained_bytes = 0
        self.waiting_bytes = 0
        self.num_replayed = 0

    def post(self, message: pb.StreamMessage) -> None:
        """Adds a message behind those that wait."""
        data, kind = message.SerializeToString(), message.WhichOneof("kind")
        self.waiting_bytes += len(data)
        if kind == "prompt":
            self._prompts.setdefault(message.stream, deque()).append(data)
            return
        self._open_rows.pop(message.stream, None)
        self._waiting.append(data)
        if kind == "abort":
            self._drop_prompts(message.stream)

    def post_row(self, row: pb.TokenRow) -> None:
        """Adds a row of tokens, or its tokens to the row of its stream that waits.

        Rows with a gap between them stay apart: the receiver must see it. So do plain rows and others: a stream has
        rows with scores or without, and one last row.
        """
        waiting = self._open_rows.get(row.stream)
        self.waiting_bytes += _row_bytes(row)
        if not isinstance(waiting, pb.TokenRow) or waiting.first_index + len(waiting.tokens) != row.first_index:
            self._waiting.append(row)
            self._open_rows[row.stream] = row
            return
        self.waiting_bytes -= _ROW_BYTES
        waiting.tokens.extend(row.tokens)
        waiting.scores.extend(row.scores)
        waiting.finish_reason = row.finish_reason
        if row.HasField("times"):
            waiting.times.CopyFrom(row.times)

    def post_tokens(self, stream: int, first_index: int, tokens: list[int]) -> None:
        """As `post_row`, of a row with nothing but tokens. Takes `tokens`."""
        waiting = self._open_rows.get(stream)
        if type(waiting) is _PlainRow and waiting.first_index + len(waiting.tokens) == first_index:
            waiting.tokens += tokens
            self.waiting_bytes += _TOKEN_BYTES * len(tokens)
            return
        row = self._open_rows[stream] = _PlainRow(stream, first_index, tokens)
        self._waiting.append(row)
        self.waiting_bytes += _ROW_BYTES + _TOKEN_BYTES * len(tokens)

    @property
    def window_is_full(self) -> bool:
        """True while nothing more is framed."""
        return self.retained_bytes >= self._limits.window_bytes

    @property
    def has_work(self) -> bool:
        """True if `take` would return a frame."""
        if self._num_resent is not None:
            return True
        return bool(self._waiting or self._prompts) and not self.window_is_full

    @property
    def is_empty(self) -> bool:
        """True if the other side has applied all that was posted."""
        return not (self._waiting or self._prompts or self._retained)

    def take(self) -> bytes | None:
        """The next serialised frame, without `ack`: a retained one that this connection has not had, or a new one."""
        if self._num_resent is not None:
            frame = self._retained[self._num_resent]
            self._num_resent += 1
            self.num_replayed += 1
            if self._num_resent == len(self._retained):
                self._num_resent = None
            return frame.body
        if self.window_is_full or not (self._waiting or self._prompts):
            return None
        return self._take_new()

    def acknowledge(self, seq: int) -> None:
        """Drops the frames up to `seq`, which the other side has applied."""
        while self._retained and self._retained[0].seq <= seq:
            self.retained_bytes -= len(self._retained.popleft().body)
            if self._num_resent is not None:
                self._num_resent = max(0, self._num_resent - 1)
        if self._num_resent is not None and self._num_resent >= len(self._retained):
            self._num_resent = None

    def rewind(self) -> None:
        """Sends all retained frames again, before any new one: the connection is another one."""
        self._num_resent = 0 if self._retained else None

    def clear(self) -> None:
        """Drops everything: the session is lost."""
        self._waiting.clear()
        self._prompts.clear()
        self._retained.clear()
        self._open_rows.clear()
        self._num_resent = None
        self.retained_bytes = self.waiting_bytes = 0

    def _take_new(self) -> bytes:
        """A frame of what waits. Concatenated serialisations of parts of a frame are the frame."""
        self.last_seq += 1
        parts, num_bytes = list[bytes](), 0
        frame = pb.Frame(seq=self.last_seq)  # with the rows since the last message that is among `parts`
        step: pb.StepTokens | None = None
        while self._waiting and num_bytes < self._limits.frame_bytes:
            item = self._waiting.popleft()
            if isinstance(item, bytes):
                if step is not None:
                    parts.append(frame.SerializeToString())
                    frame, step = pb.Frame(), None
                parts += (_message_head(len(item)), item)
                num_bytes += len(item)
                continue
            if step is None:
                step = frame.messages.add().step
            if isinstance(item, _PlainRow):
                self._open_rows.pop(item.stream, None)
                step.rows.add(stream=item.stream, first_index=item.first_index, tokens=item.tokens)
                num_bytes += _ROW_BYTES + _TOKEN_BYTES * len(item.tokens)
            else:
                num_bytes += self._add_row(step, item)
        parts.append(frame.SerializeToString())
        while not self._waiting and self._prompts and num_bytes < self._limits.frame_bytes:
            part = self._take_prompt_part()
            parts += (_message_head(len(part)), part)
            num_bytes += len(part)
        self.waiting_bytes -= num_bytes
        body = b"".join(parts)
        self._retained.append(_RetainedFrame(self.last_seq, body))
        self.retained_bytes += len(body)
        return body

    def _add_row(self, step: pb.StepTokens, row: pb.TokenRow) -> int:
        """Returns the estimate of its size."""
        self._open_rows.pop(row.stream, None)
        step.rows.append(row)
        return _row_bytes(row)

    def _take_prompt_part(self) -> bytes:
        """The next part of the stream whose turn it is, which has its next turn behind all others."""
        stream, parts = next(iter(self._prompts.items()))
        part = parts.popleft()
        if parts:
            self._prompts.move_to_end(stream)
        else:
            del self._prompts[stream]
        return part

    def _drop_prompts(self, stream: int) -> None:
        """An aborted stream needs no prompt."""
        for part in self._prompts.pop(stream, ()):
            self.waiting_bytes -= len(part)


@lru_cache(maxsize=1024)
def _message_head(num_bytes: int) -> bytes:
    """What stands before a message of `num_bytes` in a frame: key and length, as protobuf's varints."""
    head = bytearray((_MESSAGES_KEY,))
    while num_bytes > 0x7F:
        head.append(num_bytes & 0x7F | 0x80)
        num_bytes >>= 7
    head.append(num_bytes)
    return bytes(head)


def _row_bytes(row: pb.TokenRow) -> int:
    scored = sum(_SCORED_BYTES * (1 + len(scores.top)) for scores in row.scores)
    times = row.times.ByteSize() if row.finish_reason and row.HasField("times") else 0
    return _ROW_BYTES + _TOKEN_BYTES * len(row.tokens) + scored + times
