"""Masks of a step's rows: one fold for every path, bounded states, and failures that nobody samples from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.constraint import Constraint, FreePhase, GrammarPhase
from baton.domain.errors import Broken, ConstraintFailed, FailedConstraint
from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.request import EngineRequest, SampledToken, SamplingParams, StopParams
from baton.engine import masks as masks_module
from baton.engine.batch import Batch, Row, SampleSpec
from baton.engine.fake_runner import SLOT_BYTES, FakeRunner
from baton.engine.masks import MaskFiller
from baton.grammar import sources
from baton.grammar.matcher import is_allowed
from baton.kv.memory import PageMemory
from tests import grammars

PAGE_SIZE = 4
LIST = grammars.constraint(sources.json_schema_grammar({"type": "array", "items": {"enum": [1, 22]}, "minItems": 3}))
PROMPT = (11, 12, 13)


def request(constraint: Constraint | None = LIST, name: str = "r", output: tuple[int, ...] = ()) -> EngineRequest:
    id, stop = AttemptId(RequestId(name), 1), StopParams(50, stop_token_ids=LIST.eos)
    sampling = SamplingParams(temperature=0.0)
    return EngineRequest(id, (*PROMPT, *output), len(PROMPT), sampling, stop, constraint=constraint)


def row(of: EngineRequest, history: tuple[int, ...] | None = None) -> Row:
    tokens = of.tokens if history is None else history
    return Row(of.id, tokens, 0, [PageId(page) for page in range(1, 9)], SampleSpec.of(of, tokens))


def new_filler(max_states: int = 8) -> MaskFiller:
    return MaskFiller(grammars.compiler(), max_states)


def bits_of(filler: MaskFiller, of: EngineRequest) -> bytes:
    """The mask of the request's next token."""
    bits = filler.fill([row(of)]).rows[0]
    assert bits is not None
    return bits.tobytes()


def test_masks_follow_the_history_however_it_came() -> None:
    output = grammars.encode("[1,22,1")
    steady, late = new_filler(), new_filler()
    late.prepare(request(output=output[:2]))
    for end in range(len(output) + 1):
        part = request(output=output[:end])
        assert bits_of(steady, part) == bits_of(new_filler(), part)
    assert bits_of(late, request(output=output)) == bits_of(steady, request(output=output))


def test_states_that_were_dropped_are_made_again() -> None:
    filler, output = new_filler(max_states=2), grammars.encode("[1")
    requests = [request(name=str(number), output=output) for number in range(5)]
    for _ in range(2):
        masks = filler.fill([row(each) for each in requests])
        assert len(filler._states) == 2
        assert not masks.failures
        assert len({bits.tobytes() for bits in masks.rows.values() if bits is not None}) == 1


def test_rows_are_counted_among_the_sampled_ones() -> None:
    free, constrained = request(None, "free"), request(name="constrained")
    chunk = replace(row(constrained), sample=None)
    masks = new_filler().fill([chunk, row(free), row(constrained)])
    assert list(masks.rows) == [1]


def test_a_free_phase_needs_no_mask() -> None:
    constraint = Constraint((FreePhase(ends=((5,),)), GrammarPhase(sources.choice_grammar(["yes"]))), eos=LIST.eos)
    filler = new_filler()
    assert filler.fill([row(request(constraint))]).rows == {0: None}
    assert filler.fill([row(request(constraint, output=(9, 5)))]).rows[0] is not None


def test_a_prefix_that_is_not_allowed_fails_the_row() -> None:
    filler, wrong = new_filler(), grammars.encode("no list")
    masks = filler.fill([row(request(output=wrong)), row(request(name="good"))])
    assert masks.failures[0].reason is FailedConstraint.PREFIX
    assert list(masks.failures) == [0]
    assert not filler.fill([row(request(name="good"))]).failures
    with pytest.raises(ConstraintFailed):
        filler.prepare(request(output=wrong))


def test_a_history_that_is_shorter_than_before_is_read_again() -> None:
    """An attempt never loses tokens; a state that is ahead is not trusted."""
    filler = new_filler()
    filler.fill([row(request(output=grammars.encode("[1,")))])
    short = request(output=grammars.encode("["))
    assert bits_of(filler, short) == bits_of(new_filler(), short)


def test_a_row_whose_masks_are_too_slow_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_module, "MASK_BUDGET_S", -1.0)
    masks = new_filler().fill([row(request())])
    assert masks.failures[0].reason is FailedConstraint.TOO_COMPLEX


def drafted_row(of: EngineRequest, drafts: tuple[int, ...], start: int = 0) -> Row:
    plain = row(of)
    drafted = SampleSpec.after_drafts(of, of.tokens, drafts)
    return replace(plain, tokens=(*plain.tokens[start:], *drafts), start=start, drafted=drafted)


