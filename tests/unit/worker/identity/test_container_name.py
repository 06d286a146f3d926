"""A container's name comes from Docker's name server; whatever it answers, a worker gets an id."""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.worker import WorkerRole
from baton.worker.identity import container_name, worker_id

CONTAINER_ID = "3309af3c32c6"
RECORDED = bytes.fromhex(
    "0007818000010001000000000138013002313803313732"
    "07696e2d61646472046172706100000c0001013801300231380331373207696e2d61646472046172706100000c000100000258"
    "00180b62742d6465636f64652d320a62745f64656661756c7400"
)
"""What Docker 28.2 answered to query 7, about 172.18.0.8."""


@contextmanager
def name_server(answer: Callable[[bytes], bytes], folder: Path) -> Iterator[tuple[Path, int]]:
    """A server on loopback that answers one query, its resolv.conf and its port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(10.0)
        resolv_conf = folder / "resolv.conf"
        resolv_conf.write_text("# by a test\nnameserver 127.0.0.1\noptions ndots:0\n", encoding="ascii")

        def serve() -> None:
            query, asker = server.recvfrom(512)
            server.sendto(answer(query), asker)

        thread = Thread(target=serve)
        thread.start()
        yield resolv_conf, server.getsockname()[1]
        thread.join()


def named(name: bytes) -> Callable[[bytes], bytes]:
    """Answers with a name, and points back to the question as servers do."""

    def answer(query: bytes) -> bytes:
        head = struct.pack("!2s5H", query[:2], 0x8180, 1, 1, 0, 0)
        labels = b"".join(bytes([len(label)]) + label for label in name.split(b".")) + b"\0"
        return head + query[12:] + struct.pack("!HHHIH", 0xC00C, 12, 1, 600, len(labels)) + labels

    return answer


@pytest.fixture(autouse=True)
def known_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "172.18.0.8")


def test_the_name_server_is_asked_for_the_own_address(tmp_path: Path):
    queries = []

    def answer(query: bytes) -> bytes:
        queries.append(query)
        return named(b"baton-decode-2.baton_default")(query)

    with name_server(answer, tmp_path) as (resolv_conf, port):
        assert container_name.container_name(CONTAINER_ID, resolv_conf, ("127.0.0.1", port)) == "baton-decode-2"
    assert queries[0][12:] == b"\x018\x010\x0218\x03172\x07in-addr\x04arpa\0\0\x0c\0\1"


def test_the_answer_of_a_real_docker_is_read():
    assert container_name.container_of(RECORDED, 7) == "bt-decode-2"


@pytest.mark.parametrize("host", ["node-7", "3309af3c32c", "3309AF3C32C6", "baton-decode-2"])
def test_only_a_container_id_is_asked_about(host: str, tmp_path: Path):
    assert container_name.container_name(host, tmp_path / "missing") is None


def test_nobody_to_ask_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert container_name.container_name(CONTAINER_ID, tmp_path / "missing") is None
    empty = tmp_path / "resolv.conf"
    empty.write_text("nameserver fe80::1\n", encoding="ascii")
    assert container_name.container_name(CONTAINER_ID, empty) is None
    empty.write_text("nameserver 127.0.0.1\n", encoding="ascii")
    monkeypatch.setattr(container_name, "TIMEOUT_S", 0.01)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        assert container_name.container_name(CONTAINER_ID, empty, silent.getsockname()) is None


@pytest.mark.parametrize(
    "broken",
    [
        lambda query: b"",
        lambda query: RECORDED,  # of another query
        lambda query: query[:2] + b"\x81\x83" + query[4:],  # no such name
        lambda query: named(b"baton-decode-2.baton_default")(query)[:-8],
        named(b"baton-decode-2"),
        named(b"llm_decode.1.x8y9"),  # of a swarm: every replica begins so
        named(b"ip-172-17-0-2.ec2.internal"),
    ],
)
def test_a_useless_answer_is_no_name(broken: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secrets, "randbits", lambda bits: 8)
    with name_server(broken, tmp_path) as (resolv_conf, port):
        assert container_name.container_name(CONTAINER_ID, resolv_conf, ("127.0.0.1", port)) is None


def test_no_other_name_server_is_asked(tmp_path: Path):
    """What it says of the address is no container's name, and may be that of many."""
    other = tmp_path / "resolv.conf"
    other.write_text("nameserver 127.0.0.1\n", encoding="ascii")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        assert container_name.container_name(CONTAINER_ID, other, ("127.0.0.11", server.getsockname()[1])) is None
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.recv(512)


@given(st.binary(max_size=512), st.integers(0, len(RECORDED)), st.binary(max_size=4))
def test_no_answer_does_more_than_fail(random: bytes, at: int, put: bytes):
    for reply in (random, b"\0\7\x81\x80" + random, RECORDED[:at] + put + RECORDED[at + len(put) :]):
        try:
            name = container_name.container_of(reply, 7)
        except ValueError:  # also UnicodeDecodeError
            continue
        assert name is None or 0 < len(name) < 256


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ("baton-decode-2", "decode-2"),
        ("baton_decode_12", "decode-12"),
        ("my-decode-app-decode-3", "decode-3"),
        ("decode-1", "decode-1"),
        ("baton-prefill-2", "decode-baton-prefill-2"),
        ("brave_curie", "decode-brave-curie"),
    ],
)
def test_a_replica_is_named_by_its_number(container: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_id, "container_name", lambda host: container)
    assert worker_id.default_worker_id(WorkerRole.DECODE, 50052, 50052, CONTAINER_ID) == expected


def test_without_a_name_the_container_id_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_id, "container_name", lambda host: None)
    assert worker_id.default_worker_id(WorkerRole.DECODE, 50052, 50052, "baton-decode-2") == "decode-baton-decode-2"
    assert worker_id.default_worker_id(WorkerRole.DECODE, 50052, 50052, CONTAINER_ID) == f"decode-{CONTAINER_ID}"
