"""A headless Chromium: Debian's, as `scripts/fetch_chromium.sh` puts it into .venv, or the one on PATH.

Without it tests are skipped, but not in continuous integration, where they fail.
"""

from __future__ import annotations

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
WAIT_MS = 15_000
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
        self.errors: list[str] = []
        page.on("console", lambda message: self._on_message(message.type, message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _on_message(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.errors.append(text)

    def forgive(self, words: str) -> None:
        """Takes out errors with these words: those that a test provokes."""
        self.errors = [error for error in self.errors if words not in error]


@asynccontextmanager
async def watched_router(opened: Opener, **options: Any) -> AsyncIterator[tuple[LiveRouter, Opener]]:
    """A router of a test's own, and what opens its page. Pages leave it before it ends: one that finds its router gone
    says so in the console, sooner or later."""
    async with live_router(**options) as own:
        pages: list[Any] = []

        async def open_page(hash: str = "", *, url: str = own.url, **more: Any) -> Any:
            pages.append(await opened(hash, url=url, **more))
            return pages[-1]

        yield own, open_page
        for page in pages:
            await page.goto("about:blank")


async def axe_violations(page: Any) -> list[str]:
    """Rule and place of each accessibility violation that axe-core finds in the page as it is now."""
    await page.evaluate(AXE)
    found = await page.evaluate("async () => (await axe.run(document, {resultTypes: ['violations']})).violations")
    return [f"{each['id']}: {node['target']} {node['failureSummary']}" for each in found for node in each["nodes"]]


async def ask(page: Any, text: str, max_tokens: int = 8) -> None:
    """Sends a question from the page's chat."""
    await page.get_by_label("Max tokens").fill(str(max_tokens))
    await page.locator("#message").fill(text)
    await page.keyboard.press("Enter")
