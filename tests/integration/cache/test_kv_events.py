"""A worker's KV events, read by a subscriber as vLLM's and SGLang's consumers read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from baton.kv.keys import page_keys
from baton.services.cli.processes.ports import free_ports
from baton.worker.kv_events.wire import block_hash
from tests.cluster import Cluster, eventually

pytestmark = pytest.mark.integration

PAGE_SIZE = 16
WAIT_S = 30.0
PROMPT = [5 + (7 * i * i) % 400 for i in range(5 * PAGE_SIZE + 3)]


@contextmanager
def asker(port: int) -> Iterator[Any]:
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as socket:
            socket.connect(f"tcp://127.0.0.1:{port}")
            yield socket
    finally:
        context.destroy(linger=0)


def replayed(socket: Any) -> list[list[Any]]:
    """All events so far, in order."""
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    events: list[list[Any]] = []
    while socket.poll(1000 * WAIT_S):
        _, number, payload = socket.recv_multipart()
        if int.from_bytes(number, "big", signed=True) == -1:
            return events
        events += msgspec.msgpack.decode(payload)[1]
    raise AssertionError("the replay did not end")


def stored_tokens(events: list[list[Any]]) -> list[int]:
    return [token for kind, *rest in events if kind == "BlockStored" for token in rest[2]]


def test_a_worker_publishes_the_tokens_and_names_of_its_pages(tmp_path: Path) -> None:
    ports = {name: free_ports(2) for name in ("prefill", "decode")}
    flags = {
        name: {"kv-events-endpoint": f"tcp://127.0.0.1:{live}", "kv-events-replay-endpoint": f"tcp://127.0.0.1:{again}"}
        for name, (live, again) in ports.items()
    }
    with Cluster(tmp_path, prefill_flags=flags["prefill"], decode_flags=flags["decode"]) as cluster:
        cluster.complete(PROMPT, max_tokens=4, ignore_eos=True)
        full = PROMPT[: 5 * PAGE_SIZE]
        names = [block_hash(key) for key in page_keys(full, PAGE_SIZE, "")]
        for name in ("prefill", "decode"):
            with asker(ports[name][1]) as socket:
                eventually(lambda: stored_tokens(replayed(socket)) == full, WAIT_S, f"{name} has published the prompt")
                events = replayed(socket)
                assert events[0] == ["AllBlocksCleared"]
                stored = [event for event in events if event[0] == "BlockStored"]
                assert [number for event in stored for number in event[1]] == names
                assert stored[0][2] is None, "the first page has no page before it"
                assert {event[4] for event in stored} == {PAGE_SIZE}
            assert cluster.metric(f"{name}-0", "baton_kv_event_batches_total", result="published") > 1
