"""The fields of the chat template, and that a stored call renders the same prompt on any router and any day."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from baton.domain.errors import InvalidRequest
from baton.domain.ids import OwnerId, RequestId
from baton.services.router.openai.request_parser import CHAT, RawRequest, RequestParser
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.openai.validation import RequestMetadata, RequestValidator
from baton.services.router.takeover.stored_call import raw_request_of
from baton.services.router.text.text_model import TextModel
from baton.store.store import CallRecord, CallStatus
from tests.unit.router.text.text_models import byte_level_tokenizer

TEMPLATE = (
    "{{ strftime_now('%d') }}{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}{{ style }}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[now]{% endif %}"
)
TEXT = TextModel(byte_level_tokenizer(), {"bos_token": "b"}, {}, TEMPLATE)
VALIDATOR = RequestValidator(TEXT, "m", 4096, deadline_s=9.0)
FIRST = RequestMetadata(RequestId("call"), created_s=0, seed=1)  # on the first day of 1970
SAID = [{"role": "assistant", "content": "so"}]


def request_of(messages: object = None, **body: Any) -> ValidRequest:
    messages = messages or [{"role": "user", "content": "hi"}]
    return VALIDATOR.chat({"model": "m", "messages": messages, **body}, FIRST)


def prompt(messages: object = None, **body: Any) -> str:
    return TEXT.decode(request_of(messages, **body).prompts[0], skip_special_tokens=False)


def test_template_fields_change_the_prompt():
    assert prompt() == "01[user]hi[now]"
    assert prompt(add_generation_prompt=False) == "01[user]hi"
    assert prompt(chat_template_kwargs={"style": "brief"}) == "01brief[user]hi[now]"
    assert prompt(chat_template_kwargs={"enable_thinking": False}) == prompt(enable_thinking=False)
    assert prompt(enable_thinking=False) == "01quick[user]hi[now]"
    assert prompt(enable_thinking=True) == prompt()
    assert prompt(SAID, continue_final_message=True) == "01[assistant]so"
    assert prompt(SAID, continue_final_message=True, add_generation_prompt=False) == "01[assistant]so"
    assert prompt(SAID) == "01[assistant]so[now]"


def test_documents_are_given_to_a_template_that_reads_them():
    template = "{% for d in documents or [] %}<{{ d.title }}: {{ d.text }}>{% endfor %}{{ messages[0].content }}"
    text = TextModel(byte_level_tokenizer(), {}, {}, template)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    documents = [{"title": "Oslo", "text": "A city."}, {"title": "Rome", "text": "One more."}]
    for given, expected in ((documents, "<Oslo: A city.><Rome: One more.>hi"), ([], "hi"), (None, "hi")):
        request = RequestValidator(text, "m", 4096, deadline_s=9.0).chat({**body, "documents": given}, FIRST)
        assert text.decode(request.prompts[0], skip_special_tokens=False) == expected
    assert prompt(documents=[]) == prompt()


def test_variables_that_the_template_does_not_read_are_named():
    call = request_of(chat_template_kwargs={"style": "x", "thinking": True}, unheard_of=1)
    assert call.unknown_fields == ("unheard_of", "chat_template_kwargs.thinking")
    assert request_of(enable_thinking=True).unknown_fields == ()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True, "messages": SAID}, "continue_final_message"),
        ({"continue_final_message": True, "messages": [{"role": "assistant"}]}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"strftime_now": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(i): 1 for i in range(33)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "y" * 9000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"documents": [{"text": "this template reads none"}]}, "documents"),
        ({"documents": {"text": "x"}}, "documents"),
        ({"documents": ["x"]}, "documents"),
    ],
)
def test_template_fields_are_checked(body: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as refusal:
        request_of(**body)
    assert refusal.value.param == param


def test_a_taken_over_call_renders_the_prompt_of_its_first_day():
    body = {"model": "m", "messages": SAID, "continue_final_message": True, "enable_thinking": False, "max_tokens": 3}
    raw = RawRequest(CHAT, json.dumps(body).encode(), FIRST)
    record = CallRecord(
        raw.metadata.id, OwnerId("first"), 1, CallStatus.OPEN, CHAT, raw.body, "", raw.metadata.created_s, 1, ()
    )
    first = RequestParser(VALIDATOR, TEXT, "")
    other = RequestParser(RequestValidator(TEXT, "m", 4096, deadline_s=9.0), TEXT, "")
    ours = asyncio.run(first.parse(raw)).request
    theirs = asyncio.run(other.parse(raw_request_of(record))).request  # decades later
    assert TEXT.decode(theirs.prompts[0], skip_special_tokens=False) == "01quick[assistant]so"
    assert theirs == ours
