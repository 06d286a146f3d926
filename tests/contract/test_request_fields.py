"""Every request field of OpenAI, vLLM, SGLang and llama-server is honoured, refused or harmless."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as openai_completions
from openai.types.chat import completion_create_params as openai_chats
from tokenizers.processors import TemplateProcessing

from baton.domain.errors import InvalidRequest
from baton.domain.ids import RequestId
from baton.services.router.openai.field_table.field import FieldEndpoint, FieldKind, RequestField
from baton.services.router.openai.field_table.table import FIELDS
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.openai.validation import RequestMetadata, RequestValidator
from baton.services.router.text.text_model import TextModel
from tests.unit.router.text.text_models import byte_level_tokenizer

LISTS = Path(__file__).parent / "fields"
NAMES = {"chat": FieldEndpoint.CHAT, "completion": FieldEndpoint.COMPLETION}
TEMPLATE = (
    "{# <think> #}{{ enable_thinking }}{{ mood }}{{ documents }}{{ verbosity }}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOKENIZER = byte_level_tokenizer(("<think>", "</think>", "<begin>"))
TOKENIZER.post_processor = TemplateProcessing(
    "<begin> $A", special_tokens=[("<begin>", TOKENIZER.token_to_id("<begin>"))]
)
TEXT = TextModel(TOKENIZER, {}, {"eos_token_id": 5}, TEMPLATE)
VALIDATOR = RequestValidator(TEXT, "m", max_model_len=4096, deadline_s=1.0)
METADATA = RequestMetadata(RequestId("call"), created_s=1, seed=5, tenant="red")
NEEDED: dict[FieldEndpoint, dict[str, Any]] = {
    FieldEndpoint.CHAT: {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    FieldEndpoint.COMPLETION: {"model": "m", "prompt": "hello"},
}
NO_EFFECT_ALONE = {"model", "best_of"}
"""Required, or equal to n."""

OTHER_VALUES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "goodbye"}],
    "prompt": [5, 6],
    "temperature": 1.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1.5,
    "repeat_penalty": 1.5,
    "logit_bias": {"5": 1},
    "seed": 9,
    "n": 2,
    "n_cmpl": 2,
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "n_predict": 3,
    "min_tokens": 1,
    "min_new_tokens": 1,
    "stop": "x",
    "stop_token_ids": [7],
    "prompt_logprobs": 2,
    "allowed_token_ids": [5, 6],
    "logprob_token_ids": [5, 6],
    "bad_words": ["hell"],
    "truncate_prompt_tokens": 1,
    "truncation_side": "right",
    "priority": 2,
    "cache_salt": "s",
    "prompt_cache_key": "k",
    "extra_key": "s",
    "skip_special_tokens": False,
    "reasoning_effort": "none",
    "reasoning": {"enabled": False},
    "reasoning_format": "none",
    "thinking_token_budget": 7,
    "thinking_budget_tokens": 7,
    "reasoning_budget_tokens": 7,
    "chat_template_kwargs": {"mood": "wild"},
    "verbosity": "low",
    "documents": [{"title": "Oslo", "text": "A city."}],
    "tools": [{"type": "function", "function": {"name": "add"}}],
    "tool_choice": "required",
    "functions": [{"name": "add"}],
    "function_call": "none",
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "a"',
    "guided_whitespace_pattern": "[ ]?",
    "regex": "a+",
    "ebnf": 'root ::= "a"',
    "json_schema": '{"type": "object"}',
    "grammar": 'root ::= "a"',
}
COMPANIONS: dict[tuple[FieldEndpoint, str], dict[str, Any]] = {
    (FieldEndpoint.CHAT, "continue_final_message"): {
        "messages": [{"role": "assistant", "content": "so"}],
        "add_generation_prompt": False,
    },
    (FieldEndpoint.CHAT, "top_logprobs"): {"logprobs": True},
    (FieldEndpoint.CHAT, "tool_choice"): {"tools": [{"type": "function", "function": {"name": "add"}}]},
    (FieldEndpoint.CHAT, "function_call"): {"functions": [{"name": "add"}]},
    (FieldEndpoint.CHAT, "parallel_tool_calls"): {"tools": [{"type": "function", "function": {"name": "add"}}]},
    (FieldEndpoint.CHAT, "guided_whitespace_pattern"): {"guided_json": {"type": "object"}},
    (FieldEndpoint.COMPLETION, "guided_whitespace_pattern"): {"guided_json": {"type": "object"}},
    (FieldEndpoint.CHAT, "truncation_side"): {"truncate_prompt_tokens": 1},
    (FieldEndpoint.COMPLETION, "truncation_side"): {"truncate_prompt_tokens": 1},
    (FieldEndpoint.CHAT, "logprob_token_ids"): {"logprobs": True},
    (FieldEndpoint.COMPLETION, "logprob_token_ids"): {"logprobs": 1},
    (FieldEndpoint.CHAT, "stream_options"): {"stream": True},
    (FieldEndpoint.COMPLETION, "stream_options"): {"stream": True},
}
SPECIAL: dict[tuple[FieldEndpoint, str], Any] = {
    (FieldEndpoint.CHAT, "top_logprobs"): 2,
    (FieldEndpoint.COMPLETION, "logprobs"): 2,
    (FieldEndpoint.CHAT, "stream_options"): {"include_usage": True},
    (FieldEndpoint.COMPLETION, "stream_options"): {"include_usage": True},
}


def listed(server: str) -> Iterator[tuple[FieldEndpoint, str]]:
    """The pinned names of another server."""
    for line in (LISTS / f"{server}.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, *endpoints = line.split()
            yield from ((NAMES[endpoint], name) for endpoint in endpoints)


def of_openai() -> Iterator[tuple[FieldEndpoint, str]]:
    """The names in the types of the installed SDK, which are generated from OpenAI's specification."""
    for endpoint, module in ((FieldEndpoint.CHAT, openai_chats), (FieldEndpoint.COMPLETION, openai_completions)):
        for kind in (module.CompletionCreateParamsNonStreaming, module.CompletionCreateParamsStreaming):
            yield from ((endpoint, name) for name in get_type_hints(kind))


