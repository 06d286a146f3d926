"""Garbage on the gRPC servers of both workers: typed errors, no crash, no hang, no page left held."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.errors import Broken, from_code
from baton.domain.ids import AttemptId, RequestId
from baton.engine.turn import IDLE_CHECK_S
from baton.rpc import codec
from baton.rpc.gen import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    handoff_pb2,
    handoff_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from tests.fuzz.grpc_messages import FUZZ, arbitrary_message, corrupted
from tests.fuzz.worker_pair import (
    NUM_PAGES,
    PREFILL_INCARNATION,
    TIMEOUT_S,
    VOCAB_SIZE,
    WorkerPair,
    eventually,
    running_pair,
)

LISTEN_S = 0.03
"""Time to read a stream that may be silent, because it waits for its peer."""
UNHANDLED = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED}
GONE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}

METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in (decode_pb2, handoff_pb2, prefill_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
ID = common_pb2.AttemptId(request_id="r", attempt=1)
SEQUENCE = common_pb2.EngineRequest(
    id=ID,
    tokens=[1, 2, 3, 4],
    num_prompt_tokens=4,
    sampling=common_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0, logit_bias={3: 1.0}),
    stop=common_pb2.StopParams(max_tokens=3, stop_token_ids=[5]),
    salt="s",
)
GOOD: dict[str, Message] = {
    "Reserve": decode_pb2.ReserveRequest(id=ID, num_tokens=4, page_keys=[b"k" * 16], deadline_s=1.0),
    "Generate": decode_pb2.GenerateRequest(
        request=SEQUENCE,
        reservation_id="r/1#1",
        prefill_id="prefill-0",
        prefill_incarnation=PREFILL_INCARNATION,
        deadline_s=1.0,
    ),
    "Abort": common_pb2.AbortRequest(id=ID, reason="because"),
    "Hello": handoff_pb2.HelloRequest(worker_id="d", protocol_version=1, model="fake", transports=["stream"]),
    "Watch": handoff_pb2.WatchRequest(id=ID, incarnation=PREFILL_INCARNATION),
    "OpenExport": handoff_pb2.OpenExportRequest(id=ID, incarnation=PREFILL_INCARNATION, page_keys=[b"k" * 16]),
    "Commit": handoff_pb2.CommitRequest(id=ID, incarnation=PREFILL_INCARNATION),
    "Renew": handoff_pb2.RenewRequest(worker_id="d", incarnation=PREFILL_INCARNATION, ids=[ID, ID]),
    "ReadPages": handoff_pb2.ReadPagesRequest(incarnation=PREFILL_INCARNATION, pages=[0, 1, NUM_PAGES - 1]),
    "PutMedia": prefill_pb2.PutMediaRequest(
        header=prefill_pb2.MediaHeader(identity=b"i" * 16, num_bytes=9, salt="s", processor="p", num_rows=4)
    ),
    "Prefill": prefill_pb2.PrefillRequest(request=SEQUENCE, decode_prefix_len=2, deadline_s=1.0),
}


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPair]:
    with running_pair() as pair:
        yield pair


@pytest.fixture(autouse=True)
def check_unharmed(pair: WorkerPair) -> Iterator[None]:
    """After every test no worker crashed or holds anything, and a valid request is served."""
    yield
    pair.run(pair.check_still_serves())


async def send(pair: WorkerPair, name: str, body: bytes, listen_s: float = LISTEN_S) -> grpc.StatusCode:
    """The status of a call, or OK for a stream that may be silent; checks that the status is typed."""
    method = METHODS[name]
    channel: Any = pair.to_decode if ".Decode/" in name else pair.to_prefill
    code, why = grpc.StatusCode.OK, None
    try:
        if method.client_streaming:
            await channel.stream_unary(name)(iter([body]), timeout=TIMEOUT_S)
        elif method.server_streaming:
            await _listen(channel.unary_stream(name)(body, timeout=TIMEOUT_S), listen_s)
        else:
            await channel.unary_unary(name)(body, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        code, why = error.code(), error.details()
    assert code not in UNHANDLED | GONE, f"{name}: {code}: {why}"
    pair.check_alive()
    return code


async def _listen(call: Any, listen_s: float) -> None:
    try:
        async with asyncio.timeout(listen_s):
            async for _ in call:
                pass
    except TimeoutError:
        call.cancel()


async def check_reply(pair: WorkerPair, name: str, message: Message) -> None:
    """Like `send`; a failure in a reply must have a known code, and never `Broken`."""
    stub = decode_pb2_grpc.DecodeStub(pair.to_decode) if ".Decode/" in name else None
    if name.endswith("/Reserve") and stub is not None:
        reply = await stub.Reserve(message, timeout=TIMEOUT_S)
        if reply.HasField("refused"):
            assert not isinstance(from_code(reply.refused.code, ""), Broken), reply
        if reply.HasField("reserved"):  # no one will claim it
            await stub.Abort(common_pb2.AbortRequest(id=message.id), timeout=TIMEOUT_S)  # type: ignore[attr-defined]
        pair.check_alive()
    else:
        await send(pair, name, message.SerializeToString())


@FUZZ
@given(st.sampled_from(sorted(METHODS)), st.binary(max_size=200))
def test_random_bytes(pair: WorkerPair, name: str, body: bytes) -> None:
    pair.run(send(pair, name, body))


@FUZZ
@given(st.sampled_from(sorted(METHODS)), st.data())
def test_damaged_messages(pair: WorkerPair, name: str, data: st.DataObject) -> None:
    good = GOOD[METHODS[name].name].SerializeToString()
    pair.run(send(pair, name, data.draw(corrupted(good))))


@settings(FUZZ, max_examples=200)
@given(st.sampled_from(sorted(METHODS)), st.data())
def test_arbitrary_values(pair: WorkerPair, name: str, data: st.DataObject) -> None:
    pair.run(check_reply(pair, name, data.draw(arbitrary_message(METHODS[name].input_type))))


@settings(FUZZ, max_examples=100)
@given(st.sampled_from(["Reserve", "Generate", "Prefill", "Renew", "ReadPages"]), st.data())
def test_one_arbitrary_value_in_a_valid_message(pair: WorkerPair, kind: str, data: st.DataObject) -> None:
    """Merges arbitrary fields into a good message, to reach what follows the first check."""
    name = next(name for name in METHODS if name.endswith(f"/{kind}"))
    message = type(GOOD[kind])()
    message.CopyFrom(GOOD[kind])
    wild = data.draw(arbitrary_message(METHODS[name].input_type))
    fields = [field for field, _ in wild.ListFields()]
    kept = data.draw(st.sampled_from(fields)) if fields else None
    for field in fields:
        if field is not kept:
            wild.ClearField(field.name)
    message.MergeFrom(wild)
    message.MergeFrom(_unique_id(message, data.draw(st.integers(0, 2**31))))
    pair.run(check_reply(pair, name, message))


def _unique_id(message: Message, number: int) -> Message:
    """The field that makes the message's id unique; fencing would refuse a repeated id."""
    id = common_pb2.AttemptId(request_id=f"r{number}", attempt=1)
    match message:
        case decode_pb2.ReserveRequest():
            return decode_pb2.ReserveRequest(id=id)
        case decode_pb2.GenerateRequest():
            return decode_pb2.GenerateRequest(request=common_pb2.EngineRequest(id=id))
        case prefill_pb2.PrefillRequest():
            return prefill_pb2.PrefillRequest(request=common_pb2.EngineRequest(id=id))
        case _:
            return type(message)()


