"""What a reader of a steady stream sends back: a message a quarter of a second, and no pings."""

from __future__ import annotations

from baton.rpc.gen import session_pb2 as pb
from baton.session.session import ROUTER_KINDS, WORKER_KINDS, MessageSession, SessionLimits
from baton.session.tags import ConnectionKeys

KEYS = ConnectionKeys(sent=b"s" * 32, received=b"r" * 32)
STEP_S = 0.004
NUM_STEPS = 1000


def test_a_steady_stream_is_answered_by_few_frames_and_without_pings():
    worker, router = (MessageSession(5, kinds, SessionLimits(), 0.0) for kinds in (ROUTER_KINDS, WORKER_KINDS))
    worker.connected(KEYS, 0, 0.0)
    router.connected(KEYS.reversed(), 0, 0.0)
    answers: list[pb.Frame] = []
    retained = 0
    for step in range(NUM_STEPS):
        now = step * STEP_S
        worker.post_row(pb.TokenRow(stream=1, first_index=step, tokens=[7]))
        frame = worker.take(now)
        assert frame is not None
        assert not pb.Frame.FromString(frame.body).ping
        (message,) = router.receive(frame, now)
        assert message.step.rows[0].first_index == step
        retained = max(retained, worker.outbox.retained_bytes)
        while router.has_work(now):
            answer = router.take(now)
            assert answer is not None
            assert worker.receive(answer, now) == []
            answers.append(pb.Frame.FromString(answer.body))
    assert not any(frame.ping or frame.pong for frame in answers)
    assert len(answers) <= NUM_STEPS * STEP_S * 4 + 2
    assert worker.outbox.last_seq - answers[-1].ack <= 0.25 / STEP_S + 1, "the newest frames wait for the next ack"
    assert retained < 4096
