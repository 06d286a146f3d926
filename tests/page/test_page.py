"""The page in a real Chromium, over a whole router with scripted workers: what a person would see and do."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.domain.worker import BrokenLink, LinkRecord, MediaCounts, PageCounts, WorkerLoad, WorkerStatus
from baton.services.cli.processes.child_command import ChildCommand
from baton.services.cli.processes.demo_control import DemoServer
from baton.services.cli.processes.supervisor import Supervisor
from baton.services.router.edge.api_keys import make_entry, new_key
from tests.mock_workers import Hold as HoldAction
from tests.mock_workers import Phase, ScriptedAction
from tests.page.browser import DESKTOP, WAIT_MS, HeldRequests, Opener, ask, axe_violations, watched_router
from tests.service.cluster.live_router import LiveRouter, live_router

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

PHONE = {"width": 360, "height": 780}
HOSTILE = (
    '<img src=x onerror="window.hit=1"> <script>window.hit=2</script> ![x](https://evil.example/?q=1) '
    "[click](javascript:alert(1)) [ok](https://good.example) <b>bold</b> `<i>`"
)


def hold_at(router: LiveRouter, index: int) -> None:
    """Decode workers stop before this token, once, until `release`."""
    for decode in router.mock.decodes:
        decode._released = asyncio.Event()
        decode.script = [ScriptedAction(Phase.DECODE, HoldAction(), index=index)]


def release(router: LiveRouter) -> None:
    for decode in router.mock.decodes:
        decode.release()


async def eventually_quiet(router: LiveRouter) -> None:
    async with router.watch() as view:
        await view.until(lambda v: v.state["num_requests"] == 0)


async def test_a_chat_streams_and_its_stages_add_up(opened: Opener, router: LiveRouter):
    from playwright.async_api import expect

    hold_at(router, 4)
    page = await opened("#/chat")
    await ask(page, "hello")
    answer = page.get_by_label("Answer 1")
    text = answer.locator(".md")
    await expect(text).to_have_text(re.compile(r"\S"))
    before = await text.inner_text()
    await expect(answer).to_have_attribute("aria-busy", "true")
    release(router)
    await expect(answer).to_have_attribute("aria-busy", "false")
    assert len(await text.inner_text()) > len(before), "it was shown before it was complete"
    await answer.get_by_role("button", name="Raw SSE").click()
    raw = await page.locator("[data-raw]").inner_text()
    assert raw.rstrip().endswith("data: [DONE]")
    sent = [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: {")]
    told = "".join(choice["delta"].get("content") or "" for event in sent for choice in event["choices"])
    await answer.get_by_role("button", name="Text").click()
    assert (await text.inner_text()).split() == told.split()
    await answer.get_by_role("link", name=re.compile("waterfall")).click()
    sums = page.locator("[data-sum]")
    await expect(sums).to_contain_text("E2E")
    assert await sums.get_attribute("data-sum") == await sums.get_attribute("data-e2e")
    shown = await page.locator("[data-stages] .n:not(.mut)").all_inner_texts()
    total_ms = sum(float(each.removesuffix(" ms").replace(",", "")) for each in shown)
    assert total_ms == pytest.approx(
        int(str(await sums.get_attribute("data-e2e"))) / 1000, abs=0.05 * len(shown) + 0.01
    )


async def test_stop_aborts_the_request_on_its_worker(opened: Opener, router: LiveRouter):
    from playwright.async_api import expect

    hold_at(router, 3)
    seen = {decode.id: len(decode.requests) for decode in router.mock.decodes}
    page = await opened("#/chat")
    await ask(page, "stop me")
    await expect(page.get_by_label("Answer 1").locator(".md")).to_have_text(re.compile(r"\S"))
    await page.get_by_role("button", name="Stop").click()
    await expect(page.get_by_text("Stopped.")).to_be_visible()
    [(worker, id)] = [(each, sent.id) for each in router.mock.decodes for sent in each.requests[seen[each.id] :]]
    assert await worker.aborted(id) == "cancelled", "the router does not wait for it, so it may come a moment later"
    await eventually_quiet(router)


async def test_the_live_view_follows_a_killed_worker(opened: Opener, browser: Any):
    from playwright.async_api import expect

    async with watched_router(opened) as (own, open_page):
        hold_at(own, 3)
        page = await open_page()
        await expect(page.locator("[data-worker]")).to_have_count(3)
        answer = asyncio.create_task(own.complete(max_tokens=8))
        chip = page.locator("[data-role=decode] .chip")
        await expect(chip).to_have_count(1)
        victim_id = await page.locator("[data-role=decode]", has=page.locator(".chip")).get_attribute("data-worker")
        victim = next(each for each in own.mock.decodes if each.id == victim_id)
        other = next(each for each in own.mock.decodes if each is not victim)
        other.script = [ScriptedAction(Phase.DECODE, HoldAction(), index=6)]
        await own.kill(victim)
        card = page.locator(f"[data-worker={victim_id}]")
        await expect(card).to_have_attribute("data-status", "lost")
        moved = page.locator(f"[data-worker={other.id}] .chip")
        await expect(moved).to_have_class(re.compile(r"\bre\b"))
        await expect(page.locator("[data-event=replayed]")).to_contain_text(f"> {other.id}")
        await expect(page.locator("[data-event=lost]")).to_contain_text(str(victim_id))
        other.release()
        assert (await answer).status_code == 200
        await expect(page.locator("[data-role=decode] .chip")).to_have_count(0)
        await expect(page.get_by_label("Service levels")).to_contain_text("1, 0")
        await expect(page.get_by_label("One request")).to_contain_text("attempt 1 ended")
        assert await axe_violations(page) == []


async def test_the_newest_request_stays_until_it_was_read(opened: Opener, browser: Any):
    """Under load another one ends before its stages are there: the panel would never show any."""
    from playwright.async_api import expect

    async with watched_router(opened) as (own, open_page):
        page = await open_page()
        held = await HeldRequests.of(page, "**/v1/cluster/requests/*")
        first = (await own.complete(max_tokens=4)).headers["x-baton-request-id"]
        await held.wait()
        panel = page.get_by_label("One request")
        await expect(panel).to_contain_text("Reading its stages")
        second = (await own.complete(max_tokens=4)).headers["x-baton-request-id"]
        await expect(page.locator(f'.chip.plain[title="{second}"]')).to_be_visible()
        await held.let_go()
        await expect(panel.get_by_role("link", name=first)).to_be_visible()


async def test_a_link_shows_its_speed_and_path_or_why_it_is_broken(opened: Opener):
    from playwright.async_api import expect

    async with watched_router(opened, num_decode=1) as (own, open_page):
        page = await open_page()
        decode, prefill = own.mock.decodes[0], own.mock.prefills[0]
        link = LinkRecord(prefill.id, prefill.incarnation, "nixl", 9.2 * 2**30, 1 << 20, "nixl/ucx (cma)")
        await own.mock.registry.announce(decode.record([link]))
        lines = page.locator("svg.links")
        await expect(lines).to_have_attribute("aria-label", "1 link: prefill-0 to decode-0 9.2 cma")
        await expect(lines.locator("text")).to_have_text("9.2 cma")
        broken = BrokenLink(prefill.id, "fingerprint differs in page_size")
        await own.mock.registry.announce(replace(decode.record(), broken_links=(broken,)))
        await expect(lines.locator("text")).to_have_text("✕ broken")
        await expect(page.get_by_label("Transfer")).to_contain_text(broken.reason)
        assert await axe_violations(page) == []


async def test_encode_workers_have_cards_with_what_they_report(opened: Opener):
    from playwright.async_api import expect

    async with watched_router(opened, num_decode=1) as (own, open_page):
        page = await open_page()
        await expect(page.locator("[data-worker]")).to_have_count(2)
        lane = page.get_by_label("Encode workers")
        await expect(lane).to_have_count(0)
        load = WorkerLoad(waiting_requests=2, waiting_tokens=512, media=MediaCounts(9, 7, 3_200_000, 256_000_000))
        async with own.encode_worker(load) as encode:
            card = lane.locator("[data-worker=encode-0]")
            await expect(card).to_have_attribute("data-status", "ready")
            await expect(card.locator(".facts")).to_have_text("queue 2 · 512 rows wait · 7 embeddings, 3.2 MB")
            label = "Images of encode-0: 7 embeddings, 2 not encoded yet, 3.2 MB of 256.0 MB"
            bar = card.get_by_role("img", name=label, exact=True).locator("i")
            assert await bar.get_attribute("style") == "width: 1.25%;"
            assert await axe_violations(page) == []
            encode.status = WorkerStatus.DRAINING
            await own.mock.registry.announce(encode.record())
            await expect(card).to_have_attribute("data-status", "draining")
            await own.mock.registry.withdraw(encode.id, encode.incarnation)
            await expect(card).to_have_attribute("data-status", "left")
            await expect(card).to_contain_text("left after its drain")


async def test_a_prefill_worker_shows_its_pages_and_its_images(opened: Opener):
    from playwright.async_api import expect

    async with watched_router(opened, num_decode=1) as (own, open_page):
        page = await open_page()
        card = page.locator("[data-worker=prefill-0]")
        prefill, pages = own.mock.prefills[0], PageCounts(free=60, cached=4)
        await own.mock.change_load(prefill, pages=pages)
        await expect(card.get_by_role("img")).to_have_count(1)  # pages; the model has no images
        await own.mock.change_load(prefill, media=MediaCounts(9, 7, 3_200_000, 256_000_000))
        label = "Images of prefill-0: 7 embeddings, 2 not encoded yet, 3.2 MB of 256.0 MB"
        bar = card.get_by_role("img", name=label, exact=True)
        assert await bar.locator("i").get_attribute("style") == "width: 1.25%;"
        await expect(card.locator(".facts")).to_contain_text("9 images, 3.2 MB")
        await expect(card.get_by_role("img")).to_have_count(2)
        assert await axe_violations(page) == []


async def test_a_key_opens_the_page_for_its_own_requests(opened: Opener, tmp_path: Path):
    from playwright.async_api import expect

    key, operator = new_key(), new_key()
    file = tmp_path / "keys"
    file.write_text(
        "\n".join(each.line() for each in (make_entry("red", key), make_entry("ops", operator, operator=True)))
    )
    async with watched_router(opened, keys_file=file, num_decode=1) as (_, open_page):
        page = await open_page()
        page.console.forgive("401")
        field = page.locator("#key")
        await expect(page.get_by_text("needs an API key")).to_be_visible()
        assert "prefill-0" not in await page.content()
        assert await axe_violations(page) == []
        await field.fill(new_key())
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("not known")
        await field.fill(key)
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("your own requests")).to_be_visible()
        await expect(page.locator("[data-worker]")).to_have_count(0)
        await page.get_by_role("button", name="Forget key").click()
        await expect(field).to_be_visible()
        await field.fill(operator)
        await page.keyboard.press("Enter")
        await expect(page.locator("[data-worker]")).to_have_count(2)
        await page.reload()
        await expect(page.locator("[data-worker]")).to_have_count(2)
        assert operator not in page.url


async def test_hostile_output_is_shown_and_does_nothing(opened: Opener, router: LiveRouter):
    from playwright.async_api import expect

    page = await opened("#/chat")
    await expect(page.locator("#message")).to_be_visible()
    build = (await router.snapshot())["build"]
    load = f"async (text) => (await import(new URL('ui/{build}/markdown.js', document.baseURI))).toHtml(text)"
    html = await page.evaluate(load, HOSTILE)
    assert not re.search(r"<(img|script|b|i)\b|javascript:", html), html
    assert 'href="https://good.example"' in html
    assert "&lt;img" in html, "shown as text"
    await page.evaluate("(html) => { document.querySelector('#message').insertAdjacentHTML('afterend', html); }", html)
    assert await page.evaluate("window.hit") is None


async def open_with_request(opened: Opener, router: LiveRouter) -> Any:
    """The live view, once it shows a request that ended."""
    from playwright.async_api import expect

    answer = await router.complete()
    assert answer.status_code == 200
    page = await opened()
    await expect(page.locator(f'.chip.plain[title="{answer.headers["x-baton-request-id"]}"]')).to_be_visible()
    return page


async def press_at_once(page: Any, *keys: str) -> list[str]:
    """Presses keys with no time between them, however slow the machine; the page's address after each, from the #."""
    pressed: list[str] = await page.evaluate(
        """(keys) => keys.map((key) => {
            document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
            return location.hash;
        })""",
        list(keys),
    )
    return pressed


