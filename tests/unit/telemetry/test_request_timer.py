"""The stages of a request add up, whatever stamps came, in whatever order."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import BatonError, Broken, Cancelled, Overloaded, WorkerLost
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.timing.attempt_times import ImportTimes, PrefillTimes
from baton.domain.trace_context import TraceContext
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.telemetry.metrics import REGISTRY
from baton.telemetry.request_timer import RequestOrigin, RequestTimer, outcome_of
from baton.telemetry.request_trace import MAX_ATTEMPTS, MAX_EVENTS, Outcome, RequestTrace, Stage
from baton.telemetry.sequence_timer import SequenceTimer

PREFILL_TIMES = PrefillTimes(40_000, 100_000, 180_000, ((40_000, 512), (90_000, 300)), 812, 0)
IMPORT_TIMES = ImportTimes("stream", "tcp", 50_000, 120_000, 9_000, 210_000, 215_000, 30 << 20, 51, "v3", 0)


def worker(name: str, role: WorkerRole) -> WorkerRecord:
    return WorkerRecord(WorkerId(name), role, Incarnation(7), "host:1", "m", "f", 16, 4096, 1000)


PREFILL, DECODE = worker("prefill-0", WorkerRole.PREFILL), worker("decode-0", WorkerRole.DECODE)


class Run:
    """A timer on a clock that the test sets."""

    def __init__(self, num_sequences: int = 1) -> None:
        self.now = 100.0
        self.traces: list[RequestTrace] = []
        origin = RequestOrigin("/v1/chat/completions", "acme", TraceContext("http-1", "ab" * 16))
        self.timer = RequestTimer(origin, 100.0, "router-0", "m", self._keep, lambda: self.now)
        self.at(0.001).stamp(Stage.READ)
        self.at(0.002).begin("call-1", num_sequences, 812, stream=True)

    def _keep(self, timer: RequestTimer) -> bool:
        self.traces.append(timer.snapshot())
        return False

    def at(self, seconds: float) -> RequestTimer:
        self.now = 100.0 + seconds
        return self.timer

    def sequence(self, seconds: float, index: int = 0) -> SequenceTimer:
        return self.at(seconds).sequences[index]

    def token(self, seconds: float, index: int = 0) -> None:
        self.sequence(seconds, index).token(self.now)


def split_request() -> Run:
    run = Run()
    run.sequence(0.004).stamp(Stage.ADMIT)
    run.sequence(0.010).attempt(1, PREFILL, DECODE, busy_replies=2)
    run.sequence(0.011).dispatched(0.0)
    run.sequence(0.200).sealed(PREFILL_TIMES)
    run.token(0.201)
    run.sequence(0.230).imported(IMPORT_TIMES)
    run.token(0.250)
    run.token(0.260)
    run.sequence(0.260).finish("stop")
    return run


def stages(trace: RequestTrace) -> dict[str, int]:
    return {each.stage.value: each.duration_us for each in trace.stages}


def test_a_split_request_has_every_stage():
    run = split_request()
    trace = run.at(0.263).end(Outcome.FINISHED, "stop")
    assert stages(trace) == {
        "read": 1_000,
        "parse": 1_000,
        "admit": 2_000,
        "reserve": 6_000,
        "dispatch": 1_000,
        "prefill_queue": 40_000,
        "prefill": 149_000,
        "emit": 1_000,
        "transfer_tail": 29_000,
        "join": 5_000,
        "decode": 25_000,
        "finish": 3_000,
    }
    assert (trace.ttft_us, trace.e2e_us) == (201_000, 263_000)
    (sequence,) = trace.sequences
    assert (sequence.max_gap_us, sequence.max_gap_at_token) == (49_000, 2)
    (attempt,) = sequence.attempts
    assert (attempt.path, attempt.prefill, attempt.decode, attempt.busy_replies) == (
        "split",
        "prefill-0",
        "decode-0",
        2,
    )
    assert (attempt.start_us, attempt.reserve_us, attempt.end_us) == (4_000, 6_000, 260_000)
    assert attempt.skew_us == 189_000 - 180_000
    assert (attempt.prefill_times, attempt.import_times) == (PREFILL_TIMES, IMPORT_TIMES)
    assert (trace.id, trace.http_request_id, trace.tenant, trace.output_tokens) == ("call-1", "http-1", "acme", 3)


@pytest.mark.parametrize(
    ("early_s", "queue", "encode"), [(0.0, 10_000, 30_000), (0.004, 6_000, 30_000), (0.025, 0, 15_000), (0.06, 0, 0)]
)
def test_what_prefill_did_before_the_reservation_is_no_stage_of_its_own(early_s, queue, encode):
    """A prompt that starts beside its reservation waits in prefill's queue meanwhile: RESERVE has that time."""
    run = Run()
    run.sequence(0.010).attempt(1, PREFILL, DECODE, busy_replies=0)
    run.sequence(0.011).dispatched(early_s)
    run.sequence(0.200).sealed(replace(PREFILL_TIMES, encode_us=30_000))
    run.token(0.201)
    trace = run.at(0.201).end(Outcome.FINISHED, "stop")
    found = stages(trace)
    assert (found["prefill_queue"], found["encode"]) == (queue, encode)
    assert sum(found.values()) - found.get("finish", 0) == trace.ttft_us == 201_000
    (attempt,) = trace.sequences[0].attempts
    assert (attempt.early_us, attempt.skew_us) == (round(1e6 * early_s), 189_000 + round(1e6 * early_s) - 180_000)