@settings(FUZZ, max_examples=60)
@given(st.data())
def test_arbitrary_values_for_a_valid_reservation(pair: WorkerPair, data: st.DataObject) -> None:
    wild: Any = data.draw(arbitrary_message(decode_pb2.GenerateRequest.DESCRIPTOR))

    async def claim() -> None:
        request = pair.next_request()
        reserved = await pair.reserve(request)
        message = pair.generate(request, reserved.reservation_id)
        for field in data.draw(st.sets(st.sampled_from(["deadline_s", "prefill_id", "prefill_incarnation"]))):
            message.ClearField(field)
        message.MergeFrom(wild)
        message.request.id.CopyFrom(codec.encode_id(request.id))
        await send(pair, "/baton.v1.Decode/Generate", message.SerializeToString())
        stub = decode_pb2_grpc.DecodeStub(pair.to_decode)
        await stub.Abort(common_pb2.AbortRequest(id=message.request.id), timeout=TIMEOUT_S)

    pair.run(claim())


REJECTED: list[tuple[str, dict[str, Any]]] = [
    ("a token outside the vocabulary", {"tokens": [VOCAB_SIZE]}),
    ("no token", {"tokens": []}),
    ("a prompt longer than its tokens", {"num_prompt_tokens": 5}),
    ("no prompt", {"num_prompt_tokens": 0}),
    ("nothing to generate", {"stop": common_pb2.StopParams()}),
    ("a stop id outside the vocabulary", {"stop": common_pb2.StopParams(max_tokens=3, stop_token_ids=[2**31])}),
    ("a temperature that is no number", {"sampling": common_pb2.SamplingParams(temperature=float("nan"))}),
    ("a bias outside the vocabulary", {"sampling": common_pb2.SamplingParams(logit_bias={VOCAB_SIZE: 1.0})}),
    ("a bias that is no number", {"sampling": common_pb2.SamplingParams(logit_bias={1: float("inf")})}),
    ("too many logprobs", {"sampling": common_pb2.SamplingParams(logprobs=VOCAB_SIZE + 1)}),
    ("a negative top_k", {"sampling": common_pb2.SamplingParams(top_k=-1)}),
    ("no name", {"id": common_pb2.AttemptId(attempt=1)}),
    ("attempt 0", {"id": common_pb2.AttemptId(request_id="r")}),
    ("a name of a megabyte", {"id": common_pb2.AttemptId(request_id="r" * 1_000_000, attempt=1)}),
    ("a salt of a megabyte", {"salt": "s" * 1_000_000}),
]