async def test_keys_do_what_the_list_says(opened: Opener, router: LiveRouter):
    from playwright.async_api import expect

    page = await open_with_request(opened, router)
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_be_hidden()
    await page.keyboard.press("t")
    await expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    await page.keyboard.press("j")
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(re.compile("#/requests/.+"))
    await page.keyboard.press("Escape")
    await expect(page).to_have_url(re.compile("#/requests$"))
    await page.keyboard.press("/")
    await expect(page.get_by_label("Find by id")).to_be_focused()
    await page.keyboard.type("gc")  # a field takes it
    await expect(page).to_have_url(re.compile("#/requests$"))
    await page.keyboard.press("Escape")
    await press_at_once(page, "g", "c")
    await expect(page.locator("#message")).to_be_visible()


async def test_a_key_counts_before_the_page_has_drawn_the_last_one(opened: Opener, router: LiveRouter):
    page = await open_with_request(opened, router)
    await page.keyboard.press("j")
    addresses = await press_at_once(page, "Enter", "Escape")
    assert addresses[0].startswith("#/requests/")
    assert addresses[1] == "#/requests"


@pytest.mark.parametrize(
    ("hash", "viewport", "scheme"),
    [
        ("#/", DESKTOP, "dark"),
        ("#/", PHONE, "light"),
        ("#/chat", PHONE, "dark"),
        ("#/requests", DESKTOP, "light"),
        ("#/requests/latest", PHONE, "dark"),
    ],
)
async def test_a_view_is_accessible_and_fits(opened: Opener, router: LiveRouter, hash: str, viewport: Any, scheme: str):
    from playwright.async_api import expect

    answer = await router.complete()
    assert answer.status_code == 200
    hash = hash.replace("latest", answer.headers["x-baton-request-id"])
    page = await opened(hash, viewport=viewport, scheme=scheme)
    await expect(page.locator(".news")).to_have_text("live")
    await expect(page.locator(".slo, #message, table a, [data-sum]").first).to_be_visible()
    assert await axe_violations(page) == []
    assert await page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