@pytest.mark.parametrize(
    ("encode_us", "queue", "encode"),
    [(30_000, 10_000, 30_000), (40_000, 0, 40_000), (99_000, 0, 40_000), (-5, 40_000, None)],
)
def test_images_cut_the_queue_and_the_stages_still_add_up(encode_us, queue, encode):
    run = Run()
    run.sequence(0.010).attempt(1, PREFILL, DECODE, busy_replies=0)
    run.sequence(0.011).dispatched(0.0)
    run.sequence(0.200).sealed(replace(PREFILL_TIMES, encode_us=encode_us))
    run.token(0.201)
    trace = run.at(0.201).end(Outcome.FINISHED, "stop")
    found = stages(trace)
    assert (found["prefill_queue"], found.get("encode"), found["prefill"]) == (queue, encode, 149_000)
    ends = [part.start_us + part.duration_us for part in trace.stages]
    assert [part.start_us for part in trace.stages] == [0, *ends[:-1]]
    assert sum(found.values()) - found.get("finish", 0) == trace.ttft_us == 201_000


@pytest.mark.parametrize(
    ("encode_s", "early_s", "expected"),
    [
        (0.015, 0.0, [("reserve", 8_000), ("dispatch", 5_000), ("encode", 15_000), ("prefill_queue", 40_000)]),
        (0.028, 0.0, [("reserve", 8_000), ("dispatch", 0), ("encode", 20_000), ("prefill_queue", 40_000)]),
        (0.005, 0.003, [("reserve", 8_000), ("dispatch", 20_000), ("encode", 0), ("prefill_queue", 37_000)]),
        (0.0, 0.0, [("reserve", 8_000), ("dispatch", 20_000), ("prefill_queue", 40_000)]),
    ],
    ids=["behind the reservation", "begun before it", "over before it", "no encode worker"],
)
def test_the_way_over_encode_workers_is_a_stage(encode_s: float, early_s: float, expected: list[tuple[str, int]]):
    run = Run()
    run.sequence(0.010).attempt(1, PREFILL, DECODE, busy_replies=0)
    run.sequence(0.030).dispatched(early_s, encode_s)
    run.sequence(0.200).sealed(PREFILL_TIMES)
    run.token(0.201)
    trace = run.at(0.201).end(Outcome.FINISHED, "stop")
    found = [(part.stage.value, part.duration_us) for part in trace.stages]
    at = found.index(expected[0])
    assert found[at : at + len(expected)] == expected
    ends = [part.start_us + part.duration_us for part in trace.stages]
    assert [part.start_us for part in trace.stages] == [0, *ends[:-1]]
    assert sum(us for name, us in found if name != "finish") == trace.ttft_us == 201_000


def test_images_of_both_kinds_of_workers_are_two_parts():
    """An encode worker has failed on one of two images, and prefill encodes it."""
    run = Run()
    run.sequence(0.010).attempt(1, PREFILL, DECODE, busy_replies=0)
    run.sequence(0.030).dispatched(0.0, 0.015)
    run.sequence(0.200).sealed(replace(PREFILL_TIMES, encode_us=10_000))
    run.token(0.201)
    trace = run.at(0.201).end(Outcome.FINISHED, "stop")
    parts = [(part.start_us, part.duration_us) for part in trace.stages if part.stage is Stage.ENCODE]
    assert parts == [(15_000, 15_000), (60_000, 10_000)]


