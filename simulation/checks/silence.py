"""Checks after a run that no attempt stayed silent while all was well, and that no deadline passed in an idle cluster.

An attempt runs from its reservation until its router ends or replaces it. Its router, its workers and the store are
well if no fault hit one of them, or a link between two. Progress is a change of the request's state, or an effect of an
engine for the request: a chunk, a seal, tokens, a commit, an end. Uploads of images name no request: a fault of an
encode worker excuses every silence, and one of a prefill worker where the router says that it waited for that one.
Attempts that wait for room have not begun: a queue is no silence. Called by `run`, on the trace: a check that runs
beside the cluster would move its clock.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from baton.domain.errors import DeadlineExceeded
from baton.domain.ids import RequestId
from baton.domain.lifecycle import RequestState
from simulation.checks.disturbances import DisturbedSpan, calm_spans, disturbed_spans
from simulation.checks.invariants import Violation
from simulation.policies import CONFIG
from simulation.runtime.trace import Trace, TraceEntry
from simulation.scenario import STORE, Scenario, SimFaultKind

RULE = "silence"

QUEUE_STEPS = CONFIG.max_rows * CONFIG.max_model_len // CONFIG.token_budget
"""Steps of a prompt behind the longest prompts of as many rows as a decode worker has, in a prefill worker's queue."""

RECOVERY_S = max(
    CONFIG.worker_ttl_s + CONFIG.heartbeat_s,  # a worker is missed, or known again
    CONFIG.lease_s + CONFIG.pull_deadline_s,  # pages of an ended attempt are free, and those of the next one are read
    CONFIG.reserve_timeout_s + CONFIG.heartbeat_s,  # a reservation is given up, and another one tried
)
"""Longest effect of an ended fault on an attempt that runs. Owner leases and patience concern waiting requests; link
breakers keep attempts from beginning."""

_RUNNING = {RequestState.RESERVED, RequestState.PREFILLING, RequestState.SEALED, RequestState.DECODING}
_STATE = re.compile(r"log request_state .* state=(\w+)$")
_SUSPECTED = re.compile(r"log worker_suspected worker=(\S+) ")
_CALL = re.compile("->|=>|-x")
_WORKERS = ("prefill-", "decode-", "encode-")


def max_silence_s(scenario: Scenario) -> float:
    """Longest time without progress of an attempt that runs, if all is well."""
    return RECOVERY_S + QUEUE_STEPS * scenario.mean_step_s


def check_silence(scenario: Scenario, trace: Trace) -> None:
    """Raises `Violation`."""
    spans = disturbed_spans(scenario, trace.entries)
    _AttemptsCheck(spans, max_silence_s(scenario), frozenset({STORE, *scenario.encoders})).check(trace.entries)
    upgraded_s = max((fault.at_s for fault in scenario.faults if fault.kind is SimFaultKind.UPGRADE), default=0.0)
    arrived = {entry.request_id: entry.at_s for entry in trace.entries if entry.text.startswith("arrives")}
    # A request from before an upgrade may wait, up to its deadline, for workers that have its model.
    judged = [entry for entry in trace.entries if arrived.get(entry.request_id, 0.0) >= upgraded_s]
    _check_deadlines(spans, max_silence_s(scenario), judged, trace.entries)


def _is_effect(entry: TraceEntry) -> bool:
    """True for an effect of an engine, and not for a message or a log line."""
    is_worker = entry.source.startswith(_WORKERS) and not _CALL.search(entry.source)
    return is_worker and entry.request_id is not None and not entry.text.startswith("log ")


def _check_deadlines(
    spans: list[DisturbedSpan], max_s: float, judged: list[TraceEntry], entries: list[TraceEntry]
) -> None:
    """No request of `judged` runs out of time while no engine does anything: then nobody is overloaded, too."""
    progress = [entry.at_s for entry in entries if _is_effect(entry)]
    for entry in judged:
        if entry.source == "client" and entry.text.endswith(DeadlineExceeded.code):
            before = bisect_left(progress, entry.at_s)
            last_s = progress[before - 1] if before else 0.0
            for from_s, until_s in calm_spans(spans, last_s, entry.at_s):
                if until_s == entry.at_s and until_s - from_s > max_s:
                    why = f"runs out of time, and nothing was done or faulty from {from_s:.3f} s on"
                    raise Violation(RULE, why, entry.request_id)


@dataclass(slots=True)
class _RunningAttempt:
    router: str
    state: RequestState
    progress_at_s: float
    names: set[str]


class _AttemptsCheck:
    """Follows the running attempts through a trace. `used_by_all`: processes that any attempt may wait for."""

    def __init__(self, spans: list[DisturbedSpan], max_s: float, used_by_all: frozenset[str]) -> None:
        self._spans = spans
        self._max_s = max_s
        self._used_by_all = used_by_all
        self._running: dict[RequestId, _RunningAttempt] = {}
        self._asked: dict[RequestId, set[str]] = {}  # by `Reserve`, before the attempt begins

    def check(self, entries: list[TraceEntry]) -> None:
        """Raises `Violation`."""
        for entry in entries:
            for id in list(self._ended_with(entry)):
                del self._running[id]
            if entry.request_id is not None:
                self._follow(entry.request_id, entry)
        for id in self._running:
            self._check_silence(id, entries[-1].at_s)

    def _ended_with(self, entry: TraceEntry) -> Iterator[RequestId]:
        """Requests of a router whose life has ended."""
        if entry.text not in ("starts", "has left") and not entry.text.startswith("kill router"):
            return
        name = entry.text.split()[1] if entry.source == "fault" else entry.source
        yield from (id for id, attempt in self._running.items() if attempt.router == name)

    def _follow(self, id: RequestId, entry: TraceEntry) -> None:
        attempt = self._running.get(id)
        if state := _STATE.match(entry.text):
            self._set_state(id, RequestState(state[1]), entry)
        elif _CALL.search(entry.source):
            names = self._asked.setdefault(id, set()) if attempt is None else attempt.names
            names.update(_CALL.split(entry.source))
        elif attempt is not None and (worker := _SUSPECTED.match(entry.text)):
            attempt.names.add(worker[1])
        elif attempt is not None and _is_effect(entry):
            self._check_silence(id, entry.at_s)
            attempt.progress_at_s = entry.at_s
            attempt.names.add(entry.source)

    def _set_state(self, id: RequestId, state: RequestState, entry: TraceEntry) -> None:
        attempt = self._running.get(id)
        if attempt is not None:
            self._check_silence(id, entry.at_s)
        if state not in _RUNNING:
            self._running.pop(id, None)
            self._asked.pop(id, None)
        elif attempt is None:
            names = {entry.source, *self._used_by_all, *self._asked.pop(id, ())}
            self._running[id] = _RunningAttempt(entry.source, state, entry.at_s, names)
        else:
            attempt.router, attempt.state, attempt.progress_at_s = entry.source, state, entry.at_s

    def _check_silence(self, id: RequestId, now: float) -> None:
        attempt = self._running[id]
        for from_s, until_s in calm_spans(self._spans, attempt.progress_at_s, now, attempt.names):
            if until_s - from_s > self._max_s:
                why = f"is {attempt.state.value} and silent from {from_s:.3f} to {until_s:.3f} s, and all is well"
                raise Violation(RULE, f"{why} (at most {self._max_s:.2f} s)", id)
