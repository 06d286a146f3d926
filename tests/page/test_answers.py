"""What the page makes of answers: reasoning and tools are shown; one that never comes ends, and is asked for again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.page.browser import HeldRequests, Opener, ask, axe_violations, watched_router
from tests.service.cluster.live_router import LiveRouter

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
LATER = "01:00"
"""Of the page's clock: longer than any of its deadlines."""


def stream_of(*deltas: dict[str, Any]) -> str:
    """The body of a streamed chat."""
    reasons = [*[None for _ in deltas[1:]], "tool_calls"]
    choices = [{"index": 0, "delta": delta, "finish_reason": why} for delta, why in zip(deltas, reasons, strict=True)]
    return "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices) + "data: [DONE]\n\n"


def called(index: int, **function: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": function}]}


ANSWER = stream_of(
    {"role": "assistant", "reasoning_content": "Two cities, "},
    {"reasoning_content": "two calls."},
    {"content": "I look it up."},
    called(0, name="get_weather", arguments='{"city":'),
    called(0, arguments=' "Oslo"}'),
    called(1, name="get_weather", arguments='{"city": "Rome"}'),
)


async def test_reasoning_and_tool_calls_are_shown_apart(opened: Opener):
    from playwright.async_api import expect

    page = await opened("#/chat")
    sent: list[Any] = []

    async def answer(route: Any) -> None:
        sent.append(route.request.post_data_json)
        await route.fulfill(body=ANSWER, headers={"content-type": "text/event-stream"})

    await page.route("**/v1/chat/completions", answer)
    await page.get_by_label("Tools, JSON").fill(json.dumps([TOOL]))
    await ask(page, "How is the weather in Oslo and in Rome?")
    shown = page.get_by_label("Answer 1")
    await expect(shown).to_have_attribute("aria-busy", "false")
    assert sent[0]["tools"] == [TOOL]
    await expect(shown.locator(".md")).to_have_text("I look it up.")
    why = shown.locator("details")
    await expect(why).not_to_have_attribute("open", "")  # folded once the answer is there
    await why.locator("summary").click()
    await expect(why).to_contain_text("Two cities, two calls.")
    calls = shown.locator(".call")
    await expect(calls).to_have_text(['get_weather{"city": "Oslo"}', 'get_weather{"city": "Rome"}'])
    assert await axe_violations(page) == []


async def test_a_trace_that_never_comes_is_told_and_asked_for_again(opened: Opener, router: LiveRouter):
    from playwright.async_api import expect

    id = (await router.complete()).headers["x-baton-request-id"]
    page = await opened("#/chat")
    await expect(page.locator("#message")).to_be_visible()
    await page.clock.install()
    held = await HeldRequests.of(page, "**/v1/cluster/requests/*")
    await page.evaluate("(id) => { location.hash = `#/requests/${id}`; }", id)
    await held.wait()
    panel = page.get_by_label("One request")
    await expect(panel).to_contain_text("Reading its stages")
    await page.clock.fast_forward(LATER)
    await expect(panel).to_contain_text("no answer within 20 s")
    await held.let_go()
    await page.clock.fast_forward(LATER)
    await expect(panel.get_by_role("link", name=id)).to_be_visible()


async def test_a_feed_that_is_silent_is_connected_again(opened: Opener):
    """As behind a router whose machine is gone: the connection stays open, and nothing comes."""
    from playwright.async_api import expect

    async with watched_router(opened, num_decode=1) as (_, open_page):
        page = await open_page()
        await expect(page.locator("[data-worker]")).to_have_count(2)
        await page.clock.install()
        held = await HeldRequests.of(page, "**/v1/cluster/events")
        await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # connects at once
        await held.wait()
        await page.clock.fast_forward(LATER)
        await expect(page.get_by_role("status")).to_contain_text("no news")
        await held.let_go()
        await page.clock.fast_forward(LATER)
        await expect(page.locator(".news")).to_have_text("live")