def test_a_local_request_has_no_prefill_stage_and_adds_up():
    run = Run()
    run.sequence(1.0).stamp(Stage.ADMIT)
    run.sequence(2.0).attempt(1, DECODE, DECODE)
    run.token(5.0)
    run.token(6.0)
    run.sequence(6.0).finish("length")
    trace = run.timer.end(Outcome.FINISHED, "length")
    assert stages(trace) == {
        "read": 1_000, "parse": 1_000, "admit": 998_000, "reserve": 10**6, "emit": 3 * 10**6, "decode": 10**6,
        "finish": 0,
    }  # fmt: skip
    assert trace.sequences[0].attempts[0].path == "local"


def test_an_attempt_lost_before_the_first_token_is_a_stage():
    run = Run()
    run.sequence(1.0).stamp(Stage.ADMIT)
    run.sequence(2.0).attempt(1, PREFILL, DECODE)
    run.sequence(3.0).dispatched(0.0)
    run.sequence(10.0).lost("worker_lost", "prefilling")
    run.sequence(11.0).attempt(2, PREFILL, DECODE)
    run.token(12.0)
    run.sequence(12.0).finish("stop")
    trace = run.timer.end(Outcome.FINISHED, "stop")
    assert {name: us for name, us in stages(trace).items() if us >= 10**6} == {
        "retry": 9 * 10**6, "reserve": 10**6, "emit": 10**6,
    }  # fmt: skip
    first, second = trace.sequences[0].attempts
    assert (first.end_code, first.end_phase, first.end_us) == ("worker_lost", "prefilling", 10 * 10**6)
    assert (second.attempt, second.start_us, second.reserve_us) == (2, 10 * 10**6, 10**6)
    assert [event.kind for event in trace.events] == ["attempt_failed"]


def test_an_attempt_lost_after_the_first_token_is_a_gap():
    run = split_request()
    before = stages(run.timer.snapshot())
    run.sequence(0.3).lost("worker_lost", "decoding")
    run.sequence(0.4).attempt(2, PREFILL, DECODE)
    run.sequence(0.5).imported(IMPORT_TIMES)
    after = stages(run.timer.snapshot())
    assert {name: us for name, us in after.items() if name not in {"decode", "finish"}} == {
        name: us for name, us in before.items() if name not in {"decode", "finish"}
    }
    run.token(0.7)
    assert run.timer.snapshot().sequences[0].max_gap_us == 440_000


@pytest.mark.parametrize(
    ("last", "stage"),
    [(None, "admit"), (Stage.ADMIT, "reserve"), (Stage.RESERVE, "dispatch"), (Stage.DISPATCH, "prefill")],
)
def test_a_request_without_a_token_ends_in_its_current_stage(last: Stage | None, stage: str):
    run = Run()
    if last is not None:
        run.sequence(1.0).stamp(last)
    trace = run.at(4.0).fail(Cancelled("gone"), 499, client_gone=True)
    assert trace.ttft_us is None
    assert list(stages(trace))[-1] == stage
    assert sum(stages(trace).values()) == trace.e2e_us == 4 * 10**6
    assert (trace.outcome, trace.code, trace.client_gone) == (Outcome.CANCELLED, "cancelled", True)


def test_a_refused_body_has_a_trace_of_one_stage():
    timer = RequestTimer(RequestOrigin("/v1/completions"), 0.0, clock=lambda: 2.0)
    trace = timer.fail(Overloaded("full"), 429)
    assert stages(trace) == {"read": 2 * 10**6}
    assert (trace.outcome, trace.n, trace.sequences) == (Outcome.REFUSED, 0, ())


def test_the_first_end_counts():
    run = split_request()
    first = run.at(0.3).end(Outcome.FINISHED, "stop")
    assert run.at(9.0).fail(WorkerLost("late"), 500) is first
    assert run.traces == [first]


def test_stages_of_several_choices_are_those_of_the_first_token():
    run = Run(num_sequences=2)
    for index, first in enumerate((5.0, 3.0)):
        run.sequence(1.0, index).stamp(Stage.ADMIT)
        run.token(first, index)
        run.sequence(first, index).finish("stop")
    trace = run.at(8.0).end(Outcome.FINISHED, "stop")
    assert trace.ttft_us == 3 * 10**6
    assert stages(trace)["finish"] == 5 * 10**6
    assert [sequence.first_token_us for sequence in trace.sequences] == [5 * 10**6, 3 * 10**6]


