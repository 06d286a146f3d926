"""Fields as vLLM defines them: scores of prompts, allowed tokens, bad words, truncation."""

from functools import partial

import pytest

from baton.domain.errors import ContextOverflow, InvalidRequest
from baton.services.router.openai import validation
from tests.unit.router.openai.test_validation import MODEL_LEN, chat, completion
from tests.unit.router.text.text_models import bundled


def test_scores_of_a_request_are_bounded(monkeypatch: pytest.MonkeyPatch):
    """Tokens of all prompts, times what is scored at each place; the first choice of a prompt asks."""
    monkeypatch.setattr(validation, "MAX_PROMPT_SCORES", 21 * 40)
    body = {"prompt": [[5] * 20] * 2, "max_tokens": 1, "prompt_logprobs": 20}
    assert [sequence.prompt_logprobs for sequence in completion(**body, n=2).sequences] == [20, None] * 2
    with pytest.raises(InvalidRequest, match="prompt_logprobs: asks for 20"):
        completion(**{**body, "prompt": [[5] * 20] * 3})
    with pytest.raises(InvalidRequest, match="logprobs: asks for 20"):
        completion(prompt=[[5] * 41], max_tokens=1, logprobs=20, echo=True)


def test_an_echo_alone_runs_only_if_it_is_scored():
    body = {"prompt": [5, 6], "max_tokens": 0, "echo": True}
    assert completion(**body).sequences == ()
    scored = completion(**body, logprobs=3)
    assert [(one.stop.max_tokens, one.prompt_logprobs) for one in scored.sequences] == [(1, 3)]
    assert scored.drops_output
    with pytest.raises(ContextOverflow):
        completion(prompt=[5] * MODEL_LEN, max_tokens=0, echo=True, logprobs=3)


def test_only_allowed_tokens_and_no_bad_words():
    """vLLM's rule: a word, and the word behind a space if that is as many tokens with another first one."""
    [sequence] = chat(allowed_token_ids=[9, 5, 9], bad_words=["  cat", "unbelievable"]).sequences
    assert sequence.sampling.allowed_token_ids == (5, 9)
    encode = partial(bundled().encode, add_special_tokens=False)
    words = [encode("cat"), encode(" cat"), encode("unbelievable"), encode(" unbelievable")]
    kept = [words[0], *([words[1]] if len(words[1]) == len(words[0]) else []), words[2]]
    kept += [words[3]] if len(words[3]) == len(words[2]) and words[3][0] != words[2][0] else []
    assert list(sequence.sampling.bad_words) == kept


def test_logprobs_of_named_tokens():
    named = {"logprob_token_ids": [9, 5, 9]}
    for sequence in (*chat(logprobs=True, **named).sequences, *completion(prompt=[5], logprobs=3, **named).sequences):
        assert sequence.sampling.logprob_token_ids == (9, 5)
    for refused in ({}, {"logprobs": 1, "echo": True}):
        with pytest.raises(InvalidRequest, match="logprob_token_ids"):
            completion(prompt=[5], **named, **refused)


@pytest.mark.parametrize("num_kept", [-1, 5])
def test_prompts_are_cut_to_a_number_of_tokens(num_kept: int):
    """By default on the left; -1 keeps what the context leaves beside the answer."""
    ids = list(range(9, 9 + 2 * MODEL_LEN))
    left = completion(prompt=ids, max_tokens=10, truncate_prompt_tokens=num_kept, echo=True)
    right = completion(prompt=ids, max_tokens=10, truncate_prompt_tokens=num_kept, truncation_side="right")
    kept = MODEL_LEN - 10 if num_kept < 0 else num_kept
    assert left.prompts == (tuple(ids[-kept:]),)
    assert right.prompts == (tuple(ids[:kept]),)
    assert left.echoes == (bundled().decode(ids[-kept:], skip_special_tokens=True),)
    assert completion(prompt=ids[:3], truncate_prompt_tokens=num_kept).prompts == (tuple(ids[:3]),)
    long = "once upon a time " * MODEL_LEN
    assert len(chat(messages=[{"role": "user", "content": long}], truncate_prompt_tokens=4).prompts[0]) == 4


@pytest.mark.parametrize("wrong", [0, -2, MODEL_LEN - 9, "5", True])
def test_more_tokens_than_the_context_leaves_are_refused(wrong: object):
    with pytest.raises(InvalidRequest) as refusal:
        completion(max_tokens=10, truncate_prompt_tokens=wrong)
    assert refusal.value.param == "truncate_prompt_tokens"
