"""Clients that repeat calls at a cluster of real processes, and check every token."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.cluster import Cluster
from tests.stream_client import ResumableCall

NUM_FIRST_EVENTS = 100
CALL_TIMEOUT_S = 90.0
WITH_IDS = {"ignore_eos": True, "return_token_ids": True}


def prompt_of(number: int) -> list[int]:
    return [5 + (11 * i + 17 * number + i * i * number) % 500 for i in range(20 + 14 * number)]


@dataclass(frozen=True, slots=True)
class ReferenceCall:
    """Requests, and the answers of an undisturbed run."""

    prompt: list[int]
    answer: list[int]

    def body(self, model: str) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_tokens": len(self.answer), **WITH_IDS}
        return {"model": model, "prompt": self.prompt, "stream": True, **sampling}


class Client:
    """Repeats the same calls until stopped, at one router for as long as it serves."""

    def __init__(self, cluster: Cluster, calls: Sequence[ReferenceCall], stop: threading.Event) -> None:
        self._cluster = cluster
        self._calls = calls
        self._stop = stop
        self._answered = threading.Semaphore(0)
        self._call = ResumableCall(cluster.router_urls, {})
        self.num_answered = 0
        self.num_resumes = 0

    def run(self, model: str) -> None:
        """Raises the first failure."""
        for call in itertools.cycle(self._calls):
            if self._stop.is_set():
                return
            self._call = ResumableCall(self._cluster.router_urls, call.body(model), self._call.router_index)
            assert self._call.run(CALL_TIMEOUT_S) == call.answer
            self.num_answered += 1
            self.num_resumes += self._call.num_resumes
            self._answered.release()

    def wait_for_an_answer(self) -> None:
        """Waits for one more answer."""
        assert self._answered.acquire(timeout=CALL_TIMEOUT_S), "no answer any more"

    def answers_ready(self) -> bool:
        """True if an answer has come that `wait_for_an_answer` has not returned for."""
        if self._answered.acquire(blocking=False):
            self._answered.release()
            return True
        return False

    def is_at_the_beginning(self) -> bool:
        """True if the first events of an answer have arrived and most are missing."""
        return 0 < len(self._call.seen) < NUM_FIRST_EVENTS


@contextmanager
def steady_load(cluster: Cluster, calls: list[ReferenceCall]) -> Iterator[list[Client]]:
    """Runs three clients, the first with a long answer. Raises the failures of all."""
    stop = threading.Event()
    long, *short = calls
    clients = [Client(cluster, asked, stop) for asked in ([long], short, short[::-1])]
    with ThreadPoolExecutor(len(clients)) as pool:
        runs: list[Future[None]] = [pool.submit(client.run, cluster.model_name) for client in clients]
        try:
            yield clients
        finally:
            stop.set()
        for run in runs:
            run.result(CALL_TIMEOUT_S)
