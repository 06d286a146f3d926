"""Constrained output of the cluster is that of a loop that masks the model's logits, token for token."""

from __future__ import annotations

import itertools
import json
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest

from baton.grammar import sources
from baton.grammar.tool_calls import structural_tag_grammar, tool_calls_grammar
from baton.services.router.text.parsers.base import ToolCall, joined_calls
from baton.services.router.text.parsers.registry import TOOL_FORMATS
from baton.transfer.nixl_agent import nixl_available
from tests import grammars
from tests.cluster import Cluster, Process, completion_tokens
from tests.exactness.constrained_reference import ConstrainedReference, Draw
from tests.lateness import met
from tests.stream_client import ResumableCall, ask, resume, tokens
from tests.tiny_models import add_tokenizer, save_random_model

pytestmark = [pytest.mark.exactness, pytest.mark.integration]

PAGES, CHUNKS = {"page-size": 8}, {"token-budget": 24}
MAX_TOKENS = 48
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "def"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 20}
LARK = 'start: expr\nexpr: NUMBER (OP NUMBER)*\nNUMBER: /[0-9]{1,4}/\nOP: "+" | "-"'
GBNF = 'root ::= pair ("," pair)*\npair ::= [a-d]{1,4} ":" [0-9]{1,3}'
TAG: dict[str, Any] = {"structures": [{"begin": "<f>", "schema": LIST, "end": "</f>"}], "triggers": ["<f"]}
CALLS = {
    name: tool_calls_grammar({"put": {**PERSON, "required": ["name"]}}, TOOL_FORMATS[name].markup, {}, most=2)
    for name in ("qwen3_coder", "pythonic")
}
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
        sources.json_schema_grammar(PERSON),
    ),
    "list": ({"guided_json": json.dumps(LIST)}, sources.json_schema_grammar(LIST)),
    "object": ({"response_format": {"type": "json_object"}}, sources.json_object_grammar()),
    "regex": ({"structured_outputs": {"regex": "[a-f]{3,9}-[0-9]{4}"}}, sources.regex_grammar("[a-f]{3,9}-[0-9]{4}")),
    "lark": ({"guided_grammar": LARK}, sources.grammar_text(LARK)),
    "gbnf": ({"structured_outputs": {"grammar": GBNF}}, sources.grammar_text(GBNF)),
    "tag": ({"structured_outputs": {"structural_tag": TAG}}, structural_tag_grammar(TAG["structures"], ["<f"], {})),
    **{
        name: ({"structured_outputs": {"grammar": grammar}}, sources.grammar_text(grammar))
        for name, grammar in CALLS.items()
    },
    "choice": (
        {"guided_choice": ["first", "second one", "third"]},
        sources.choice_grammar(["first", "second one", "third"]),
    ),
}
DRAWS = {
    "greedy": Draw(),
    "sampled": Draw(temperature=1.0, seed=5),
    "penalties": Draw(temperature=0.8, seed=6, frequency_penalty=0.7, repetition_penalty=1.3),
    "filters": Draw(temperature=0.9, seed=8, top_k=60, top_p=0.9, min_p=0.02, presence_penalty=0.4),
    "min tokens": Draw(temperature=0.7, seed=7, min_tokens=9),
}


