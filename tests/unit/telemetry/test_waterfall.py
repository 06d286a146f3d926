"""The terminal view of a request: golden texts."""

from __future__ import annotations

from baton.domain.errors import Overloaded
from baton.domain.timing.attempt_times import DecodeTimes
from baton.telemetry.request_trace import Outcome
from baton.telemetry.waterfall import waterfall, worker_lines
from tests.unit.telemetry.test_request_timer import DECODE, PREFILL, Run, split_request

SPLIT = """
call-1: finished (stop)  812 prompt 3 out  TTFT 201 ms  E2E 263 ms
router-0  prefill-0 > decode-0  /v1/chat/completions  HTTP 200  tenant acme  x-request-id http-1
read             1.0 ms |#
parse            1.0 ms |#
admit            2.0 ms |#
reserve          6.0 ms | #  2 workers had no room
dispatch         1.0 ms |  #
prefill_queue     40 ms |  ######
prefill          149 ms |        ########################  812 tokens in 2 chunks, 100 ms of steps
~transfer        160 ms |          ~~~~~~~~~~~~~~~~~~~~~~~~~~  31.5 MB in 51 pages, tcp v3, 9.0 ms exposed
emit             1.0 ms |                                #
transfer_tail     29 ms |                                 ####
join             5.0 ms |                                     #
decode            25 ms |                                      ####################  longest gap 49 ms at token 2
finish           3.0 ms |                                                          ##
"""

REFUSED = """
call-1: refused (overloaded)  812 prompt 0 out  E2E 100 ms
router-0  no workers  /v1/chat/completions  HTTP 429  tenant acme  x-request-id http-1
read             1.0 ms |#
parse            1.0 ms | #
admit             98 ms | ###########################################################
"""

WORKERS = """
attempt 1: prefill-0 > decode-0
  prefill   queue 40 ms, 812 tokens in 2 chunks, 100 ms of steps, sealed at 180 ms
  transfer  31.5 MB in 51 pages, tcp v3, 9.0 ms exposed, committed at 210 ms
  decode    2 steps, 20 ms of steps, 5.0 ms waiting
"""


def test_a_split_request():
    trace = split_request().at(0.263).end(Outcome.FINISHED, "stop")
    assert waterfall(trace) == SPLIT.strip().splitlines()


def test_a_refused_request():
    assert waterfall(Run().at(0.1).fail(Overloaded("full"), 429)) == REFUSED.strip().splitlines()


def test_a_replay_is_marked_in_the_decode_bar():
    run = split_request()
    run.sequence(0.9).lost("worker_lost", "decoding")
    run.sequence(1.0).attempt(2, PREFILL, DECODE)
    run.token(1.2)
    run.token(2.0)
    run.sequence(2.0).finish("stop")
    lines = waterfall(run.timer.end(Outcome.FINISHED, "stop"))
    (decode,) = [line for line in lines if line.startswith("decode")]
    assert "########!####" in decode
    assert "longest gap 940 ms at token 4" in decode
    assert lines[-1] == "! 900 ms: attempt 1 on decode-0, decoding: worker_lost"
    assert any("812 tokens in 2 chunks" in line for line in lines)


def test_every_choice_has_a_line():
    run = Run(num_sequences=2)
    run.token(1.0, 0)
    run.sequence(1.0, 0).finish("stop")
    lines = waterfall(run.at(2.0).end(Outcome.FAILED, "broken", 500))
    assert lines[-2:] == ["choice 0: stop, 1 tokens, first token at 1.00 s", "choice 1: unfinished, 0 tokens, no token"]


def test_the_workers_view_of_an_attempt():
    run = split_request()
    run.sequence(0.26).decoded(DecodeTimes(2, 20_000, 5_000, 0, 0))
    attempt = run.timer.end(Outcome.FINISHED, "stop").last_attempt
    assert attempt is not None
    assert worker_lines(attempt) == WORKERS.strip().splitlines()
