"""The moments of one request's life, and the latencies made of them. TTFT, ITL and stages come from here alone.

The router keeps one `Timeline` a sequence, passing the time in, and calls `observe` at its end. A stage is named after
what happened in it and ends with a moment; a moment that never came (a local prefill has no seal) lends its time to
the next one. So the stages always add up: to TTFT at the first token, to E2E at the end. Whole nanoseconds, so exactly.
"""

from __future__ import annotations

import enum
from itertools import pairwise

from baton.telemetry import metrics

NS = 1_000_000_000


class Moment(enum.Enum):
    """What can be stamped, in order; the value names the stage that ends with it."""

    ARRIVED = "arrive"
    TOKENISED = "tokenise"
    ADMITTED = "admit"
    RETRIED = "retry"
    PROMISED = "queue"
    PREFILL_ACCEPTED = "dispatch"
    SEALED = "prefill"
    FIRST_SENT = "send"
    LANDED = "land"
    FINISHED = "decode"


_ORDER = tuple(Moment)
_ATTEMPT = (Moment.PROMISED, Moment.PREFILL_ACCEPTED, Moment.SEALED)
_FIRST = _ORDER.index(Moment.FIRST_SENT)


class Timeline:
    """Stamps of one sequence. `now` is seconds on one monotonic clock."""

    def __init__(self, arrived_s: float) -> None:
        self._at_ns: dict[Moment, int] = {Moment.ARRIVED: _ns(arrived_s)}
        self._tokens_ns: list[int] = []

    def stamp(self, moment: Moment, now: float) -> None:
        """Records a moment; of several, the first counts. After the first token, moments before it are ignored."""
        if self._tokens_ns and _ORDER.index(moment) < _FIRST:
            return
        self._at_ns.setdefault(moment, _ns(now))

    def retry(self, now: float) -> None:
        """A lost attempt: before the first token its time becomes the stage `retry`; after it, a long gap."""
        if self._tokens_ns:
            return
        for moment in _ATTEMPT:
            self._at_ns.pop(moment, None)
        self._at_ns[Moment.RETRIED] = _ns(now)

    def token(self, now: float) -> None:
        """A token was sent to the client; the first one ends TTFT."""
        if not self._tokens_ns:
            self._at_ns[Moment.FIRST_SENT] = _ns(now)
        self._tokens_ns.append(_ns(now))

    def finish(self, now: float) -> None:
        """The last token was sent, or the request ended otherwise."""
        self.stamp(Moment.FINISHED, now)

    @property
    def path(self) -> str:
        """`split` when a prefill worker computed the prompt, else `local`."""
        return "split" if Moment.PREFILL_ACCEPTED in self._at_ns else "local"

    @property
    def num_tokens(self) -> int:
        """Tokens sent so far."""
        return len(self._tokens_ns)

    @property
    def ttft_ns(self) -> int | None:
        """Arrival to first token; None before it."""
        return self._since_arrival(Moment.FIRST_SENT)

    @property
    def e2e_ns(self) -> int | None:
        """Arrival to end; None before it."""
        return self._since_arrival(Moment.FINISHED)

    def gaps_ns(self) -> list[int]:
        """Time between consecutive tokens; the first entry is the first ITL."""
        return [later - earlier for earlier, later in pairwise(self._tokens_ns)]

    def stages_ns(self) -> dict[str, int]:
        """Time in each stage so far, never negative; adds up to TTFT and, once finished, to E2E."""
        stages: dict[str, int] = {}
        before = self._at_ns[Moment.ARRIVED]
        for moment in _ORDER[1:]:
            if moment not in self._at_ns:
                continue
            # Messages of two workers may overtake each other: a stage cannot end outside its half of the life.
            at = min(max(before, self._at_ns[moment]), self._half_end(moment))
            stages[self._name(moment)] = at - before
            before = at
        return stages

    def _name(self, moment: Moment) -> str:
        ended_early = moment is Moment.FINISHED and not self._tokens_ns
        return "no_token" if ended_early else moment.value

    def _half_end(self, moment: Moment) -> int:
        half = Moment.FIRST_SENT if _ORDER.index(moment) <= _FIRST else Moment.FINISHED
        return self._at_ns.get(half, self._at_ns[moment])

    def _since_arrival(self, moment: Moment) -> int | None:
        at = self._at_ns.get(moment)
        return None if at is None else at - self._at_ns[Moment.ARRIVED]


def observe(timeline: Timeline) -> None:
    """Records a finished timeline in the latency metrics. Call once."""
    path = timeline.path
    for stage, ns in timeline.stages_ns().items():
        metrics.REQUEST_STAGE_SECONDS.labels(stage).observe(ns / NS)
    if timeline.ttft_ns is not None:
        metrics.TTFT_SECONDS.labels(path).observe(timeline.ttft_ns / NS)
    if timeline.e2e_ns is not None:
        metrics.E2E_SECONDS.labels(path).observe(timeline.e2e_ns / NS)
    gaps = timeline.gaps_ns()
    if gaps:
        itl_seconds = metrics.ITL_SECONDS.labels(path)
        for gap in gaps:
            itl_seconds.observe(gap / NS)
        metrics.FIRST_ITL_SECONDS.labels(path).observe(gaps[0] / NS)


def _ns(seconds: float) -> int:
    return round(seconds * NS)
