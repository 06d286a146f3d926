"""The API answers anything soon, in one shape, within bounds, and never with a 5xx.

Bodies come from the OpenAPI document by schemathesis, from changed valid bodies, and from bytes. The document is the
oracle: allowed bodies are answered, forbidden ones refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from baton.services.router.openai.bounds import MAX_CHOICES, MAX_REQUEST_CHOICES
from baton.services.router.openai.field_table.table import ALL_FIELDS
from tests.fuzz.http_app import JSON_TYPE, MAX_BODY_BYTES, VOCAB_SIZE, FuzzedApp, Reply, openapi, validator
from tests.fuzz.http_bodies import BASES, PATHS, nearly_valid, raw, split_body

ALIASES = {field.name for field in ALL_FIELDS if field.target}

pytestmark = pytest.mark.timeout(240)

SCHEMA = schemathesis.openapi.from_dict(openapi())
FEW, SOME, MANY = (
    settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    for examples in (25, 60, 200)
)
NOT_BY_SCHEMA = (  # whether they fit is known by the context, by other fields or by the model's template
    "structured_outputs",
    "response_format",
    "best_of",
    "continue_final_message",
    "documents",
    "enable_thinking",
    "verbosity",
    "function_call",
    "chat_template_kwargs",
    "logprob_token_ids",
    "min_tokens",
    "reasoning",
    "reasoning_effort",
    "reasoning_format",
    "separate_reasoning",
    "thinking_token_budget",
    "tool_choice",
    "truncate_prompt_tokens",
)
BEYOND_THE_SCHEMA = {"context_length_exceeded", "constraint_failed"}

TEXT_PATHS = {
    "/v1/chat/completions/render": "ChatRequest",
    "/tokenize": "TokenizeRequest",
    "/detokenize": "DetokenizeRequest",
}
each_post = pytest.mark.parametrize("path", sorted(PATHS))


@pytest.fixture(scope="module")
def app() -> Iterator[FuzzedApp]:
    opened = FuzzedApp()
    try:
        yield opened
    finally:
        opened.close()


def cases(path: str, mode: GenerationMode) -> st.SearchStrategy[Any]:
    """Bodies that schemathesis generates from the document."""
    return SCHEMA[path]["POST"].as_strategy(generation_mode=mode).map(lambda case: case.body)


def without_conflicts(body: dict[str, Any]) -> dict[str, Any]:
    """The body without conflicts between fields, which a schema cannot express."""
    agreed = {name: value for name, value in body.items() if name not in ALIASES}
    if not agreed.get("stream"):
        agreed.pop("stream_options", None)
    if agreed.get("echo") or not isinstance(agreed.get("logprobs"), bool):
        agreed.pop("top_logprobs", None)
    if not agreed.get("logprobs"):
        agreed.pop("top_logprobs", None)
    if agreed.get("echo"):
        agreed.pop("logprobs", None)
    for name in ("max_tokens", "max_completion_tokens"):
        if agreed.get(name) == 0 and not agreed.get("echo"):
            agreed.pop(name)
    prompt = agreed.get("prompt")
    if isinstance(prompt, list) and not isinstance(prompt[0], int) and len(prompt) > MAX_REQUEST_CHOICES // MAX_CHOICES:
        agreed["prompt"] = prompt[: MAX_REQUEST_CHOICES // MAX_CHOICES]
    for name in NOT_BY_SCHEMA:
        agreed.pop(name, None)
    names = {tool["function"]["name"] for tool in agreed.get("tools") or []}
    agreed["tools"] = [{"type": "function", "function": {"name": name}} for name in sorted(names)] or None
    names = set() if names else {each["name"] for each in agreed.get("functions") or []}
    agreed["functions"] = [{"name": name} for name in sorted(names)] or None
    biases = agreed.get("logit_bias") or {}
    agreed["logit_bias"] = {str(int(key) % VOCAB_SIZE): bias for key, bias in biases.items()}
    return agreed


def says_nothing(reply: Reply) -> bool:
    """A text without tokens is refused; only the tokenizer can tell."""
    return reply.status == 400 and "has no tokens" in reply.error["message"]


def plain(value: Any) -> Any:
    """Converts whole floats: JSON Schema accepts 1.0 as an integer, the API does not."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_answer(app: FuzzedApp, path: str, body: Any) -> Reply:
    """Sends a body and compares the answer with the document."""
    reply = app.post(path, body)
    is_allowed = validator(PATHS[path]).is_valid(body)
    if reply.status == 413:
        assert len(json.dumps(body)) > MAX_BODY_BYTES
        return reply
    if not is_allowed:
        assert reply.status in (400, 404), f"forbidden by the document, but answered {reply.status}: {body}"
    elif reply.status != 200 and not says_nothing(reply) and reply.error["code"] not in BEYOND_THE_SCHEMA:
        again = app.post(path, without_conflicts(body))
        fine = again.status == 200 or says_nothing(again) or again.error["code"] in BEYOND_THE_SCHEMA
        assert fine, f"allowed by the document, but refused: {again.error['message']}"
    assert str(reply.status) in openapi()["paths"][path]["post"]["responses"]
    if reply.status == 200 and reply.headers["content-type"] == "application/json":
        whole = "ChatCompletion" if path == "/v1/chat/completions" else "Completion"
        validator(whole).validate(json.loads(reply.body))
    return reply


@each_post
@FEW
@given(data=st.data())
def test_bodies_that_the_document_allows_are_answered(app: FuzzedApp, path: str, data: st.DataObject):
    body = data.draw(cases(path, GenerationMode.POSITIVE))
    check_answer(app, path, plain(body))