def prompt_of(seed: int, num_tokens: int = 37) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(9, grammars.VOCAB_SIZE) for _ in range(num_tokens)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: without its mask it would write no JSON."""
    return add_tokenizer(save_random_model("qwen3", tmp_path_factory.mktemp("model") / "qwen3"))


@pytest.fixture(scope="module")
def reference(model: Path) -> ConstrainedReference:
    return ConstrainedReference(model)


@pytest.fixture(scope="module", params=["stream"] if nixl_available() else ["nixl", "stream"])
def cluster(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        tmp_path_factory.mktemp("constrained"),
        model=str(model),
        transport=request.param,
        flags=PAGES,
        prefill_flags=CHUNKS,
    ) as cluster:
        yield cluster


def answer(cluster: Cluster, prompt: list[int], form: str, draw: Draw, **more: Any) -> dict[str, Any]:
    fields = {**FORMS[form][0], **draw.parameters(), "max_tokens": MAX_TOKENS, "return_token_ids": True, **more}
    return cluster.complete(prompt, **fields)


def draws_of(form: str, transport: str) -> list[str]:
    """Every draw over the stream. Over NIXL one: transports move pages, and each form and each draw is there once."""
    draws = list(DRAWS)
    return draws if transport == "stream" else [draws[list(FORMS).index(form) % len(draws)]]


@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_every_form(form: str, cluster: Cluster, reference: ConstrainedReference) -> None:
    """Twice: the second prompt comes from the prefix caches."""
    for draw in draws_of(form, cluster.transport):
        prompt = prompt_of(len(form) + len(draw))
        expected, _ = reference.generate(FORMS[form][1], prompt, MAX_TOKENS, DRAWS[draw])
        moved = cluster.bytes_moved
        for _ in range(2):
            assert completion_tokens(answer(cluster, prompt, form, DRAWS[draw])) == expected, draw
        assert cluster.bytes_moved > moved, draw


FREE = {
    "temperature": Draw(temperature=1.3, seed=11),
    "top-k": Draw(temperature=0.9, seed=12, top_k=20),
    "top-p": Draw(temperature=1.0, seed=13, top_p=0.6),
    "min-p": Draw(temperature=1.1, seed=14, min_p=0.2),
    "all": Draw(0.8, 15, 0.5, 0.3, 1.2, top_k=100, top_p=0.95, min_p=0.01),
}


@pytest.mark.parametrize("draw", FREE)
def test_sampled_tokens_are_predicted(draw: str, cluster: Cluster, reference: ConstrainedReference) -> None:
    """Without a form: the noise, the filters and the penalties are written out a second time in the reference."""
    prompt = prompt_of(len(draw) + 60)
    expected, logprobs = reference.generate(None, prompt, MAX_TOKENS, FREE[draw])
    fields = {**FREE[draw].parameters(), "max_tokens": MAX_TOKENS, "return_token_ids": True, "logprobs": 0}
    body = cluster.complete(prompt, **fields)
    assert completion_tokens(body) == expected
    assert body["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)


def test_choices_with_their_raw_logprobs(cluster: Cluster, reference: ConstrainedReference) -> None:
    prompt, draw = prompt_of(20), DRAWS["sampled"]
    body = answer(cluster, prompt, "schema", draw, n=3, logprobs=2)
    for choice in range(3):
        seeded = Draw(temperature=draw.temperature, seed=draw.seed + choice)
        expected, logprobs = reference.generate(FORMS["schema"][1], prompt, MAX_TOKENS, seeded)
        assert completion_tokens(body, choice) == expected
        assert body["choices"][choice]["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)


def test_complete_answers_of_a_random_model_validate(cluster: Cluster) -> None:
    """Many at once; those that were cut are only a prefix of a valid text."""
    fields = {**FORMS["schema"][0], "max_tokens": 200, "temperature": 1.2}

    def run(seed: int) -> dict[str, Any]:
        choice: dict[str, Any] = cluster.complete(prompt_of(seed, 9), **fields, seed=seed)["choices"][0]
        return choice

    with ThreadPoolExecutor(12) as pool:
        choices = list(pool.map(run, range(36)))
    done = [choice for choice in choices if choice["finish_reason"] == "stop"]
    assert len(done) >= 18
    for choice in done:
        jsonschema_rs.validate(PERSON, json.loads(choice["text"]))


def test_required_calls_of_a_random_model_keep_to_their_schemas(cluster: Cluster) -> None:
    """Whole and streamed by the SDK: the same calls, of declared tools, with valid arguments."""
    parameters: dict[str, dict[str, Any]] = {
        "person": PERSON,
        "list": {"type": "object", "properties": {"all": LIST}, "required": ["all"]},
    }
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in parameters.items()
    ]
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    num_calls = 0
    for seed in range(6):
        body: Any = {"model": cluster.model_name, "messages": [{"role": "user", "content": "call"}], "tools": tools}
        body |= {"tool_choice": "required", "max_tokens": 400, "temperature": 1.0, "seed": seed}
        choice = client.chat.completions.create(**body).choices[0]
        whole = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        streamed, finish = list[ToolCall](), None
        for event in client.chat.completions.create(**body, stream=True):
            for part in event.choices[0].delta.tool_calls or []:
                streamed.append(ToolCall(part.index, part.function.name or "", part.function.arguments or ""))
            finish = event.choices[0].finish_reason
        assert [(call.name, call.arguments) for call in joined_calls(streamed)] == whole
        assert (finish, choice.message.content or "") == (choice.finish_reason, "")
        assert finish in ("tool_calls", "length")
        assert len(streamed) > len(whole), "arguments come in parts"
        whole = whole if finish == "tool_calls" else whole[:-1]  # the last one may be cut
        num_calls += len(whole)
        for name, arguments in whole:
            jsonschema_rs.validate(parameters[name], json.loads(arguments))
    assert num_calls >= 3


def test_ignored_eos_does_not_extend_a_complete_text(cluster: Cluster) -> None:
    body = answer(cluster, prompt_of(3), "choice", Draw(), ignore_eos=True)["choices"][0]
    assert body["finish_reason"] == "stop"
    assert body["text"] in ("first", "second one", "third")


def test_forced_preemption(model: Path, reference: ConstrainedReference, tmp_path: Path) -> None:
    """Local prompts, too: decode masks the first token itself."""
    prompts = [prompt_of(seed, 20) for seed in range(6)]
    draw = Draw(temperature=1.0, seed=3)
    expected = [reference.generate(FORMS["list"][1], prompt, 60, draw)[0] for prompt in prompts]
    tight = {"num-pages": 34, "max-rows": 8, "token-budget": 24}
    with (
        Cluster(tmp_path, model=str(model), num_prefill=0, flags=PAGES, decode_flags=tight) as cluster,
        ThreadPoolExecutor(6) as pool,
    ):
        answers = list(pool.map(lambda prompt: answer(cluster, prompt, "list", draw, max_tokens=60), prompts))
        met(cluster.metric("decode-0", "baton_preemptions_total"), "more rows than the pool has room for")
        assert cluster.metric("decode-0", "baton_mask_seconds_count") > 20
    assert [completion_tokens(body) for body in answers] == expected


def _killed(process: Process) -> None:
    process.expected_running = False
    process.signal(signal.SIGKILL)


def long_call(model_name: str) -> dict[str, Any]:
    """A streamed chat that has to call a tool, with long arguments."""
    numbers = {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 80, "maxItems": 80}
    schema = {"type": "object", "properties": {"all": numbers}, "required": ["all"]}
    return {
        "model": model_name,
        "messages": [{"role": "user", "content": "call"}],
        "tools": [{"type": "function", "function": {"name": "list", "parameters": schema}}],
        "tool_choice": {"type": "function", "function": {"name": "list"}},
        "max_tokens": 500,
        "temperature": 1.0,
        "seed": 4,
        "stream": True,
        "return_token_ids": True,
    }


def test_kills_in_the_middle_of_a_grammar(model: Path, reference: ConstrainedReference, tmp_path: Path) -> None:
    """A decode worker that drafts dies, then a prefill worker, then the router: tokens and form stay, and so does a
    call of a tool beside them.
    """
    grammar, prompt, draw = FORMS["list"][1], prompt_of(5, 30), Draw(temperature=1.0, seed=9)
    expected, _ = reference.generate(grammar, prompt, 90, draw)
    assert len(expected) > 30
    with Cluster(
        tmp_path,
        model=str(model),
        num_prefill=2,
        num_decode=2,
        num_routers=2,
        flags=PAGES,
        prefill_flags=CHUNKS,
        decode_flags={"drafter": "ngram"},
    ) as cluster:
        body = {"model": cluster.model_name, "prompt": prompt, "max_tokens": 90, "stream": True}
        body |= {**FORMS["list"][0], **draw.parameters(), "return_token_ids": True}
        router, calling = cluster.router_urls()[1], long_call(cluster.model_name)
        with ask(router, calling) as events:
            whole = list(events)
        assert len(json.loads("".join(event.arguments for event in whole))["all"]) == 80
        with ask(router, body) as events, ask(router, calling) as of_call:
            seen, called = list(itertools.islice(events, 8)), list(itertools.islice(of_call, 40))
            assert any(event.arguments for event in called)
            for name in ("decode-0", "prefill-0", "router-1"):
                _killed(cluster.processes[name])
                if name != "router-1":
                    seen += itertools.islice(events, 8)
                    called += itertools.islice(of_call, 8)
        with resume(cluster.url, seen[-1]) as events, resume(cluster.url, called[-1]) as of_call:
            seen += events
            called += of_call
        assert [token for token in tokens(seen) if token is not None] == expected
        assert [(event.token, event.arguments) for event in called] == [(one.token, one.arguments) for one in whole]
        again = ResumableCall(cluster.router_urls, body)
        assert [token for token in again.run(60.0) if token is not None] == expected
        assert cluster.metric("decode-1", "baton_draft_tokens_total") > 0
