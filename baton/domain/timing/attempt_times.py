"""Durations of one attempt as the workers measured them: whole microseconds, made by the engines, sent to the router.

A worker counts from its own receipt of the call, so no clocks are compared between processes. `RequestTrace` of
`baton.telemetry` places these values between the router's own stamps.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.values.quick_init import quick_init

MAX_CHUNK_TIMES = 16
"""Chunks of one prompt whose times are kept: the first ones."""


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Prefill's part, complete at the seal. `queue_us`, `seal_us` and the chunks' starts count from the receipt.

    `encode_us` is a part of `queue_us`: the steps that encoded images for which this prompt waited.
    """

    queue_us: int
    compute_us: int
    seal_us: int
    chunks: tuple[tuple[int, int], ...]  # (start_us, tokens), at most MAX_CHUNK_TIMES
    computed_tokens: int
    cached_tokens: int
    imported_tokens: int = 0  # of the cached ones: read from another worker's cache for this prompt
    encode_us: int = 0


@quick_init
@dataclass(frozen=True, slots=True)
class ImportTimes:
    """Decode's part up to the batch. `first_chunk_us`, `commit_us` and `join_us` count from the receipt of `Generate`.

    `pull_us`: from the start of the first read to the end of the last. `exposed_us`: from the seal to the commit.
    """

    transport: str
    path: str
    first_chunk_us: int
    pull_us: int
    exposed_us: int
    commit_us: int
    join_us: int
    bytes: int
    pages: int
    proof: str
    re_reads: int


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """A row's time in decode's batch. The three durations add up to it."""

    steps: int
    step_us: int
    waited_us: int
    preempted_us: int
    num_preemptions: int


def to_us(seconds: float) -> int:
    """Whole microseconds, rounded; a duration that clocks made negative is 0."""
    return max(0, round(1e6 * seconds))
