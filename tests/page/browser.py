"""A headless Chromium: Debian's, as `scripts/fetch_chromium.sh` puts it into .venv, or the one on PATH.

Without it tests are skipped, but not in continuous integration, where they fail.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.service.cluster.live_router import LiveRouter, live_router

ROOT = Path(__file__).resolve().parents[2]
AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8")
ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
DESKTOP = {"width": 1280, "height": 900}
WAIT_MS = 30_000
Opener = Callable[..., Awaitable[Any]]
"""Opens the page in a tab of its own."""


def chromium_path() -> str:
    """Chromium's path; skips the test without one, and fails it in continuous integration."""
    own = ROOT / ".venv" / "chromium" / "chromium"
    found = str(own) if own.exists() else shutil.which("chromium")
    if found is None:
        missing("there is no Chromium; run `make chromium`")
    assert found is not None
    return found


def missing(why: str) -> None:
    """Ends the test: skipped, or failed where nothing may be skipped."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


class ConsoleRecorder:
    """What a page says in its console that nobody wanted, violations of the content policy included."""

    def __init__(self, page: Any) -> None:
        self._errors: list[str] = []
        self._forgiven: list[str] = []
        page.on("console", lambda message: self._on_message(message.type, message.text))
        page.on("pageerror", lambda error: self._errors.append(str(error)))

    @property
    def errors(self) -> list[str]:
        """All but those that were forgiven."""
        return [error for error in self._errors if not any(words in error for words in self._forgiven)]

    def _on_message(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self._errors.append(text)

    def forgive(self, words: str) -> None:
        """Errors with these words, before and after, are those that a test provokes. Call it first: a test that fails
        because it waited in vain must not be final for what it did not come to forgive."""
        self._forgiven.append(words)


class HeldRequests:
    """Requests of a page that get no answer until `let_go`; later ones pass."""

    def __init__(self) -> None:
        self._routes: list[Any] = []
        self._is_asked = asyncio.Event()
        self._are_held = True

    @classmethod
    async def of(cls, page: Any, pattern: str) -> HeldRequests:
        """From now on. `pattern`: of addresses, as in Playwright."""
        held = cls()
        await page.route(pattern, held._on_request)
        return held

    async def wait(self) -> None:
        """Returns when the page has asked."""
        await asyncio.wait_for(self._is_asked.wait(), WAIT_MS / 1000)

    async def let_go(self) -> None:
        """Answers those that are not given up, and all that come."""
        self._are_held = False
        for route in self._routes:
            await route.continue_()

    async def _on_request(self, route: Any) -> None:
        if not self._are_held:
            await route.continue_()
            return
        self._routes.append(route)
        self._is_asked.set()


@asynccontextmanager
async def watched_router(opened: Opener, **options: Any) -> AsyncIterator[tuple[LiveRouter, Opener]]:
    """A router of a test's own, and what opens its page. Pages leave it before it ends: one that finds its router gone
    says so in the console, sooner or later."""
    async with live_router(**options) as own:
        pages: list[Any] = []

        async def open_page(hash: str = "", *, url: str = own.url, **more: Any) -> Any:
            pages.append(await opened(hash, url=url, **more))
            return pages[-1]

        try:
            yield own, open_page
        finally:
            for page in pages:
                await page.goto("about:blank")


RUN_AXE = """async () => {
    const root = document.getElementById("app"), isStale = () => Boolean(root.querySelector(".stale"));
    let wasStale = isStale();
    const watcher = new MutationObserver(() => { wasStale ||= isStale(); });
    watcher.observe(root, { subtree: true, childList: true, attributes: true, attributeFilter: ["class"] });
    const { violations } = await axe.run(document, { resultTypes: ["violations"] });
    watcher.disconnect();
    return { violations, wasStale };
}"""


async def axe_violations(page: Any) -> list[str]:
    """Rule and place of each accessibility violation that axe-core finds in the page as it is now.

    A page without news for some seconds is pale on purpose, and has other contrasts: it is looked at once more.
    """
    await page.evaluate(AXE)
    found = await page.evaluate(RUN_AXE)
    while found["violations"] and found["wasStale"]:
        found = await page.evaluate(RUN_AXE)
    return [
        f"{each['id']}: {node['target']} {node['failureSummary']}"
        for each in found["violations"]
        for node in each["nodes"]
    ]


async def ask(page: Any, text: str, max_tokens: int = 8) -> None:
    """Sends a question from the page's chat."""
    await page.get_by_label("Max tokens").fill(str(max_tokens))
    await page.locator("#message").fill(text)
    await page.keyboard.press("Enter")
