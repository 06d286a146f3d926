"""Answers of another kind than what was asked, for sessions of scripted workers."""

from __future__ import annotations

from dataclasses import dataclass

from baton.rpc.gen import session_pb2 as pb
from baton.session.pump import SessionPump


@dataclass(slots=True)
class Lie:
    """Puts `answer` in place of the next `times` answers of `kind`, in the same stream."""

    kind: str
    answer: pb.StreamMessage
    times: int = 1
    num_told: int = 0

    def distort(self, message: pb.StreamMessage) -> pb.StreamMessage:
        """The message to send instead of `message`."""
        if message.WhichOneof("kind") != self.kind or self.num_told == self.times:
            return message
        self.num_told += 1
        lie = pb.StreamMessage()
        lie.CopyFrom(self.answer)
        if lie.HasField("step"):  # its rows name their streams
            for row in lie.step.rows:
                row.stream = message.stream
        else:
            lie.stream = message.stream
        return lie


def lie_in(pump: SessionPump, lies: list[Lie]) -> None:
    """Sends `lies` over `pump`. They may be added later."""
    post = pump.post

    def distorted(message: pb.StreamMessage) -> None:
        for lie in lies:
            message = lie.distort(message)
        post(message)

    pump.post = distorted  # type: ignore[method-assign]
