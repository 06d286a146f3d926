"""The moments of one request's life, and the latencies made of them. TTFT, ITL and stages come from here alone.

The router keeps one `MilestoneTimer` a sequence, passing the time in, and calls `record_latencies` at its end. A stage
is named after what happened in it and ends with a milestone; a milestone that never came (a local prefill has no seal)
lends its time to the next one. So the stages always add up: to TTFT at the first token, to E2E at the end. Whole
nanoseconds, so exactly.
"""

from __future__ import annotations

import enum
from itertools import pairwise

from baton.telemetry import metrics

NS = 1_000_000_000


class Milestone(enum.Enum):
    """What can be stamped, in order; the value names the stage that ends with it."""

    ARRIVED = "arrive"
    TOKENISED = "tokenise"
    ADMITTED = "admit"
    RETRIED = "retry"
    RESERVED = "queue"
    PREFILL_ACCEPTED = "dispatch"
    SEALED = "prefill"
    FIRST_SENT = "send"
    IMPORTED = "import"
    FINISHED = "decode"


_ORDER = tuple(Milestone)
_ATTEMPT = (Milestone.RESERVED, Milestone.PREFILL_ACCEPTED, Milestone.SEALED)
_FIRST = _ORDER.index(Milestone.FIRST_SENT)


class MilestoneTimer:
    """Stamps of one sequence. `now` is seconds on one monotonic clock."""

    def __init__(self, arrived_s: float) -> None:
        self._at_ns: dict[Milestone, int] = {Milestone.ARRIVED: _ns(arrived_s)}
        self._tokens_ns: list[int] = []

    def stamp(self, milestone: Milestone, now: float) -> None:
        """Records a milestone; of several, the first counts. After the first token, moments before it are ignored."""
        if self._tokens_ns and _ORDER.index(milestone) < _FIRST:
            return
        self._at_ns.setdefault(milestone, _ns(now))

    def on_retry(self, now: float) -> None:
        """A lost attempt: before the first token its time becomes the stage `retry`; after it, a long gap."""
        if self._tokens_ns:
            return
        for milestone in _ATTEMPT:
            self._at_ns.pop(milestone, None)
        self._at_ns[Milestone.RETRIED] = _ns(now)

    def on_token(self, now: float) -> None:
        """A token was sent to the client; the first one ends TTFT."""
        if not self._tokens_ns:
            self._at_ns[Milestone.FIRST_SENT] = _ns(now)
        self._tokens_ns.append(_ns(now))

    def finish(self, now: float) -> None:
        """The last token was sent, or the request ended otherwise."""
        self.stamp(Milestone.FINISHED, now)

    @property
    def path(self) -> str:
        """`split` when a prefill worker computed the prompt, else `local`."""
        return "split" if Milestone.PREFILL_ACCEPTED in self._at_ns else "local"

    @property
    def num_tokens(self) -> int:
        """Tokens sent so far."""
        return len(self._tokens_ns)

    @property
    def ttft_ns(self) -> int | None:
        """Arrival to first token; None before it."""
        return self._since_arrival(Milestone.FIRST_SENT)

    @property
    def e2e_ns(self) -> int | None:
        """Arrival to end; None before it."""
        return self._since_arrival(Milestone.FINISHED)

    def itl_ns(self) -> list[int]:
        """Time between consecutive tokens; the first entry is the first ITL."""
        return [later - earlier for earlier, later in pairwise(self._tokens_ns)]

    def stages_ns(self) -> dict[str, int]:
        """Time in each stage so far, never negative; adds up to TTFT and, once finished, to E2E."""
        stages: dict[str, int] = {}
        before = self._at_ns[Milestone.ARRIVED]
        for milestone in _ORDER[1:]:
            if milestone not in self._at_ns:
                continue
            # Messages of two workers may overtake each other: a stage cannot end outside its half of the life.
            at = min(max(before, self._at_ns[milestone]), self._latest_end(milestone))
            stages[self._name(milestone)] = at - before
            before = at
        return stages

    def _name(self, milestone: Milestone) -> str:
        ended_early = milestone is Milestone.FINISHED and not self._tokens_ns
        return "no_token" if ended_early else milestone.value

    def _latest_end(self, milestone: Milestone) -> int:
        half = Milestone.FIRST_SENT if _ORDER.index(milestone) <= _FIRST else Milestone.FINISHED
        return self._at_ns.get(half, self._at_ns[milestone])

    def _since_arrival(self, milestone: Milestone) -> int | None:
        at = self._at_ns.get(milestone)
        return None if at is None else at - self._at_ns[Milestone.ARRIVED]


def record_latencies(timer: MilestoneTimer) -> None:
    """Records a finished timer in the latency metrics. Call once."""
    path = timer.path
    for stage, ns in timer.stages_ns().items():
        metrics.REQUEST_STAGE_SECONDS.labels(stage).observe(ns / NS)
    if timer.ttft_ns is not None:
        metrics.TTFT_SECONDS.labels(path).observe(timer.ttft_ns / NS)
    if timer.e2e_ns is not None:
        metrics.E2E_SECONDS.labels(path).observe(timer.e2e_ns / NS)
    itls = timer.itl_ns()
    if itls:
        itl_seconds = metrics.ITL_SECONDS.labels(path)
        for gap in itls:
            itl_seconds.observe(gap / NS)
        metrics.FIRST_ITL_SECONDS.labels(path).observe(itls[0] / NS)


def _ns(seconds: float) -> int:
    return round(seconds * NS)
