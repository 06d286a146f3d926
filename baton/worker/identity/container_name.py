"""Asks Docker for a container's name, whose host name is by default its id: 12 digits that change with each container.

Docker's name server answers a pointer query (RFC 1035, type PTR) for an address of the container with
`<container>.<network>`. compose names a container `<project>-<service>-<number>`, and its successor the same.
"""

from __future__ import annotations

import re
import secrets
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from baton.telemetry.logs import get_logger

log = get_logger()

TIMEOUT_S = 1.0
"""The server answers from memory within a millisecond."""
RESOLV_CONF = Path("/etc/resolv.conf")
DOCKER_SERVER = "127.0.0.11"
"""Another server knows nothing of containers: what it says of an address may be the name of a host, or of many."""
PORT = 53
MAX_REPLY_BYTES = 512
MAX_LABELS = 128
_CONTAINER_ID = re.compile(r"[0-9a-f]{12}")
_PTR, _INTERNET = 12, 1
_RECURSION_DESIRED = 0x0100
_IS_REPLY, _RESULT_CODE = 0x8000, 0x000F
_POINTER = 0xC0


def container_name(
    host_name: str, resolv_conf: Path = RESOLV_CONF, server: tuple[str, int] = (DOCKER_SERVER, PORT)
) -> str | None:
    """The name of the container with this host name; None if that is no container's id, or Docker does not answer."""
    if _CONTAINER_ID.fullmatch(host_name) is None:
        return None
    try:
        asked = _name_server(resolv_conf.read_text(encoding="utf-8", errors="replace"))
        return _ask(socket.gethostbyname(host_name), server) if asked == server[0] else None
    except (OSError, ValueError) as error:
        log.info("container_name_unknown", host_name=host_name, why=str(error))
        return None


def _name_server(resolv_conf: str) -> str | None:
    found = re.search(r"^nameserver[ \t]+(\d+\.\d+\.\d+\.\d+)\s*$", resolv_conf, re.MULTILINE)
    return None if found is None else found[1]


def _ask(address: str, server: tuple[str, int]) -> str | None:
    """The container of an IPv4 address; None if it is not told. Raises `OSError`, `ValueError`."""
    number = secrets.randbits(16)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(TIMEOUT_S)
        asking.connect(server)  # so that no other host's datagram is read
        asking.send(pointer_query(number, address))
        return container_of(asking.recv(MAX_REPLY_BYTES), number)


def pointer_query(number: int, address: str) -> bytes:
    """A query for the name of an IPv4 address."""
    labels: Iterable[str] = (*reversed(address.split(".")), "in-addr", "arpa")
    name = b"".join(bytes([len(label)]) + label.encode("ascii") for label in labels)
    return struct.pack("!6H", number, _RECURSION_DESIRED, 1, 0, 0, 0) + name + struct.pack("!xHH", _PTR, _INTERNET)


def container_of(reply: bytes, number: int) -> str | None:
    """`container` of `container.network`, the first name in the reply to query `number`. Raises `ValueError`.

    None without a name, and for one of more parts: where the container's own name ends is not known then, and the first
    part may be that of many containers (`stack_decode.1.<id>`).
    """
    try:
        told, flags, num_questions, num_answers = struct.unpack_from("!4H", reply)
        if told != number or not flags & _IS_REPLY:
            raise ValueError("the name server's reply is to another query")
        if flags & _RESULT_CODE or not num_answers:
            return None
        at = 12
        for _ in range(num_questions):
            at = _after_name(reply, at) + 4
        for _ in range(num_answers):
            at = _after_name(reply, at)
            kind, _, _, length = struct.unpack_from("!HHIH", reply, at)
            at += 10
            if kind == _PTR:
                labels = _labels(reply, at)
                return labels[0] if len(labels) == 2 else None
            at += length
    except (struct.error, IndexError) as error:
        raise ValueError(f"the name server's reply is cut off: {error}") from None
    return None


def _labels(reply: bytes, at: int) -> list[str]:
    """The labels of the name that begins at `at`. Raises `ValueError`, `IndexError`, `struct.error`."""
    labels: list[str] = []
    for _ in range(MAX_LABELS):
        length = reply[at]
        if length >= _POINTER:
            at = (length - _POINTER) << 8 | reply[at + 1]
            continue
        if length == 0:
            return labels
        (label,) = struct.unpack_from(f"!{length}s", reply, at + 1)
        labels.append(label.decode("ascii"))
        at += 1 + length
    raise ValueError("the name server's reply has a name without an end")


def _after_name(reply: bytes, at: int) -> int:
    """Where a name that begins at `at` ends. Raises `ValueError`, `IndexError`."""
    for _ in range(MAX_LABELS):
        length = reply[at]
        if length >= _POINTER:
            return at + 2
        at += 1 + length
        if length == 0:
            return at
    raise ValueError("the name server's reply has a name without an end")
