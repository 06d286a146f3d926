"""The page's files: open without a key, cached for ever, nothing beside them, and the libraries of the lock."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

import httpx2
import pytest
from starlette.applications import Starlette

from baton.services.router.edge.api_keys import ApiKeys, make_entry, new_key
from baton.services.router.frontend import ApiLimits
from baton.services.router.routes import make_app
from baton.services.router.ui.bundle import FOLDERS, page_bundle
from tests.fake_dispatcher import FakeDispatcher, one_token_chunks
from tests.unit.router.memory_frontend import memory_frontend

MAX_LIVE_BYTES = 200_000
"""Everything but the modules that only the chat loads."""
CHAT_ONLY = {"marked.esm.js", "purify.min.js", "markdown.js"}
VENDOR = FOLDERS[1]
TESTS_VENDOR = Path(__file__).resolve().parents[3] / "page" / "vendor"


def app(*, keys: bool = True) -> Starlette:
    frontend = memory_frontend(FakeDispatcher(lambda s: one_token_chunks([2])), ApiLimits("tiny", max_model_len=64))
    ring = ApiKeys((make_entry("red", new_key()),)) if keys else None
    return make_app(frontend, lambda: (True, ""), ring, page=page_bundle())


@pytest.fixture
async def client():
    transport = httpx2.ASGITransport(app())
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as made:
        yield made


async def test_the_page_needs_no_key_and_brings_a_strict_policy(client: httpx2.AsyncClient):
    answer = await client.get("/")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
    assert "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=|https?://(?!www\.w3\.org/2000/svg)", answer.text)


async def test_every_file_that_the_page_names_is_there_and_kept_for_ever(client: httpx2.AsyncClient):
    names = re.findall(r'(?:src|href)="(ui/[^"]+)"', (await client.get("/")).text)
    assert len(names) == 4
    for name in names:
        answer = await client.get(f"/{name}", headers={"accept-encoding": "identity"})
        assert (answer.status_code, "immutable" in answer.headers["cache-control"]) == (200, True), name
        assert (await client.get(f"/ui/0/{name.rpartition('/')[2]}")).headers["cache-control"] == "no-cache"
    modules = [name for name, file in page_bundle().files.items() if file.media_type == "text/javascript"]
    for module in modules:
        source = page_bundle().files[module].content.decode()
        if "vendor" not in str(VENDOR / module) or module not in {path.name for path in VENDOR.iterdir()}:
            for imported in re.findall(r'(?:from|import)\s*\(?"\./([^"]+)"', source):
                assert imported in page_bundle().files, (module, imported)


@pytest.mark.parametrize(
    "path", ["/ui/x/..%2f__init__.py", "/ui/x/bundle.py", "/ui/x/vendor.lock.json", "/ui/x/index.html", "/ui/x/y/z"]
)
async def test_nothing_else_is_served(client: httpx2.AsyncClient, path: str):
    assert (await client.get(path)).status_code == 404


async def test_only_reading_is_open(client: httpx2.AsyncClient):
    for path in ("/", "/ui/x/app.js"):
        assert (await client.post(path)).status_code == 401
    assert (await client.get("/v1/models")).status_code == 401
    assert (await client.get("/ui/../v1/models")).status_code == 401
    assert (await client.get("/ui%2f..%2fv1/models")).status_code in (401, 404)


async def test_files_are_compressed_for_those_that_ask():
    for name, file in page_bundle().files.items():
        assert gzip.decompress(file.compressed) == file.content, name


def test_libraries_are_those_of_the_lock_and_come_with_licences():
    lock = json.loads((VENDOR / "vendor.lock.json").read_text())
    locked = {name: digest for package in lock.values() for name, digest in package["files"].items()}
    found = {
        path.name: path
        for folder in (VENDOR, TESTS_VENDOR)
        for path in folder.glob("*.*")
        if path.suffix in (".js", ".css")
    }
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()} == locked
    for folder in (VENDOR, TESTS_VENDOR):
        text = (folder / "THIRD_PARTY_LICENSES").read_text()
        assert all(path.name in text for path in found.values() if path.parent == folder)


def test_the_live_view_is_small():
    sizes = {name: len(file.content) for name, file in page_bundle().files.items() if name not in CHAT_ONLY}
    assert sum(sizes.values()) < MAX_LIVE_BYTES, sizes


def test_a_changed_file_changes_the_address():
    build = page_bundle().build
    assert re.fullmatch(r"[0-9a-f]{12}", build)
    assert f"ui/{build}/app.js" in page_bundle().files["index.html"].content.decode()
