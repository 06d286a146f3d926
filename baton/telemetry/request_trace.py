"""The record of one client request: values, codecs and views. Every view of a request is a function of it.

`request_timer` makes one at the end of each request. Times are whole microseconds since arrival on the router's clock;
workers' own durations (`baton.domain.timing.attempt_times`) stand beside them. A time that is unknown is None, never 0.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import msgspec

from baton.domain.timing.attempt_times import DecodeTimes, ImportTimes, PrefillTimes

MAX_ATTEMPTS = 8
"""Attempts of a sequence that the record keeps: the first ones and the last one."""
MAX_EVENTS = 32
MAX_TEXT_CHARS = 80
MAX_SEQUENCES = 16
"""Sequences that the record keeps. The totals count all."""
MAX_TRACE_BYTES = 8 * 1024


class Stage(enum.Enum):
    """The parts of a request's life, in order; `stamp(stage)` marks the end of one.

    Those up to EMIT add up to TTFT, all of them to E2E. ENCODE stands behind DISPATCH for images that encode workers
    encoded, behind PREFILL_QUEUE for those that prefill did.
    """

    __hash__ = object.__hash__  # members are single objects; enum's own is a Python call, 30 times a request

    READ = "read"
    PARSE = "parse"
    ADMIT = "admit"
    RETRY = "retry"
    RESERVE = "reserve"
    DISPATCH = "dispatch"
    PREFILL_QUEUE = "prefill_queue"
    ENCODE = "encode"
    PREFILL = "prefill"
    EMIT = "emit"
    TRANSFER_TAIL = "transfer_tail"
    JOIN = "join"
    DECODE = "decode"
    FINISH = "finish"


class Outcome(enum.Enum):
    """End of a request or a sequence; the metric label."""

    FINISHED = "finished"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"
    RUNNING = "running"
    """In a snapshot only."""


class StageTime(msgspec.Struct, frozen=True):
    """One stage. Stages follow each other without a gap."""

    stage: Stage
    start_us: int
    duration_us: int


class TraceEvent(msgspec.Struct, frozen=True):
    """Something that happened to the request, e.g. `replayed`."""

    at_us: int
    kind: str
    text: str


class AttemptTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attempt. `skew_us`: the part of the prefill interval that the worker does not account for (network, queues).

    `end_code` and `end_phase` belong to a failed attempt. `busy_replies`: workers that had no room for it. `early_us`:
    how long prefill had had the prompt when decode's reservation came.
    """

    attempt: int
    start_us: int
    end_us: int
    prefill: str = ""
    decode: str = ""
    prefill_incarnation: int = 0
    decode_incarnation: int = 0
    reserve_us: int | None = None
    busy_replies: int = 0
    early_us: int = 0
    skew_us: int | None = None
    end_code: str = ""
    end_phase: str = ""
    prefill_times: PrefillTimes | None = None
    import_times: ImportTimes | None = None
    decode_times: DecodeTimes | None = None

    @property
    def path(self) -> str:
        """`local`: decode computed the prompt. `split`: prefill did. Empty before any worker accepted the attempt."""
        return "" if not self.decode else "local" if self.prefill == self.decode else "split"


class SequenceTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """One choice. `finish_reason` is empty unless it finished."""

    index: int
    output_tokens: int = 0
    finish_reason: str = ""
    first_token_us: int | None = None
    last_token_us: int | None = None
    max_gap_us: int | None = None
    max_gap_at_token: int | None = None
    num_attempts: int = 0
    attempts: tuple[AttemptTrace, ...] = ()


class RequestTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """One client request. `arrived_unix_us` is for display only.

    `stages` are those of the sequence whose token came first, ended by `finish`: the rest of the request.
    """

    id: str
    router: str
    model: str
    endpoint: str
    arrived_unix_us: int
    outcome: Outcome
    e2e_us: int
    http_request_id: str = ""
    trace_id: str = ""
    parent_span_id: str = ""
    sampled: bool = False
    tenant: str = ""
    stream: bool = False
    n: int = 0
    durable: bool = False
    private: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    code: str = ""
    status: int = 0
    client_gone: bool = False
    ttft_us: int | None = None
    stages: tuple[StageTime, ...] = ()
    sequences: tuple[SequenceTrace, ...] = ()
    events: tuple[TraceEvent, ...] = ()
    v: int = 1

    @property
    def num_attempts(self) -> int:
        """Attempts of all sequences."""
        return sum([sequence.num_attempts for sequence in self.sequences])

    @property
    def last_attempt(self) -> AttemptTrace | None:
        """The last attempt of the first sequence."""
        attempts = self.sequences[0].attempts if self.sequences else ()
        return attempts[-1] if attempts else None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RequestTrace)