@each_post
@FEW
@given(data=st.data())
def test_bodies_that_the_document_forbids_are_refused(app: FuzzedApp, path: str, data: st.DataObject):
    body = data.draw(cases(path, GenerationMode.NEGATIVE))
    try:
        json.dumps(body)
    except (TypeError, ValueError):
        return  # schemathesis generates bodies outside JSON
    check_answer(app, path, plain(body))


@pytest.mark.parametrize("path", sorted(TEXT_PATHS))
@FEW
@given(data=st.data())
def test_requests_about_text_are_answered_or_refused(app: FuzzedApp, path: str, data: st.DataObject):
    body = data.draw(cases(path, data.draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))))
    try:
        json.dumps(body)
    except (TypeError, ValueError):
        return
    reply = app.post(path, plain(body))
    assert str(reply.status) in openapi()["paths"][path]["post"]["responses"]
    if reply.status == 413:
        assert len(json.dumps(body)) > MAX_BODY_BYTES
        return
    if not validator(TEXT_PATHS[path]).is_valid(plain(body)):
        assert reply.status in (400, 404)
    assert not app.dispatcher.admitted


@each_post
@MANY
@given(data=st.data())
def test_nearly_valid_bodies(app: FuzzedApp, path: str, data: st.DataObject):
    check_answer(app, path, plain(data.draw(nearly_valid(path))))


@each_post
@MANY
@given(data=st.data())
def test_bytes_of_every_kind(app: FuzzedApp, path: str, data: st.DataObject):
    content = data.draw(raw(path))
    reply = app.send("POST", path, data.draw(split_body(content)))
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        assert reply.status in (400, 413)


@each_post
@SOME
@given(data=st.data())
def test_clients_that_disconnect_in_mid_body(app: FuzzedApp, path: str, data: st.DataObject):
    parts = data.draw(split_body(json.dumps(BASES[path]).encode()))
    app.send("POST", path, parts[: data.draw(st.integers(0, len(parts)))], disconnects=True)
    assert not app.dispatcher.finished, "half a request was answered"


HEADER_NAMES = st.sampled_from(
    [
        b"content-type",
        b"content-length",
        b"accept",
        b"authorization",
        b"x-request-id",
        b"last-event-id",
        b"expect",
        b"host",
        b"cookie",
        b"traceparent",
        b"transfer-encoding",
        b"content-encoding",
        b"x",
    ]
)
HEADER_VALUES = st.one_of(
    st.sampled_from(
        [
            b"",
            b"application/json",
            b"application/json; charset=utf-16",
            b"text/plain",
            b"text/event-stream",
            b"*/*",
            b"multipart/form-data",
            b"-1",
            b"99999999999999999999999",
            "²".encode("latin-1"),
            b"\xff\xfe",
            b"a" * 5000,
            b"bytes=0-",
            b"[::",
            b"chatcmpl-1:0.0",
            b"gzip",
            b"Bearer x",
        ]
    ),
    st.binary(max_size=20).map(lambda value: value.translate(None, b"\r\n\0")),
)
PATHS_OF_ANY_KIND = st.one_of(
    st.sampled_from([*openapi()["paths"], "/v1/models/tiny", "/v1/models/a/b", "/v1/requests/x", "/v1/", ""]),
    st.text(max_size=30).map(lambda text: "/" + text),
    st.text(max_size=30).map(lambda text: "/v1/models/" + text),
    st.text(max_size=30).map(lambda text: "/v1/requests/" + text),
    st.just("/" + "a" * 60_000),
)
METHODS = st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "get", "X"])


@MANY
@given(
    method=METHODS,
    path=PATHS_OF_ANY_KIND,
    headers=st.lists(st.tuples(HEADER_NAMES, HEADER_VALUES), max_size=5),
    query=st.binary(max_size=30),
    body=st.sampled_from([b"", b"{}", json.dumps(BASES["/v1/completions"]).encode(), b"x" * 70_000]),
)
def test_methods_paths_and_headers(app: FuzzedApp, method: str, path: str, headers: Any, query: bytes, body: bytes):
    reply = app.send(method, path, [body], headers, query=query)
    declared = openapi()["paths"].get(path, {}).get(method.lower())
    if declared and method.isupper():
        assert str(reply.status) in declared["responses"]


@FEW
@given(
    content_type=st.one_of(
        st.sampled_from(["application/json", "Application/JSON; charset=utf-8", "application/x+json", "text/plain"]),
        st.from_regex(r"\A[a-z/+;= ]{0,30}\Z"),
    )
)
def test_only_json_is_read(app: FuzzedApp, content_type: str):
    body = [json.dumps(BASES["/v1/completions"]).encode()]
    reply = app.send("POST", "/v1/completions", body, [(b"content-type", content_type.encode())])
    media_type = content_type.split(";")[0].strip().lower()
    assert reply.status == (200 if media_type in ("", "application/json") or media_type.endswith("+json") else 415)


def test_the_oracle_notices_lies(app: FuzzedApp):
    """Checks the oracle: a valid body is answered, and each lie about the document is found."""
    assert check_answer(app, "/v1/completions", BASES["/v1/completions"]).status == 200
    with pytest.raises(AssertionError, match="tell"):
        app.check(Reply(500, {}, b"tell"), disconnects=False)
    with pytest.raises(AssertionError):
        app.check(
            Reply(400, {"content-type": "application/json", "x-request-id": "x"}, b'{"error": {}}'), disconnects=False
        )
    assert app.send("POST", "/v1/completions", [b"{}"], [JSON_TYPE]).status == 400