def test_attempts_and_events_of_a_trace_are_bounded():
    run = Run()
    for number in range(1, 50):
        run.sequence(number).attempt(number, PREFILL, DECODE)
        run.sequence(number).lost("link_broken", "prefilling")
    trace = run.timer.snapshot()
    assert (len(trace.sequences[0].attempts), trace.sequences[0].num_attempts) == (MAX_ATTEMPTS, 49)
    assert trace.sequences[0].attempts[-1].attempt == 49
    assert len(trace.events) == MAX_EVENTS


times = st.floats(0.0, 1e6, allow_nan=False)
STEPS = ("admit", "attempt", "dispatch", "sealed", "imported", "token", "lost", "finish")


@given(steps=st.lists(st.tuples(st.sampled_from(STEPS), times), max_size=30), end=times, finished=st.booleans())
def test_stages_add_up_to_ttft_and_e2e_exactly(steps: list[tuple[str, float]], end: float, finished: bool):
    run, now = Run(), 0.0
    for step, at in sorted(steps, key=lambda one: one[1]):
        now = max(now, at)
        sequence = run.sequence(now)
        match step:
            case "admit":
                sequence.stamp(Stage.ADMIT)
            case "attempt":
                sequence.attempt(1, PREFILL, DECODE)
            case "dispatch":
                sequence.dispatched(0.0)
            case "sealed":
                sequence.sealed(PREFILL_TIMES)
            case "imported":
                sequence.imported(IMPORT_TIMES)
            case "token":
                run.token(now)
            case "lost":
                sequence.lost("worker_lost", "decoding")
            case "finish":
                sequence.finish("stop")
    trace = run.at(now + end).end(Outcome.FINISHED if finished else Outcome.FAILED, "x")
    durations = stages(trace)
    assert min(durations.values()) >= 0
    assert sum(durations.values()) == trace.e2e_us
    assert [each.start_us for each in trace.stages] == [
        sum(each.duration_us for each in trace.stages[:i]) for i in range(len(trace.stages))
    ]
    if trace.ttft_us is not None:
        names = list(durations)
        assert sum(durations[name] for name in names[: names.index("emit") + 1]) == trace.ttft_us


def test_every_latency_is_recorded_once():
    def sample(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    def state() -> list[float]:
        return [
            sample("baton_ttft_seconds_sum", path="split"),
            sample("baton_e2e_seconds_sum", path="split"),
            sample("baton_itl_seconds_count", path="split"),
            sample("baton_itl_seconds_sum", path="split"),
            sample("baton_first_itl_seconds_sum", path="split"),
            sample("baton_request_stage_seconds_sum", stage="prefill"),
            sample("baton_requests_total", outcome="finished", code="stop"),
        ]

    before = state()
    run = split_request()
    run.timer.end(Outcome.FINISHED, "stop")
    run.timer.end(Outcome.FINISHED, "stop")
    grown = [after - earlier for after, earlier in zip(state(), before, strict=True)]
    assert grown == pytest.approx([0.201, 0.260, 2, 0.059, 0.049, 0.149, 1])


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [
        (Overloaded("x"), Outcome.REFUSED, "overloaded"),
        (Cancelled("x"), Outcome.CANCELLED, "cancelled"),
        (asyncio.CancelledError(), Outcome.CANCELLED, "cancelled"),
        (WorkerLost("x"), Outcome.FAILED, "worker_lost"),
        (Broken("x"), Outcome.FAILED, "broken"),
        (ValueError("x"), Outcome.FAILED, "broken"),
    ],
)
def test_an_error_has_an_outcome_and_a_code(error: BatonError, outcome: Outcome, code: str):
    assert outcome_of(error) == (outcome, code)


def test_an_ended_request_is_freed_without_garbage_collection():
    timer = RequestTimer(RequestOrigin("/v1/completions"), 100.0, clock=lambda: 101.0)
    timer.begin("call-1", 2, 812, stream=True)
    freed = weakref.ref(timer), weakref.ref(timer.sequences[0])
    assert len(timer.end(Outcome.FINISHED, "stop").sequences) == 2
    assert timer.snapshot().n == 2
    gc.disable()
    try:
        del timer
        assert [each() for each in freed] == [None, None]
    finally:
        gc.enable()