async def test_a_demo_has_buttons_that_kill_and_drain_a_worker(opened: Opener, router: LiveRouter, tmp_path: Path):
    from playwright.async_api import expect

    plain = await opened()
    await expect(plain.locator("[data-worker]")).to_have_count(3)
    assert await plain.get_by_role("button", name="Kill").count() == 0, "only in a demo"
    socket, waits = tmp_path / "control", "import signal; signal.sigwait({signal.SIGTERM})"
    async with Supervisor(tmp_path) as supervisor, DemoServer(supervisor).serving(socket):
        child = await supervisor.start(ChildCommand("decode-0", (sys.executable, "-c", waits), {}))
        async with watched_router(opened, num_decode=1, demo_socket=socket) as (_, open_page):
            page = await open_page()
            page.console.forgive("400")
            await page.get_by_role("button", name="Kill prefill-0").click()
            await expect(page.get_by_role("alert")).to_contain_text("no worker 'prefill-0'")
            await page.get_by_role("button", name="Drain decode-0").click()
            assert await asyncio.wait_for(supervisor.first_exit(), WAIT_MS / 1000) is child
            assert child.process.returncode in (0, -15), "SIGTERM, which drains a worker"
            child = await supervisor.restart(child)
            await page.get_by_role("button", name="Kill decode-0").click()
            assert await asyncio.wait_for(supervisor.first_exit(), WAIT_MS / 1000) is child
            assert child.process.returncode == -9


async def test_a_router_that_ends_is_told_and_found_again(opened: Opener):
    from playwright.async_api import expect

    async with live_router(num_decode=1) as own:
        page = await opened(url=own.url)
        page.console.forgive("net::ERR_")  # refused, reset or cut off, as it comes
        await expect(page.locator("[data-worker]")).to_have_count(2)
    await expect(page.get_by_role("status")).to_contain_text("no news")
    assert await page.locator("[data-worker]").count() == 2, "the last values stay"
    await page.goto("about:blank")