def encode_trace(trace: RequestTrace) -> bytes:
    """msgpack, at most `MAX_TRACE_BYTES`. Leaves out what does not fit: chunks, workers' times, then sequences."""
    data = _encoder.encode(trace)
    for shorten in (_without_chunks, _without_times, _without_sequences):
        if len(data) <= MAX_TRACE_BYTES:
            break
        trace = shorten(trace)
        data = _encoder.encode(trace)
    return data


def decode_trace(data: bytes) -> RequestTrace:
    """Raises `ValueError` for bytes that are no trace."""
    return _decoder.decode(data)


def trace_json(trace: RequestTrace) -> bytes:
    """The record as JSON, by field names."""
    return msgspec.json.encode(trace)


def trace_from_json(data: bytes) -> RequestTrace:
    """Raises `ValueError` for JSON that is no trace."""
    return msgspec.json.decode(data, type=RequestTrace)


def log_fields(trace: RequestTrace) -> dict[str, object]:
    """The fields of the one log line of a request. Durations are seconds; they add up to `e2e_s`."""
    attempt = trace.last_attempt
    times_us = dict.fromkeys(LOG_STAGES, 0)
    for each in trace.stages:
        times_us[_LOG_STAGE_OF[each.stage]] += each.duration_us
    fields: dict[str, object] = {
        "request_id": trace.id,
        "outcome": trace.outcome.value,
        "code": trace.code,
        "status": trace.status,
        "attempts": trace.num_attempts,
        "prefill": attempt.prefill if attempt is not None else "",
        "decode": attempt.decode if attempt is not None else "",
        "prompt_tokens": trace.prompt_tokens,
        "cached_tokens": trace.cached_tokens,
        "output_tokens": trace.output_tokens,
        **{f"{name}_s": _seconds(us) for name, us in times_us.items()},
        "ttft_s": None if trace.ttft_us is None else _seconds(trace.ttft_us),
        "e2e_s": _seconds(trace.e2e_us),
    }
    for name in ("tenant", "http_request_id", "trace_id", "client_gone"):
        if value := getattr(trace, name):
            fields[name] = value
    return fields


LOG_STAGES = {
    "queue": (Stage.READ, Stage.PARSE, Stage.ADMIT, Stage.RETRY, Stage.RESERVE, Stage.DISPATCH),
    "prefill": (Stage.PREFILL_QUEUE, Stage.ENCODE, Stage.PREFILL, Stage.EMIT),
    "transfer": (Stage.TRANSFER_TAIL, Stage.JOIN),
    "decode": (Stage.DECODE, Stage.FINISH),
}
"""Stages that a log line shows together; each stage stands in one group."""
_LOG_STAGE_OF = {stage: name for name, stages in LOG_STAGES.items() for stage in stages}


def _seconds(us: int) -> float:
    return us / 1_000_000


def _without_chunks(trace: RequestTrace) -> RequestTrace:
    def shorten(attempt: AttemptTrace) -> AttemptTrace:
        times = attempt.prefill_times
        if times is None:
            return attempt
        without = dataclasses.replace(times, chunks=())
        return msgspec.structs.replace(attempt, prefill_times=without)

    return _with_attempts(trace, [[shorten(attempt) for attempt in s.attempts] for s in trace.sequences])


def _without_times(trace: RequestTrace) -> RequestTrace:
    def shorten(attempt: AttemptTrace) -> AttemptTrace:
        return msgspec.structs.replace(attempt, prefill_times=None, import_times=None, decode_times=None)

    return _with_attempts(trace, [[shorten(attempt) for attempt in s.attempts] for s in trace.sequences])


def _without_sequences(trace: RequestTrace) -> RequestTrace:
    return msgspec.structs.replace(trace, sequences=trace.sequences[:1], events=trace.events[:4])


def _with_attempts(trace: RequestTrace, attempts: Sequence[Sequence[AttemptTrace]]) -> RequestTrace:
    sequences = [
        msgspec.structs.replace(sequence, attempts=tuple(kept))
        for sequence, kept in zip(trace.sequences, attempts, strict=True)
    ]
    return msgspec.structs.replace(trace, sequences=tuple(sequences))