def parse(endpoint: FieldEndpoint, body: dict[str, Any]) -> ValidRequest:
    validate = VALIDATOR.chat if endpoint is FieldEndpoint.CHAT else VALIDATOR.completion
    return validate(body, METADATA)


UNION = {
    "openai": sorted(set(of_openai()), key=repr),
    **{server: list(listed(server)) for server in ("vllm", "sglang", "llama_server")},
}


@pytest.mark.parametrize("server", UNION)
def test_every_field_of_a_server_has_a_row(server: str):
    names = UNION[server]
    assert len(names) > 50
    assert [(endpoint.name, name) for endpoint, name in names if name not in FIELDS[endpoint]] == []


def rows(*kinds: FieldKind) -> list[Any]:
    found = [(endpoint, field) for endpoint, table in FIELDS.items() for field in table.values() if field.kind in kinds]
    return [pytest.param(endpoint, field, id=f"{endpoint.name}-{field.name}") for endpoint, field in found]


@pytest.mark.parametrize(("endpoint", "field"), rows(FieldKind.REFUSED))
def test_a_refused_field_is_named(endpoint: FieldEndpoint, field: RequestField):
    base = parse(endpoint, NEEDED[endpoint])
    for value in (None, *field.neutral):
        assert parse(endpoint, {**NEEDED[endpoint], field.name: value}) == base
    for value in ({"any": "thing"}, ["x"], "x", 77, 0.125):
        with pytest.raises(InvalidRequest) as refusal:
            parse(endpoint, {**NEEDED[endpoint], field.name: value})
        assert refusal.value.param == field.name
        assert str(refusal.value).startswith(f"{field.name}: is not")


@pytest.mark.parametrize(("endpoint", "field"), rows(FieldKind.HONOURED, FieldKind.ALIAS))
def test_an_honoured_field_has_an_effect(endpoint: FieldEndpoint, field: RequestField):
    if field.name in NO_EFFECT_ALONE:
        with pytest.raises(InvalidRequest):
            parse(endpoint, {**NEEDED[endpoint], field.name: {"type": "no such"}})
        return
    companions = COMPANIONS.get((endpoint, field.name), {})
    value = SPECIAL.get((endpoint, field.name), OTHER_VALUES.get(field.name, field.default is not True))
    without = parse(endpoint, {**NEEDED[endpoint], **companions})
    assert parse(endpoint, {**NEEDED[endpoint], **companions, field.name: value}) != without


@pytest.mark.parametrize(("endpoint", "field"), rows(FieldKind.HARMLESS))
def test_a_harmless_field_changes_nothing(endpoint: FieldEndpoint, field: RequestField):
    base, refused = parse(endpoint, NEEDED[endpoint]), set()
    for value in ("x", True, {"a": 1}, 5, ["x"]):
        try:
            assert parse(endpoint, {**NEEDED[endpoint], field.name: value}) == base
        except InvalidRequest as refusal:
            refused.add((type(value), refusal.param))
    assert len(refused) == 4
    assert {param for _, param in refused} == {field.name}


