"""Images in the page's chat, in a real Chromium: what is taken, what is left out, and what is sent."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from baton.domain.media.identity import media_identity
from tests.page.browser import Opener, ask, axe_violations, watched_router
from tests.service.cluster.live_router import LiveRouter, live_router
from tests.unit.router.vision.pictures import coloured
from tests.unit.router.vision.vision_models import load_vision_model, save_vision_model

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

DROP = """([name, type, data, kind, selector, texts]) => {
    const transfer = new DataTransfer();
    for (const [kind, text] of Object.entries(texts)) transfer.setData(kind, text);
    if (name) transfer.items.add(new File([Uint8Array.from(atob(data), (each) => each.charCodeAt(0))], name, { type }));
    const options = { bubbles: true, cancelable: true };
    const event = kind === "paste"
        ? new ClipboardEvent(kind, { ...options, clipboardData: transfer })
        : new DragEvent(kind, { ...options, dataTransfer: transfer });
    document.querySelector(selector).dispatchEvent(event);
    return event.defaultPrevented;
}"""


HOLD_READS = """() => {
    const own = FileReader.prototype.readAsDataURL;
    window.reads = [];
    FileReader.prototype.readAsDataURL = function (file) {
        const isRead = new Promise((done) => this.addEventListener("loadend", () => done()));
        reads.push(() => { own.call(this, file); return isRead; });
    };
}"""
"""Files are read by `READ` only."""
READ = "() => { for (const read of reads.splice(0)) read(); }"
DROP_MANY = """([count, size]) => {
    const transfer = new DataTransfer(), bytes = new Uint8Array(size);
    for (let at = 0; at < count; at += 1) transfer.items.add(new File([bytes], `${at}.png`, { type: "image/png" }));
    const event = new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: transfer });
    document.querySelector(".messages").dispatchEvent(event);
    return reads.length;
}"""


async def give(
    page: Any,
    kind: str,
    name: str,
    file: bytes = b"",
    type: str = "image/png",
    *,
    place: str = "",
    texts: dict[str, str] | None = None,
) -> bool:
    """Pastes or drops a file, unless `name` is empty, and texts as a browser would. True if the page took them.

    `place`: CSS selector of what it is dropped on; default: the field for pasting, the messages for others.
    """
    place = place or ("#message" if kind == "paste" else ".messages")
    arguments = [name, type, base64.b64encode(file).decode(), kind, place, texts or {}]
    return bool(await page.evaluate(DROP, arguments))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def image_router(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveRouter]:
    folder = tmp_path_factory.mktemp("vision")
    save_vision_model(folder)
    text, images = load_vision_model(folder)
    async with live_router(text=text, images=images, num_decode=1) as started:
        yield started


async def open_chat(opened: Opener, router: LiveRouter) -> Any:
    """The page's chat, once it takes images."""
    from playwright.async_api import expect

    page = await opened("#/chat", url=router.url)
    await expect(page.get_by_role("button", name="Add images")).to_be_visible()
    return page


async def test_images_are_chosen_pasted_and_dropped(opened: Opener, tmp_path: Path):
    from playwright.async_api import expect

    save_vision_model(tmp_path)
    text, images = load_vision_model(tmp_path)
    chosen, pasted, dropped = map(coloured, ("red", "blue", "green"))
    async with watched_router(opened, text=text, images=images, num_decode=1) as (own, open_page):
        page = await open_chat(open_page, own)
        await page.locator("[data-images]").set_input_files(
            {"name": "a.png", "mimeType": "image/png", "buffer": chosen}
        )
        assert await give(page, "paste", "b.png", pasted)
        assert await give(page, "drop", "c.png", dropped)
        waiting = page.get_by_role("form", name="Message").locator(".pictures img")
        await expect(waiting).to_have_count(3)
        assert await axe_violations(page) == []
        await page.get_by_role("button", name="Remove b.png").click()
        assert await give(page, "drop", "note.txt", b"hello", "text/plain")
        await expect(page.get_by_role("alert")).to_have_text("note.txt is no PNG, JPEG or WebP")
        await ask(page, "what is it?")
        await expect(page.get_by_label("Answer 1")).to_have_attribute("aria-busy", "false")
        await expect(page.locator(".bubble.user img")).to_have_count(2)
        await expect(waiting).to_have_count(0)
        whole = [media_identity(file, images.processor, "auto") for file in (chosen, dropped)]
        prefill = own.mock.prefills[0]
        assert {header.identity for header in prefill.media.headers} == set(whole)
        assert [span.identity for span in prefill.requests[-1].media] == whole
        await page.get_by_role("button", name="curl").click()
        curl = await page.locator("[data-curl]").inner_text()
        assert curl.count("data:image/png;base64,") == 2
        assert base64.b64encode(chosen).decode() not in curl
        assert len(curl) < 1500
        await expect(page.get_by_text("are cut short here")).to_be_visible()


