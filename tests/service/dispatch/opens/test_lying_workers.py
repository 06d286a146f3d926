"""Workers whose answers are of another kind than what was asked: damage, which costs an attempt and no request."""

from __future__ import annotations

import pytest

from baton.domain.errors import LinkBroken
from baton.rpc.gen import common_pb2, decode_pb2, prefill_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.session.session import WORKER_KINDS
from tests.mock_workers import MockWorker
from tests.mocks.lies import Lie
from tests.service.dispatch import dispatch_world
from tests.service.dispatch.dispatch_world import LIMITS, World, scripted, sequence, tokens, two_refreshes, world

pytestmark = pytest.mark.timeout(30)

ROW = pb.StreamMessage(step=pb.StepTokens(rows=[pb.TokenRow(first_index=0, tokens=[3])]))
LAST_ROW = pb.StreamMessage(
    step=pb.StepTokens(rows=[pb.TokenRow(first_index=0, tokens=[3], finish_reason="FINISH_REASON_STOP")])
)
JOINED = pb.StreamMessage(joined=pb.Joined())
SCORES = pb.StreamMessage(scores=common_pb2.PromptScores())
BUSY = pb.StreamMessage(reserve_reply=decode_pb2.ReserveReply(busy=decode_pb2.Busy(retry_after_s=0.01)))
EMPTY_REPLY = pb.StreamMessage(reserve_reply=decode_pb2.ReserveReply())
ACCEPTED = pb.StreamMessage(prefill_event=prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted()))
SEALED = pb.StreamMessage(prefill_event=prefill_pb2.PrefillEvent(sealed=prefill_pb2.Sealed()))
FAILED = pb.StreamMessage(
    prefill_event=prefill_pb2.PrefillEvent(failed=common_pb2.Failure(code="superseded", message="a lie"))
)
EMPTY_EVENT = pb.StreamMessage(prefill_event=prefill_pb2.PrefillEvent())

RESERVE_LIES = ROW, LAST_ROW, JOINED, SCORES, ACCEPTED, SEALED, FAILED, EMPTY_REPLY
PROMPT_LIES = ROW, LAST_ROW, JOINED, SCORES, BUSY, EMPTY_REPLY, EMPTY_EVENT
ATTEMPT_LIES = BUSY, EMPTY_REPLY, ACCEPTED, SEALED, FAILED, EMPTY_EVENT
LIES = [
    *(("decode", "reserve_reply", lie) for lie in RESERVE_LIES),
    *(("prefill", "prefill_event", lie) for lie in PROMPT_LIES),
    *(("decode", "joined", lie) for lie in ATTEMPT_LIES),
]
ONE_OF_EACH = [LIES[0], LIES[len(RESERVE_LIES)], LIES[-1]]


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_world, "uses_sessions", True)


def liar_of(w: World, role: str) -> MockWorker:
    return w.prefill if role == "prefill" else w.decode


def test_each_kind_of_a_worker_is_told_where_it_is_wrong():
    told = {answer.WhichOneof("kind") for _, _, answer in LIES}
    assert told == WORKER_KINDS - {"goodbye", "ended"}, "those fit every stream"


@pytest.mark.parametrize(("role", "kind", "answer"), LIES)
async def test_an_answer_of_another_kind_costs_one_attempt(role: str, kind: str, answer: pb.StreamMessage):
    async with world() as w:
        lie = Lie(kind, answer)
        liar_of(w, role).in_sessions.lies.append(lie)
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert (lie.num_told, w.timings.codes) == (1, [LinkBroken.code])
        assert not w.workers.suspicions.any, "its worker is not lost"


@pytest.mark.parametrize(("role", "kind", "answer"), ONE_OF_EACH)
async def test_a_worker_that_always_lies_ends_its_requests_alone(role: str, kind: str, answer: pb.StreamMessage):
    async with world() as w:
        lies = liar_of(w, role).in_sessions.lies
        lies.append(Lie(kind, answer, times=100))
        with pytest.raises(LinkBroken):
            await w.generate(sequence())
        assert w.timings.codes == [LinkBroken.code] * LIMITS.max_attempts
        lies.clear()
        assert tokens(await w.generate(sequence("next"))) == scripted(5)


@pytest.mark.parametrize(("role", "kind", "answer"), ONE_OF_EACH)
async def test_the_next_attempt_avoids_a_worker_that_lies(role: str, kind: str, answer: pb.StreamMessage):
    async with world(**{role: [(), ()]}) as w:  # type: ignore[arg-type]
        liar, honest = w.cluster.prefills if role == "prefill" else w.cluster.decodes
        await w.cluster.change_load(honest, waiting_tokens=100, running_rows=4)  # second choice
        await two_refreshes(w)
        liar.in_sessions.lies.append(Lie(kind, answer, times=100))
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert [request.id.attempt for request in honest.requests] == [2]
