"""A prompt is a function of messages, template and frozen options: no clock, no time zone, no other process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from baton.domain.errors import InvalidRequest
from baton.services.router.text.chat_template import END_OF_FINAL_MESSAGE, ChatTemplate, RenderOptions
from tests.unit.router.text.text_models import TEMPLATE, bundled

HELLO = [{"role": "user", "content": "hello"}]
BEFORE_MIDNIGHT = 1_798_761_599  # 2026-12-31 23:59:59 UTC
DATED = (
    "{% macro today() %}{{ strftime_now('%Y-%m-%d %H:%M') }}{% endmacro %}"
    "{{ today() }}{% for m in messages %}{{ strftime_now('|%d') }}{% endfor %}"
)


@pytest.fixture(params=["Pacific/Kiritimati", "America/Los_Angeles", "UTC"])
def time_zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


def test_a_template_reads_the_date_of_the_call(time_zone: str):
    template = ChatTemplate(DATED, {})
    assert template.render(HELLO, RenderOptions(BEFORE_MIDNIGHT)) == "2026-12-31 23:59|31"
    assert template.render(HELLO, RenderOptions(BEFORE_MIDNIGHT + 1)) == "2027-01-01 00:00|01"


def test_variables_reach_the_template_and_cannot_replace_its_own():
    template = ChatTemplate("{{ bos }}{{ mood | default('calm') }}{{ messages | length }}", {"bos": "<s>"})
    assert template.render(HELLO, RenderOptions(variables={"mood": "wild"})) == "<s>wild1"
    assert template.render(HELLO, RenderOptions()) == "<s>calm1"
    assert template.render(HELLO, RenderOptions(variables={"bos": "x", "messages": []})) == "<s>calm1"
    assert (template.reads("mood"), template.reads("temper")) == (True, False)
    names = ("messages", "tools", "strftime_now", "bos", "add_generation_prompt")
    assert [name for name in names if template.may_set(name)] == []
    assert template.may_set("mood")


@pytest.mark.parametrize(
    "content", ["so far", "ends with space ", "<|im_end|>", "}{", f"has {END_OF_FINAL_MESSAGE} in it"]
)
def test_a_continued_message_ends_the_prompt(content: str):
    messages = [*HELLO, {"role": "assistant", "content": content}]
    options = RenderOptions(add_generation_prompt=False, continue_final_message=True)
    prompt = bundled().render_chat(messages, options)
    whole = bundled().render_chat(messages, RenderOptions(add_generation_prompt=False))
    assert prompt.endswith(content)
    assert whole.startswith(prompt)
    assert whole.removeprefix(prompt) == "<|im_end|>\n"


def test_a_template_that_drops_the_final_message_cannot_continue_it():
    template = ChatTemplate("{{ messages[0].content }}", {})
    options = RenderOptions(add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="does not keep the final message"):
        template.render([*HELLO, {"role": "assistant", "content": "so"}], options)
    kept = ChatTemplate(TEMPLATE, {"bos_token": "<s>"})
    assert kept.render([{"role": "assistant", "content": "so"}], options) == "<s>[assistant] so"