def test_each_place_has_the_mask_of_plain_decoding() -> None:
    """And the state stays behind the output, whatever was accepted."""
    output, drafts = grammars.encode("[1,2"), grammars.encode("2,1,22]")
    filler = new_filler()
    for _ in range(2):
        masks = filler.fill([row(request(None)), drafted_row(request(output=output), drafts), row(request(name="b"))])
        assert list(masks.rows) == [*range(1, 3 + len(drafts))]
        assert not masks.failures
        for count in range(len(drafts) + 1):
            bits = masks.rows[1 + count]
            assert bits is not None
            assert bits.tobytes() == bits_of(new_filler(), request(output=(*output, *drafts[:count])))


def test_a_drafted_row_that_fails_leaves_no_place_undecided() -> None:
    """Else its drafts would be constrained rows without a mask, which end the engine."""
    drafts = grammars.encode("1,22")
    masks = new_filler().fill([drafted_row(request(output=grammars.encode("no list")), drafts), row(request(name="b"))])
    assert list(masks.failures) == [0]
    assert list(masks.rows) == [*range(2 + len(drafts))]
    assert masks.rows[1 + len(drafts)] is not None


def test_a_rejected_draft_leaves_no_trace() -> None:
    """The next history is as long as the state would be that had consumed the draft."""
    filler, output = new_filler(), grammars.encode("[1,2")
    filler.fill([drafted_row(request(output=output[:-1]), grammars.encode("1"))])
    assert bits_of(filler, request(output=output)) == bits_of(new_filler(), request(output=output))


def test_a_draft_that_is_not_allowed_ends_what_a_row_may_emit() -> None:
    good, bad = grammars.encode("1,"), grammars.encode("wrong")
    drafted = drafted_row(request(output=grammars.encode("[")), (*good, *bad))
    filler = new_filler()
    masks = filler.fill([drafted])
    assert list(masks.failures) == [len(good) + 1]
    assert list(masks.rows) == [*range(1 + len(good) + len(bad))], "no place is sampled without a decision"
    output = masks.output(Batch((drafted,)), [SampledToken(token) for token in range(len(masks.rows))])
    assert [one.token for one in output.sampled[0]] == [*range(len(good) + 1)]
    assert not output.failures, "the row itself goes on"


def test_a_place_that_bans_leave_empty_ends_what_a_row_may_emit() -> None:
    """Of the only two tokens, one ends a bad word behind the other one."""
    sampling = SamplingParams(temperature=0.0, allowed_token_ids=(3, 4), bad_words=((4,), (3, 3)))
    of = replace(request(None), sampling=sampling)
    drafted = drafted_row(of, (3, 3))
    output = fake(None).run(Batch((drafted,)))
    assert [one.token for one in output.sampled[0]] == [3]
    assert not output.failures
    output = fake(None).run(Batch((row(replace(of, tokens=(*PROMPT, 3))),)))
    assert output.failures[0].reason is FailedConstraint.DEAD_END


def test_a_proposal_is_cut_where_the_constraint_ends_it() -> None:
    filler, part = new_filler(), request(output=grammars.encode("[1"))
    good = grammars.encode(",22")
    assert filler.num_allowed(part, part.tokens, good) == len(good)
    assert filler.num_allowed(part, part.tokens, (*good, *grammars.encode("x"), *good)) == len(good)
    assert filler.num_allowed(part, part.tokens, grammars.encode("x")) == 0
    wrong = request(name="wrong", output=grammars.encode("no list"))
    assert filler.num_allowed(wrong, wrong.tokens, good) == 0, "the step fails it"
    assert bits_of(filler, part) == bits_of(new_filler(), part)


def fake(masks: MaskFiller | None) -> FakeRunner:
    return FakeRunner(PageMemory(16, PAGE_SIZE * SLOT_BYTES), PAGE_SIZE, grammars.VOCAB_SIZE, masks=masks)


def test_a_runner_without_masks_samples_no_constrained_row() -> None:
    with pytest.raises(Broken, match="mask"):
        fake(None).run(Batch((row(request()),)))


def test_the_output_of_a_failed_row_is_dropped() -> None:
    bad, good = request(output=grammars.encode("no list")), request(name="good")
    free = replace(request(None, "free"), tokens=(7, 8))
    pages = [[PageId(3 * number + each) for each in range(3)] for number in range(3)]
    rows = tuple(replace(row(each), pages=pages[index]) for index, each in enumerate((bad, good, free)))
    output = fake(new_filler()).run(Batch(rows))
    assert [not sampled for sampled in output.sampled] == [True, False, False]
    assert list(output.failures) == [0]
    bits = new_filler().fill([row(good)]).rows[0]
    assert bits is not None
    assert len(output.sampled[1]) == 1
    assert is_allowed(bits, output.sampled[1][0].token)