def invalid_request(**fields: Any) -> common_pb2.EngineRequest:
    """`SEQUENCE` with other fields."""
    request = common_pb2.EngineRequest()
    request.CopyFrom(SEQUENCE)
    for name in fields:
        request.ClearField(name)
    neutral = common_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0)
    if "sampling" in fields:
        request.sampling.CopyFrom(neutral)
    request.MergeFrom(common_pb2.EngineRequest(**fields))
    return request


@pytest.mark.parametrize(("what", "fields"), REJECTED, ids=[what for what, _ in REJECTED])
def test_an_invalid_request_reaches_no_engine(pair: WorkerPair, what: str, fields: dict[str, Any]) -> None:
    request = invalid_request(**fields)

    async def refusals() -> set[str]:
        prefill = prefill_pb2_grpc.PrefillStub(pair.to_prefill).Prefill(
            prefill_pb2.PrefillRequest(request=request, deadline_s=1.0), timeout=TIMEOUT_S
        )
        generate = decode_pb2_grpc.DecodeStub(pair.to_decode).Generate(
            decode_pb2.GenerateRequest(request=request, reservation_id="p", deadline_s=1.0), timeout=TIMEOUT_S
        )
        return {event.failed.code for call in (prefill, generate) for event in [event async for event in call]}

    assert pair.run(refusals()) == {"invalid_request"}