def test_a_default_in_the_table_is_what_an_absent_field_means():
    for endpoint, table in FIELDS.items():
        base = parse(endpoint, NEEDED[endpoint])
        for name, field in table.items():
            if field.default is not None and field.kind is FieldKind.HONOURED and name != "top_logprobs":
                assert parse(endpoint, {**NEEDED[endpoint], name: field.default}) == base, name


def test_another_name_agrees_with_its_target():
    body = NEEDED[FieldEndpoint.CHAT]
    assert parse(FieldEndpoint.CHAT, {**body, "n_predict": 3}) == parse(FieldEndpoint.CHAT, {**body, "max_tokens": 3})
    assert parse(FieldEndpoint.CHAT, {**body, "n_predict": 3, "max_tokens": 3}) == parse(
        FieldEndpoint.CHAT, {**body, "max_tokens": 3}
    )
    assert parse(FieldEndpoint.CHAT, {**body, "n_predict": -1}) == parse(FieldEndpoint.CHAT, body)
    with pytest.raises(InvalidRequest, match="n_predict: contradicts max_tokens"):
        parse(FieldEndpoint.CHAT, {**body, "n_predict": 3, "max_tokens": 4})
    with pytest.raises(InvalidRequest, match="return_token_ids: must be a boolean"):
        parse(FieldEndpoint.CHAT, {**body, "return_tokens": True, "return_token_ids": 1})


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex: cannot be combined with guided_json"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex: cannot be combined with response_format"),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]}, "guided_choice: cannot be combined with"),
        ({"structured_outputs": "a", "guided_regex": "a"}, "structured_outputs: must be an object"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern: needs a form"),
        ({"guided_choice": []}, "guided_choice: "),
        ({"grammar": "", "json_schema": "{"}, "json_schema: "),
        ({"n_cmpl": 2, "best_of": 3}, "best_of: must equal n_cmpl"),
        ({"min_new_tokens": 5, "n_predict": 3}, "min_new_tokens: must not be over n_predict"),
        ({"thinking_budget_tokens": 5, "separate_reasoning": False}, "thinking_budget_tokens: cannot be combined"),
    ],
)
def test_errors_of_another_name_have_that_name(fields: dict[str, Any], start: str):
    with pytest.raises(InvalidRequest) as refusal:
        parse(FieldEndpoint.CHAT, {**NEEDED[FieldEndpoint.CHAT], **fields})
    assert str(refusal.value).startswith(start)
    assert refusal.value.param == start.partition(":")[0]


def test_an_open_number_of_tokens_fills_the_context():
    """llama-server's -1; a completion has 16 tokens otherwise."""
    [prompt] = parse(FieldEndpoint.COMPLETION, NEEDED[FieldEndpoint.COMPLETION]).prompts
    for fields, expected in (
        ({}, 16),
        ({"n_predict": -1}, 4096 - len(prompt)),
        ({"n_predict": -1, "max_tokens": 3}, 3),
    ):
        [sequence] = parse(FieldEndpoint.COMPLETION, {**NEEDED[FieldEndpoint.COMPLETION], **fields}).sequences
        assert sequence.stop.max_tokens == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", "none"),
        ("metadata", {"a": "b"}),
        ("store", True),
        ("parallel_tool_calls", False),
        ("add_generation_prompt", False),
        ("separate_reasoning", False),
        ("stream_reasoning", False),
        ("enable_thinking", False),
        ("reasoning", {"enabled": False}),
        ("reasoning", {"effort": "none"}),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_a_completion_may_have_fields_of_chats_that_ask_for_nothing(name: str, value: object):
    body = NEEDED[FieldEndpoint.COMPLETION]
    assert parse(FieldEndpoint.COMPLETION, {**body, name: value}) == parse(FieldEndpoint.COMPLETION, body)


def test_a_refusal_sends_nobody_to_an_endpoint_that_refuses_too():
    table = FIELDS[FieldEndpoint.COMPLETION]
    assert table["modalities"].meaning == FIELDS[FieldEndpoint.CHAT]["modalities"].meaning
    assert table["tools"].meaning == "is not a field of /v1/completions, but of /v1/chat/completions"


def test_true_is_not_a_neutral_number():
    for name, value in (("mirostat", False), ("use_beam_search", 0), ("length_penalty", True)):
        with pytest.raises(InvalidRequest):
            parse(FieldEndpoint.CHAT, {**NEEDED[FieldEndpoint.CHAT], name: value})
