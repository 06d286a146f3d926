"""How the tests of the page wait: what is late, what was seen, and what held requests and forgiven errors are."""

from __future__ import annotations

import pytest

from tests.lateness import is_late
from tests.page.browser import RUN_AXE, HeldRequests, Opener, axe_violations
from tests.service.cluster.live_router import LiveRouter

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

GO_PALE = "document.querySelector('#app > div').classList.add('stale')"
RECOVER = "void setTimeout(() => document.querySelector('#app > div').classList.remove('stale'), 300)"


async def test_only_a_page_that_was_waited_for_is_late(opened: Opener, router: LiveRouter):
    from playwright.async_api import TimeoutError as PageTimeout
    from playwright.async_api import expect

    page = await opened()
    await expect(page.locator("[data-worker]")).to_have_count(3)
    with pytest.raises(AssertionError) as waited:
        await expect(page.locator("#nothing")).to_be_visible(timeout=1)
    with pytest.raises(AssertionError) as has_other:
        await expect(page.locator("[data-worker]")).to_have_count(2, timeout=1)
    with pytest.raises(PageTimeout) as unclicked:
        await page.locator("#nothing").click(timeout=1)
    assert all(map(is_late, (waited.value, has_other.value, unclicked.value)))
    with pytest.raises(AssertionError) as ambiguous:
        await expect(page.locator("[data-worker]")).to_be_visible()
    with pytest.raises(AssertionError) as seen:
        assert await page.locator("[data-worker]").count() == 2
    assert not any(map(is_late, (ambiguous.value, seen.value)))


async def test_held_requests_wait_and_later_ones_pass(opened: Opener, router: LiveRouter):
    from playwright.async_api import expect

    page = await opened()
    held = await HeldRequests.of(page, "**/v1/models")
    await page.evaluate("window.done = []")
    for number in (1, 2):
        await page.evaluate("(number) => void fetch('v1/models').then(() => done.push(number))", number)
    await held.wait()
    assert await page.evaluate("done") == []
    await held.let_go()
    await page.wait_for_function("done.length === 2")
    assert await page.evaluate("fetch('v1/models').then((answer) => answer.status)") == 200
    await expect(page.locator(".news")).to_have_text("live")


async def test_what_is_forgiven_is_so_before_and_after(opened: Opener, router: LiveRouter):
    page = await opened()
    for number in (1, 2):
        await page.evaluate("(number) => console.error(`wanted ${number}`)", number)
        page.console.forgive("wanted")
    assert page.console.errors == []
    await page.evaluate("console.error('not so')")
    assert page.console.errors == ["not so"]
    page.console.forgive("not so")


async def test_a_page_that_was_pale_is_looked_at_once_more(opened: Opener, router: LiveRouter):
    from playwright.async_api import expect

    page = await opened()
    await expect(page.locator("[data-worker]")).to_have_count(3)
    assert await axe_violations(page) == []
    await page.evaluate(GO_PALE)
    pale = await page.evaluate(RUN_AXE)
    assert ([each["id"] for each in pale["violations"]], pale["wasStale"]) == (["color-contrast"], True)
    await page.evaluate(RECOVER)
    assert await axe_violations(page) == []