@pytest.mark.parametrize("deadline_s", [float("nan"), float("inf"), -1.0, 0.0, 1e308, -float("inf")])
def test_impossible_deadlines(pair: WorkerPair, deadline_s: float) -> None:
    """No engine waits for an impossible time, or spins until it comes."""

    async def call() -> None:
        request = pair.next_request()
        message = codec.encode_request(request)
        for name, body in {
            "/baton.v1.Prefill/Prefill": prefill_pb2.PrefillRequest(request=message, deadline_s=deadline_s),
            "/baton.v1.Decode/Reserve": decode_pb2.ReserveRequest(id=message.id, num_tokens=5, deadline_s=deadline_s),
        }.items():
            await send(pair, name, body.SerializeToString())
        await pair.settle()
        reserved = await pair.reserve(other := pair.next_request())
        claim = pair.generate(other, reserved.reservation_id)
        claim.deadline_s = deadline_s
        # Long enough for the engine to go to sleep.
        await send(pair, "/baton.v1.Decode/Generate", claim.SerializeToString(), listen_s=3 * IDLE_CHECK_S)

    pair.run(call())


def test_many_aborts_disturb_no_other_request(pair: WorkerPair) -> None:
    async def storm() -> None:
        strange = [
            stub.Abort(common_pb2.AbortRequest(id=common_pb2.AttemptId(request_id=f"x{n}", attempt=1 + n % 3)))
            for n in range(300)
            for stub in (
                prefill_pb2_grpc.PrefillStub(pair.to_prefill),
                handoff_pb2_grpc.HandoffStub(pair.to_prefill),
                decode_pb2_grpc.DecodeStub(pair.to_decode),
            )
        ]
        request = pair.next_request(max_tokens=12)
        tokens, *_ = await asyncio.gather(pair.serve(request), *strange)
        assert len(tokens) == 12

    pair.run(storm())


def test_aborts_of_a_request_in_every_phase(pair: WorkerPair) -> None:
    async def aborted(delay_s: float) -> None:
        request = pair.next_request(max_tokens=16)
        reserved = await pair.reserve(request)
        message = codec.encode_request(request)
        generate = decode_pb2_grpc.DecodeStub(pair.to_decode).Generate(
            pair.generate(request, reserved.reservation_id), timeout=TIMEOUT_S
        )
        prefill = prefill_pb2_grpc.PrefillStub(pair.to_prefill).Prefill(
            prefill_pb2.PrefillRequest(request=message, deadline_s=10.0), timeout=TIMEOUT_S
        )
        reads = [asyncio.create_task(_read(call)) for call in (prefill, generate)]
        await asyncio.sleep(delay_s)  # some phase of the request, depending on the machine
        abort = common_pb2.AbortRequest(id=message.id, reason="x" * 10_000)
        for stub in (prefill_pb2_grpc.PrefillStub(pair.to_prefill), decode_pb2_grpc.DecodeStub(pair.to_decode)):
            await asyncio.gather(*(stub.Abort(abort, timeout=TIMEOUT_S) for _ in range(10)))
        await asyncio.gather(*reads)

    async def _read(call: Any) -> None:
        async for event in call:
            assert event.failed.code in ("", "cancelled"), event

    for step in range(12):
        pair.run(aborted(step * 0.001))
        pair.run(pair.settle())


def test_watching_unknown_handoffs_leaves_nothing(pair: WorkerPair) -> None:
    async def watch() -> None:
        stub = handoff_pb2_grpc.HandoffStub(pair.to_prefill)
        calls = [
            stub.Watch(
                handoff_pb2.WatchRequest(id=codec.encode_id(id), incarnation=PREFILL_INCARNATION), timeout=TIMEOUT_S
            )
            for id in (AttemptId(RequestId(f"unknown-{n}"), 1) for n in range(200))
        ]
        await eventually(lambda: len(pair.prefill.handoffs) == 200, "all are waiting")
        for call in calls:
            call.cancel()
        await eventually(lambda: len(pair.prefill.handoffs) == 0, "all are forgotten")

    pair.run(watch())
