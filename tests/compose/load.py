"""Streams without end, of which every token is compared with the model's own: the load under which faults happen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from tests.stream_client import ResumableCall

CALL_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Expected:
    """A prompt and the tokens that the model generates for it by itself."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    def body(self, model: str) -> dict[str, object]:
        """The request, streamed and greedy."""
        return {
            "model": model, "prompt": list(self.prompt), "max_tokens": len(self.tokens), "temperature": 0,
            "stream": True, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip


@dataclass
class ExactLoad:
    """`num_clients` threads that send one expected call after another."""

    url: str
    expected: Sequence[Expected]
    num_clients: int = 4
    model: str = "bundled"
    ask: Callable[[ResumableCall], Sequence[int | None]] = lambda call: call.run(CALL_TIMEOUT_S)
    problems: list[str] = field(default_factory=list)
    num_right: int = 0
    num_resumes: int = 0
    num_refused: int = 0
    """New calls that a draining router refused, and that were sent again."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _begun: dict[int, int] = field(default_factory=dict)
    """Calls that each client has begun and ended well since the last `wait_for_calls`."""
    _stopping: bool = False

    @contextmanager
    def running(self) -> Iterator[ExactLoad]:
        """Runs the clients; at the end waits for their last calls."""
        threads = [threading.Thread(target=self._run_client, args=(number,)) for number in range(self.num_clients)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stopping = True
            for thread in threads:
                thread.join()

    def wait_for_calls(self, timeout_s: float, each: int = 2) -> None:
        """Returns when every client has begun and ended `each` calls from now on. Raises `TimeoutError`.

        A call that runs now does not count: it may have seen nothing of what just happened.
        """
        with self._changed:
            self._begun = dict.fromkeys(range(self.num_clients), -1)
            if not self._changed.wait_for(lambda: min(self._begun.values()) >= each or bool(self.problems), timeout_s):
                raise TimeoutError(f"after {timeout_s:g} s clients had ended {self._begun} calls")

    def _run_client(self, number: int) -> None:
        for turn in count():
            if self._stopping or self.problems:
                return
            self._send_one(self.expected[(number + turn) % len(self.expected)], number)

    def _send_one(self, expected: Expected, number: int) -> None:
        call = ResumableCall(lambda: [self.url], expected.body(self.model))
        problem = ""
        try:
            tokens = tuple(token for token in self.ask(call) if token is not None)  # None: the end of the stream
        except Exception as error:  # whatever it is, a client has seen it
            problem = f"client {number}: {type(error).__name__}: {error}"
        else:
            if tokens != expected.tokens:
                problem = f"client {number}: {tokens} instead of {expected.tokens}"
        with self._changed:
            if problem:
                self.problems.append(problem)
            else:
                self.num_right += 1
            self.num_resumes += call.num_resumes
            self.num_refused += call.num_refused
            self._begun[number] = self._begun.get(number, -1) + 1
            self._changed.notify_all()