async def test_a_refused_image_is_told_and_not_sent_again(opened: Opener, router: LiveRouter, image_router: LiveRouter):
    from playwright.async_api import expect

    plain = await opened("#/chat")
    await expect(plain.locator("#message")).to_be_visible()
    assert not await give(plain, "paste", "a.png", coloured("red")), "the model takes text only"
    assert await plain.get_by_role("button", name="Add images").count() == 0
    page = await open_chat(opened, image_router)
    page.console.forgive("400")
    assert await give(page, "paste", "cut.png", coloured("red")[:20])
    await expect(page.locator(".pictures img")).to_have_count(1)
    await ask(page, "what is it?")
    await expect(page.get_by_role("alert")).to_contain_text("messages[0].content[0].image_url.url")
    await ask(page, "and without it?")
    await expect(page.get_by_label("Answer 2").locator(".md")).to_have_text(re.compile(r"\S"))
    await expect(page.get_by_role("alert")).to_have_count(1)


async def test_a_question_waits_for_an_image_that_is_read(opened: Opener, image_router: LiveRouter):
    from playwright.async_api import expect

    page = await open_chat(opened, image_router)
    await page.evaluate(HOLD_READS)
    assert await give(page, "drop", "a.png", coloured("red"))
    await ask(page, "what is it?")
    await expect(page.get_by_text("reading images")).to_be_visible()
    await expect(page.get_by_role("button", name="Send")).to_be_disabled()
    assert await page.locator(".bubble").count() == 0
    await page.evaluate(READ)
    await expect(page.get_by_role("form", name="Message").locator(".pictures img")).to_have_count(1)
    await page.keyboard.press("Enter")
    await expect(page.locator(".bubble.user img")).to_have_count(1)
    await expect(page.get_by_label("Answer 1")).to_have_attribute("aria-busy", "false")


async def test_images_keep_their_order_whichever_is_read_first(opened: Opener, image_router: LiveRouter):
    from playwright.async_api import expect

    page = await open_chat(opened, image_router)
    await page.evaluate(HOLD_READS)
    for name in ("a.png", "b.png"):
        assert await give(page, "drop", name, coloured("red"))
    await page.evaluate("reads.pop()()")  # returns when it is read
    await page.evaluate(READ)
    shown = page.locator(".pictures img")
    await expect(shown).to_have_count(2)
    assert [await shown.nth(at).get_attribute("alt") for at in (0, 1)] == ["a.png", "b.png"]


async def test_what_no_request_may_have_is_not_read(opened: Opener, image_router: LiveRouter):
    from playwright.async_api import expect

    page = await open_chat(opened, image_router)
    alert, waiting = page.get_by_role("alert"), page.locator(".pictures img")
    await page.evaluate(HOLD_READS)
    assert await page.evaluate(DROP_MANY, [300, 1]) == 16
    assert await page.evaluate(DROP_MANY, [1, 1]) == 16, "a second drop counts with the first"
    await expect(alert).to_have_text("0.png is left out: 16 images are the most")
    await page.evaluate(READ)
    await expect(waiting).to_have_count(16)
    await page.get_by_role("button", name="Remove 3.png").click()
    assert await page.evaluate(DROP_MANY, [1, 1]) == 1, "there is room again"
    await expect(alert).to_have_count(0)
    large = await open_chat(opened, image_router)
    await large.evaluate(HOLD_READS)
    assert await large.evaluate(DROP_MANY, [4, 9 << 20]) == 3
    await expect(large.get_by_role("alert")).to_have_text(
        "3.png is left out: all images together have more than 32 MiB"
    )


async def test_text_is_pasted_though_there_is_a_picture_of_it(opened: Opener, image_router: LiveRouter):
    from playwright.async_api import expect

    page = await open_chat(opened, image_router)
    cells = {"text/plain": "1\t2", "text/html": "<table><tr><td>1<td>2</table>"}
    assert not await give(page, "paste", "image.png", coloured("red"), texts=cells)
    assert not await give(page, "paste", "a.pdf", b"%PDF", "application/pdf")
    assert await give(page, "paste", "image.png", coloured("red"), texts={"text/html": "<img src=a.png>"})
    await expect(page.locator(".pictures img")).to_have_count(1)


async def test_a_file_that_is_dropped_elsewhere_does_not_replace_the_page(
    opened: Opener, router: LiveRouter, image_router: LiveRouter
):
    from playwright.async_api import expect

    for page, place in (
        (await open_chat(opened, image_router), ".params"),
        (await opened("#/chat", url=router.url), ".messages"),
    ):
        await expect(page.locator("#message")).to_be_visible()
        for kind in ("dragover", "drop"):
            assert await give(page, kind, "a.png", coloured("red"), place=place)
            assert not await give(page, kind, "", place=place, texts={"text/plain": "hello"}), "text is dropped as ever"
        assert await page.locator(".pictures").count() == 0
