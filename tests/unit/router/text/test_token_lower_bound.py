"""The lower bound of token counts, and prompts that it refuses before they are tokenised."""

import json
from typing import Any

import pytest

from baton.bundled import MODEL_DIR
from baton.domain.errors import ContextOverflow
from baton.services.router.openai.validation import RequestValidator
from baton.services.router.text.text_model import TextModel
from baton.services.router.text.token_lower_bound import read_token_lower_bound
from tests.unit.router.openai.test_validation import ORIGIN
from tests.unit.router.text import text_models

MAX_MODEL_LEN = 4096
LARGEST_BODY_BYTES = 4 * 1024 * 1024


def bundled_json(**parts: Any) -> dict[str, Any]:
    return {**json.loads((MODEL_DIR / "tokenizer.json").read_text()), **parts}


def test_a_token_covers_at_most_its_own_letters():
    floor = read_token_lower_bound(json.loads(text_models.byte_level_tokenizer().to_str()))
    assert floor is not None
    assert [floor.min_tokens(text) for text in ("", "abc", "abc 12", "ééé")] == [0, 3, 3, 6]


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Split", "behavior": "Removed"}, {"type": "ByteLevel"}],
            }
        },
        {"added_tokens": [{"content": "<x>", "lstrip": True}]},
        {"model": {"type": "Unigram", "vocab": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}}},
    ],
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(parts: dict[str, Any]):
    assert read_token_lower_bound(bundled_json()) is not None
    assert read_token_lower_bound(bundled_json(**parts)) is None


def test_sentencepiece_has_no_bound():
    assert text_models.sentencepiece().min_tokens("hello") == 0


@pytest.mark.parametrize("prompt", ["x" * LARGEST_BODY_BYTES, "Once upon a time " * (LARGEST_BODY_BYTES // 17)])
def test_the_largest_prompt_is_refused_without_being_tokenised(prompt: str, monkeypatch: pytest.MonkeyPatch):
    def never(*_: object, **__: object) -> tuple[int, ...]:
        raise AssertionError("it was tokenised")

    text = text_models.bundled()
    monkeypatch.setattr(TextModel, "encode", never)
    validator = RequestValidator(text, "m", MAX_MODEL_LEN, 60.0)
    with pytest.raises(ContextOverflow, match="the prompt has at least"):
        validator.completion({"model": "m", "prompt": prompt}, ORIGIN)
    messages = [{"role": "user", "content": prompt}]
    with pytest.raises(ContextOverflow, match="the prompt has at least"):
        validator.chat({"model": "m", "messages": messages}, ORIGIN)


def test_a_prompt_that_just_fits_is_tokenised():
    text = text_models.bundled()
    prompt = "Once upon a time " * 200
    num_tokens = len(text.encode(prompt, add_special_tokens=True))
    validator = RequestValidator(text, "m", num_tokens + 1, 60.0)
    assert len(validator.completion({"model": "m", "prompt": prompt, "max_tokens": 1}, ORIGIN).prompts[0]) == num_tokens
