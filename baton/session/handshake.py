"""The handshake that begins each connection of a session. Pure: nonces are arguments.

    dialler                                                         listener
      Hello, tag(key, "hello", Hello)                          ->     verifies the dialler before it keeps anything
      verifies the listener before it sends a prompt           <-     Challenge, tag(key, "challenge", Hello, Challenge)
      Proof, tag(key, "proof", Hello, Challenge)               ->     a captured Hello ends here: it has an older nonce
      frames                                                  <->     frames

A valid `Hello` may be a captured one, so a session is created, and a connection replaced, with the proof only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from baton.domain.errors import BatonError, LinkBroken, WorkerLost, from_code
from baton.domain.ids import Incarnation
from baton.rpc.gen import common_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.version import PROTOCOL_VERSION
from baton.session.tags import NONCE_BYTES, ConnectionKeys, handshake_tag, same_tag

MAX_HANDSHAKE_BYTES = 4096
_HELLO, _CHALLENGE, _PROOF = b"hello", b"challenge", b"proof"


class HandshakeFailed(LinkBroken):
    """The other end has not proved itself, or its bytes are no handshake: another secret, damage, or a replay."""


class SessionRefused(LinkBroken):
    """A proven listener does not continue this session, which is lost. `reason`: the listener's own error.

    `other_version`: it speaks another protocol version, so it would refuse every session.
    """

    def __init__(self, reason: BatonError, *, other_version: bool) -> None:
        super().__init__(f"the session was refused: {reason}")
        self.reason = reason
        self.other_version = other_version


@dataclass(frozen=True, slots=True)
class DialledConnection:
    """A dialler's connection whose listener has proved itself. `proof` must be sent before the first frame."""

    keys: ConnectionKeys
    peer_applied: int
    proof: pb.SessionMessage


class DiallerHandshake:
    """The dialler's side of one handshake."""

    def __init__(self, key: bytes, hello: pb.Hello) -> None:
        self._key = key
        self._listener_incarnation = hello.listener_incarnation
        self._version = hello.protocol_version
        self._hello = hello.SerializeToString()

    def hello(self) -> pb.SessionMessage:
        """The first message."""
        return pb.SessionMessage(body=self._hello, tag=handshake_tag(self._key, _HELLO, self._hello))

    def on_challenge(self, message: pb.SessionMessage) -> DialledConnection:
        """Verifies the listener. Raises `HandshakeFailed`, or `SessionRefused` if a proven listener says so."""
        body = message.body
        tag = handshake_tag(self._key, _CHALLENGE, self._hello, body)
        if len(body) > MAX_HANDSHAKE_BYTES or not same_tag(tag, message.tag):
            raise HandshakeFailed("the listener has not proved that it holds this cluster's secret")
        challenge = _parse_challenge(body)
        other_version = challenge.protocol_version != self._version
        if challenge.HasField("refused"):
            reason = from_code(challenge.refused.code, challenge.refused.message)
            raise SessionRefused(reason, other_version=other_version)
        if other_version or challenge.incarnation != self._listener_incarnation:
            reason = WorkerLost("another incarnation or version has answered")
            raise SessionRefused(reason, other_version=other_version)
        proof = pb.SessionMessage(tag=handshake_tag(self._key, _PROOF, self._hello, body))
        keys = ConnectionKeys.of_dialler(self._key, self._hello, body)
        return DialledConnection(keys, challenge.last_applied_seq, proof)


@dataclass(frozen=True, slots=True)
class ReceivedHello:
    """A `Hello` whose sender holds, or once held, the secret. It may still be a captured one."""

    hello: pb.Hello
    body: bytes = field(repr=False)
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class OfferedConnection:
    """A listener's connection that waits for the proof. `message` is the challenge to send."""

    received: ReceivedHello
    message: pb.SessionMessage

    def keys(self, proof: pb.SessionMessage) -> ConnectionKeys:
        """Verifies the dialler's proof; returns the keys of the connection. Raises `HandshakeFailed`."""
        key, hello, challenge = self.received.key, self.received.body, self.message.body
        if proof.body or not same_tag(handshake_tag(key, _PROOF, hello, challenge), proof.tag):
            raise HandshakeFailed("the dialler has not proved itself: its Hello may be a captured one")
        return ConnectionKeys.of_dialler(key, hello, challenge).reversed()


def read_hello(keys: tuple[bytes, ...], message: pb.SessionMessage) -> ReceivedHello:
    """Verifies and reads a `Hello`. Raises `HandshakeFailed`. Each of `keys` is valid."""
    body = message.body
    if len(body) > MAX_HANDSHAKE_BYTES:
        raise HandshakeFailed(f"a Hello of {len(body)} bytes")
    valid = [key for key in keys if same_tag(handshake_tag(key, _HELLO, body), message.tag)]
    if not valid:
        raise HandshakeFailed("the dialler has not this cluster's secret, or its Hello was damaged")
    try:
        hello = pb.Hello.FromString(body)
    except DecodeError:
        raise HandshakeFailed("a Hello that cannot be read") from None
    if len(hello.nonce) != NONCE_BYTES or not hello.session_id or not hello.connection:
        raise HandshakeFailed("a Hello without a nonce, a session or a connection number")
    return ReceivedHello(hello, body, valid[0])


def check_hello(hello: pb.Hello, incarnation: Incarnation) -> None:
    """Raises `WorkerLost` for a `Hello` of another version, or for another incarnation of this process."""
    if hello.protocol_version != PROTOCOL_VERSION:
        versions = f"protocol version {hello.protocol_version}, this worker speaks {PROTOCOL_VERSION}"
        raise WorkerLost(f"{hello.id} speaks {versions}")
    if hello.listener_incarnation != incarnation:
        raise WorkerLost("the session is meant for another incarnation of this process")


def offer(received: ReceivedHello, challenge: pb.Challenge) -> OfferedConnection:
    """The listener's answer to a `Hello`; `challenge` has a fresh nonce."""
    body = challenge.SerializeToString()
    tag = handshake_tag(received.key, _CHALLENGE, received.body, body)
    return OfferedConnection(received, pb.SessionMessage(body=body, tag=tag))


def refuse(received: ReceivedHello, incarnation: Incarnation, error: BatonError) -> pb.SessionMessage:
    """The answer of a listener that does not continue the session. Tagged: a stranger cannot refuse."""
    refused = common_pb2.Failure(code=error.code, message=str(error))
    challenge = pb.Challenge(protocol_version=PROTOCOL_VERSION, incarnation=incarnation, refused=refused)
    return offer(received, challenge).message


def _parse_challenge(body: bytes) -> pb.Challenge:
    try:
        return pb.Challenge.FromString(body)
    except DecodeError:
        raise HandshakeFailed("a Challenge that cannot be read") from None
