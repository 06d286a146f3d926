"""Future tokens: their position is known, they are not, and rows that need them on the host are found."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from baton.domain.constraint import Constraint, GrammarPhase
from baton.domain.errors import Broken
from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.request import SamplingParams, StopParams
from baton.engine.batch import Batch, Row, SampleSpec
from baton.engine.overlap.device_tokens import fill_futures
from baton.engine.overlap.future import UNREAD_TOKEN, FutureToken, UnreadHistory, needs_known_tokens
from baton.model.sampling.distribution import changes_logits
from tests.tiny_workers import engine_request


def test_reading_the_last_token_raises_and_its_position_is_known():
    tokens = [5, 6]
    history = UnreadHistory(tokens)
    tokens.append(7)  # the scheduler goes on
    assert len(history) == 3
    assert list(history[:2]) == [5, 6]
    assert history[-2] == 6
    assert list(history.known) == [5, 6]
    for read in (lambda: history[2], lambda: history[-1], lambda: history[1:], lambda: list(history)):
        with pytest.raises(Broken, match="before the step that samples it has ended"):
            read()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(logit_bias=((3, 1.0),)),
        SamplingParams(allowed_token_ids=(1,)),
        SamplingParams(bad_words=((1, 2),)),
        SamplingParams(logprobs=0),
    ],
)
def test_rows_that_the_host_helps_to_sample_need_known_tokens(sampling: SamplingParams):
    request = dataclasses.replace(engine_request("r", [1]), sampling=sampling)
    assert needs_known_tokens(request, 3)


def test_rows_that_only_the_device_samples_do_not():
    sampling = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3)
    request = dataclasses.replace(engine_request("r", [1]), sampling=sampling)
    assert not needs_known_tokens(request, 3)
    assert not changes_logits(sampling, frozenset())


def test_a_stop_id_that_is_banned_yet_needs_the_host():
    request = engine_request("r", [1], stop=StopParams(9, min_tokens=2, stop_token_ids=frozenset({1})))
    assert [needs_known_tokens(request, count) for count in (1, 2)] == [True, False]


def test_a_constraint_needs_the_host():
    constraint = Constraint((GrammarPhase("start: /a/"),))
    assert needs_known_tokens(dataclasses.replace(engine_request("r", [1]), constraint=constraint), 1)


def test_every_field_of_sampling_was_considered():
    """A new field is either for the device alone, or `needs_known_tokens` has to know it."""
    device = {"temperature", "top_k", "top_p", "min_p", "seed"}
    listed_only = {"logprob_token_ids"}  # changes nothing without `logprobs`
    host = {
        "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "allowed_token_ids",
        "bad_words",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(SamplingParams)} == device | host | listed_only


def make_row(name: str, tokens: tuple[int, ...], *, sampled: bool = True, future: int | None = None) -> Row:
    spec = SampleSpec(SamplingParams(), tokens, 1) if sampled else None
    link = None if future is None else FutureToken(future)
    return Row(AttemptId(RequestId(name), 1), tokens, 0, [PageId(0)], spec, future=link)


def test_future_tokens_are_taken_from_the_samples_of_their_rows():
    before = Batch((make_row("chunk", (1, 2), sampled=False), make_row("a", (3,)), make_row("b", (4,))))
    rows = (make_row("b", (UNREAD_TOKEN,), future=2), make_row("new", (8, 9)), make_row("a", (UNREAD_TOKEN,), future=1))
    ids = torch.tensor([UNREAD_TOKEN, 8, 9, UNREAD_TOKEN])
    fill_futures(ids, rows, (before, torch.tensor([30, 40])))
    assert ids.tolist() == [40, 8, 9, 30]


@pytest.mark.parametrize("before", [None, Batch((make_row("a", (1,), sampled=False),)), Batch((make_row("b", (1,)),))])
def test_a_token_that_the_step_before_did_not_sample_raises(before: Batch | None):
    rows = (make_row("a", (UNREAD_TOKEN,), future=0),)
    with pytest.raises(Broken, match="does not sample its token"):
        fill_futures(torch.tensor([UNREAD_TOKEN]), rows, None if before is None else (before, torch.tensor([1])))
