"""A Chromium and a router with scripted workers for the tests of a file, and pages in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from tests.page.browser import ARGUMENTS, DESKTOP, WAIT_MS, ConsoleRecorder, Opener, chromium_path, missing
from tests.service.cluster.live_router import LiveRouter, live_router


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Any]:
    path = chromium_path()
    try:
        from playwright.async_api import async_playwright, expect
    except ImportError:
        missing("playwright is not installed; run `make install-dev`")
    expect.set_options(timeout=WAIT_MS)
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield launched
        await launched.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def router() -> AsyncIterator[LiveRouter]:
    async with live_router() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def opened(browser: Any, router: LiveRouter) -> AsyncIterator[Opener]:
    """Opens the page; at the end no page may have an error in its console.

    Nothing fades in: what is half transparent has other contrasts.
    """
    contexts, consoles = [], []

    async def open_page(
        hash: str = "", *, url: str = router.url, viewport: Any = DESKTOP, scheme: Any = "light"
    ) -> Any:
        context = await browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
        contexts.append(context)
        page = await context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.console = ConsoleRecorder(page)
        consoles.append(page.console)
        await page.goto(f"{url}/{hash}")
        return page

    yield open_page
    for decode in router.mock.decodes:
        decode.release()  # what a failed test held must not fail the next one
    for context in contexts:
        await context.close()
    assert [console.errors for console in consoles] == [[] for _ in consoles]
