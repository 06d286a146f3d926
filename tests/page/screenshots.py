"""`python -m tests.page.screenshots`: takes the pictures of docs/images, of real processes, in a headless Chromium.

A cluster with two workers of each kind and an encode worker serves chats about pictures and long prompts; then one of
its decode workers is killed. Nothing compares the pictures: look at what comes out.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx2

from baton.services.cli.processes.ports import free_ports
from scripts.bundled_pictures import PictureSpec, draw
from tests.cluster import plain_client
from tests.page.browser import ARGUMENTS, ROOT, chromium_path

IMAGES = ROOT / "docs" / "images"
DESKTOP: Any = {"width": 1440, "height": 1180}
PHONE: Any = {"width": 390, "height": 844}
MODEL = "bundled-vision"
WORKERS = ("--prefill", "2", "--decode", "2", "--encode", "1")
NUM_CLIENTS = 10
TIMEOUT_S = 300.0
MAX_KILLS = 20
REPLAYED = "[data-event=replayed] button, [data-event=replayed] .chip"
QUESTION = "What is in the picture?"
STORY = "A red circle is on the left, and a blue square is on the right of a green triangle. "


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes all pictures."""
    parser = argparse.ArgumentParser(prog="python -m tests.page.screenshots", description=__doc__)
    parser.add_argument("--to", type=Path, default=IMAGES, help="the folder: %(default)s")
    folder = parser.parse_args(arguments).to
    from playwright.sync_api import sync_playwright

    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with running_cluster(port), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=list(ARGUMENTS))

        def opened(scheme: Any, size: Any, hash: str = "") -> Any:
            page = browser.new_page(viewport=size, color_scheme=scheme)
            page.set_default_timeout(TIMEOUT_S * 1000)
            page.goto(f"{url}/{hash}")
            return page

        with clients(url):
            light, dark, phone = opened("light", DESKTOP), opened("dark", DESKTOP), opened("dark", PHONE)
            take_split(light, folder / "live-light.png")
            kill_until_replayed(url, dark)
            take_replay(dark, folder / "live-dark.png")
            phone.locator("[data-sum]").wait_for()
            phone.locator("[data-worker=decode-0] .chip").first.wait_for()
            phone.screenshot(path=folder / "live-phone.png")
        take_chat(opened("light", {"width": 1280, "height": 860}, "#/chat"), folder / "chat-light.png")
        browser.close()
    return 0


@contextmanager
def running_cluster(port: int) -> Iterator[None]:
    """`baton up` of the toy for images, as a demo; ends with the context."""
    baton = Path(sys.executable).parent / "baton"
    command = [str(baton), "up", "--model", MODEL, "--demo", "--port", str(port), *WORKERS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if not any(line.startswith("Ctrl-C") for line in iter(process.stdout.readline, "")):
                raise RuntimeError("`baton up` ended before it was up")
            yield
        finally:
            process.terminate()


@contextmanager
def clients(url: str) -> Iterator[None]:
    """Chats about pictures and long prompts, one after another, until the context ends."""
    stopping = threading.Event()

    def run(number: int) -> None:
        drawn = random.Random(number)
        with plain_client(timeout=TIMEOUT_S) as client:
            for turn in count(number):
                if stopping.is_set():
                    return
                with suppress(httpx2.HTTPError):
                    client.post(f"{url}/v1/chat/completions", json=chat(drawn, turn % 2 == 0))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def chat(drawn: random.Random, about_a_picture: bool) -> dict[str, object]:
    """A chat about a picture, or one with a long prompt that no other has."""
    content: Any = f"{drawn.random()} {STORY * drawn.randrange(12, 30)}"
    if about_a_picture:
        url = f"data:image/png;base64,{base64.b64encode(png(drawn)).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": drawn.randrange(80, 200), "ignore_eos": True}


def png(drawn: random.Random) -> bytes:
    """The file of a circle on the left."""
    file = io.BytesIO()
    colour = drawn.choice(("red", "blue", "green"))
    draw(PictureSpec(colour, "circle", "on the left"), drawn, smallest=64).save(file, "PNG")
    return file.getvalue()


def kill(url: str, worker: str) -> None:
    """Kills a worker, as the button of a demo does."""
    with plain_client(timeout=TIMEOUT_S) as client:
        action = {"action": "kill", "worker": worker}
        client.post(f"{url}/v1/cluster/actions", json=action, headers={"x-baton-demo": "1"}).raise_for_status()


def take_split(page: Any, path: Path) -> None:
    """Waits for requests on a prefill worker and on both decode workers, and for the stages of one that ended."""
    for worker in ("decode-0", "decode-1"):
        page.locator(f"[data-worker={worker}] .chip").first.wait_for()
    page.locator("[data-sum]").wait_for()
    page.locator("[data-role=prefill] .chip").first.wait_for()
    page.screenshot(path=path)


def kill_until_replayed(url: str, page: Any) -> None:
    """Kills a decode worker that has requests; again if they had ended when it died."""
    from playwright.sync_api import TimeoutError

    for _ in range(MAX_KILLS):
        page.locator("[data-worker=decode-1] .chip").first.wait_for()
        kill(url, "decode-1")
        page.locator("[data-worker=decode-1][data-status=lost]").wait_for()
        with suppress(TimeoutError):
            page.locator(REPLAYED).first.wait_for(timeout=10_000)
            return
    raise RuntimeError(f"{MAX_KILLS} kills of decode-1 met no request")


def take_replay(page: Any, path: Path) -> None:
    """Opens a request that was replayed, and waits for its end."""
    page.locator(REPLAYED).first.click()
    page.get_by_label("One request").get_by_text("finished", exact=True).wait_for()
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=path)


def take_chat(page: Any, path: Path) -> None:
    """Asks about a picture, and waits for the answer."""
    file = {"name": "circle.png", "mimeType": "image/png", "buffer": png(random.Random(1))}
    page.locator("[data-images]").set_input_files(file)
    page.locator("#message").fill(QUESTION)
    page.keyboard.press("Enter")
    page.locator('[aria-label="Answer 1"][aria-busy=false]').wait_for()
    page.screenshot(path=path)


if __name__ == "__main__":
    sys.exit(main())
