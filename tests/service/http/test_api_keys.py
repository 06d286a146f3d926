"""API keys and tenants: a whole router with a key file, over mock workers that cache pages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import structlog
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from baton.domain.errors import BatonError
from baton.rpc.gen import decode_pb2
from baton.services.router.app import listen, run
from baton.services.router.edge.api_keys import KEY_PREFIX, make_entry, new_key
from baton.services.router.settings import RouterSettings
from baton.services.router.text.text_model import TextModel
from baton.settings.base import SettingsError
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.telemetry import metrics
from tests.mock_workers import MODEL, PAGE_SIZE, MockCluster, MockDecode, MockPrefill
from tests.service.http.http_server import error_of

pytestmark = pytest.mark.timeout(60)

PROMPT = list(range(100, 117))  # more than four pages
RED, OTHER_RED, BLUE = new_key(), new_key(), new_key()
TIMEOUT_S = 20.0


class CachingDecode(MockDecode):
    """Remembers the key of every reserved page, and finds these pages again."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.known: set[bytes] = set()

    async def Reserve(  # gRPC's name
        self, message: decode_pb2.ReserveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ReserveReply:
        keys = list(message.page_keys)
        hits = next((index for index, key in enumerate(keys) if key not in self.known), len(keys))
        self.decode_prefix_len = hits * PAGE_SIZE
        self.known |= set(keys)
        return await super().Reserve(message, context)


@dataclass(slots=True)
class Router:
    """A running router."""

    client: httpx2.AsyncClient
    decode: CachingDecode
    logs: list

    async def complete(self, key: str | None, **body: Any) -> httpx2.Response:
        whole = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, **body}
        return await self.client.post("/v1/completions", json=whole, headers=bearer(key))

    async def cached_tokens(self, key: str | None, **body: Any) -> int:
        answer = (await self.complete(key, **body)).raise_for_status().json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@pytest.fixture
def text(tmp_path: Path) -> TextModel:
    Tokenizer(WordLevel({f"w{n}": n for n in range(2000)}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 2000, "max_position_embeddings": 150}))
    return TextModel.load(tmp_path)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    lines = ["# accepted keys", "", make_entry("red", RED).line(), f"{make_entry('red', OTHER_RED).line()}  # second"]
    path = tmp_path / "keys"
    path.write_text("\n".join([*lines, make_entry("sea", BLUE).line()]))
    return path


@asynccontextmanager
async def router(text: TextModel, keys_file: Path | None, **fields: Any) -> AsyncIterator[Router]:
    store, decode = MemoryStore(StoreOptions(worker_ttl_s=60.0, heartbeat_s=0.05)), CachingDecode("decode-0")
    cluster = MockCluster(store, [MockPrefill("prefill-0")], [decode], text_digest=text.digest)
    settings = RouterSettings(model=MODEL, port=0, heartbeat_interval_s=0.05, api_keys_file=keys_file, **fields)
    stop, sock = asyncio.Event(), listen("127.0.0.1", 0)
    await cluster.start()
    serving = asyncio.create_task(run(settings, text, store, sock, stop))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        with structlog.testing.capture_logs() as logs:
            made = httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, verify=False)
            async with made as client, asyncio.timeout(TIMEOUT_S):
                while (await client.get("/ready")).status_code != 200:
                    pass
                yield Router(client, decode, logs)
    finally:
        stop.set()
        async with asyncio.timeout(TIMEOUT_S):
            await serving
            await cluster.stop()


async def test_every_path_but_two_requires_a_key(text, keys_file):
    paths = ("/v1/models", f"/v1/models/{MODEL}", "/metrics", "/version", "/openapi.json", "/nowhere", "/health/")
    async with router(text, keys_file) as world:
        for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE"):
            for path in (*paths, "/v1/completions", "/v1/chat/completions"):
                response = await world.client.request(method, path)
                assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
                if method != "HEAD":
                    assert error_of(response)["code"] == "invalid_api_key"
        for path in ("/health", "/ready"):
            assert (await world.client.get(path)).status_code == 200
        for path in ("/v1/models", "/version"):
            assert (await world.client.get(path, headers=bearer(BLUE))).status_code == 200
        for path in ("/nowhere", "/metrics", "/admin/cluster"):
            assert (await world.client.get(path, headers=bearer(BLUE))).status_code == 404


async def test_a_wrong_key_differs_from_none_and_is_never_repeated(text, keys_file, caplog):
    wrong = new_key()
    async with router(text, keys_file) as world:
        for key, words in ((None, "an API key is needed"), (wrong, "not known here"), (RED[:-1], "not known here")):
            response = await world.complete(key)
            assert response.status_code == 401
            assert words in error_of(response)["message"]
            assert "red" not in response.text
            assert key is None or key not in str(response.headers) + response.text
        for header in ("Bearer", f"Basic {RED}", RED, f"Bearer{RED}", f"Bearer {RED} {RED}"):
            response = await world.client.get("/v1/models", headers={"authorization": header})
            assert response.status_code == 401, header
        twice = [("authorization", f"Bearer {RED}"), ("authorization", f"Bearer {wrong}")]
        assert (await world.client.get("/v1/models", headers=twice)).status_code == 401
        strange = [(b"authorization", b"Bearer \xff\xfe\xed\xa0\x80")]
        assert (await world.client.get("/v1/models", headers=strange)).status_code == 401
        assert (await world.client.get("/v1/models", headers={"authorization": f"bearer   {RED}"})).status_code == 200
        for name in ("x-api-key", "api-key"):
            assert (await world.client.get("/v1/models", headers={name: RED})).status_code == 200
            for others in ({name: wrong}, {name: ""}, {name: wrong, **bearer(RED)}, {name: RED, **bearer(wrong)}):
                assert (await world.client.get("/v1/models", headers=others)).status_code == 401, others
            assert (await world.client.get("/v1/models", headers={name: RED, **bearer(RED)})).status_code == 200
        assert (await world.complete(RED, temperature="hot")).status_code == 400
        spoken = caplog.text + json.dumps(world.logs, default=repr) + metrics.render()[0].decode()
        assert not [key for key in (wrong, RED, OTHER_RED, BLUE) if key in spoken]


async def test_tenants_share_no_prefix_cache(text, keys_file):
    async with router(text, keys_file) as world:
        assert await world.cached_tokens(RED) == 0
        assert await world.cached_tokens(RED) == 16
        assert await world.cached_tokens(OTHER_RED) == 16, "a tenant's keys share a cache"
        assert await world.cached_tokens(BLUE) == 0
        assert await world.cached_tokens(BLUE) == 16
        reds, blues = {r.salt for r in world.decode.requests[:3]}, {r.salt for r in world.decode.requests[3:]}
        assert (len(reds), len(blues)) == (1, 1)
        assert reds != blues
        for guess in ("red", *reds):  # a salt does not open the cache of another tenant
            assert await world.cached_tokens(BLUE, cache_salt=guess) == 0
            assert await world.cached_tokens(BLUE, cache_salt=guess) == 16


def admissions(decision: str, reason: str, tenant: str) -> float:
    labels = {"decision": decision, "reason": reason, "tenant": tenant}
    return metrics.REGISTRY.get_sample_value("baton_admission_total", labels) or 0.0


async def test_a_tenant_over_its_rate_gets_a_429_and_others_do_not(text, keys_file, tmp_path):
    before = admissions("refused", "rate_limited", "red"), admissions("admitted", "", "sea")
    limits = tmp_path / "tenants.toml"
    limits.write_text("[tenants.red]\nrequests_per_minute = 2\n")
    async with router(text, keys_file, tenants_file=limits, redis_url="memory://") as world:
        answers = [await world.complete(key) for key in (RED, OTHER_RED, RED)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert error_of(answers[2])["code"] == "rate_limited"
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30
        assert [answer.headers["x-ratelimit-limit-requests"] for answer in answers] == ["2"] * 3
        assert "x-ratelimit-limit-tokens" not in answers[0].headers
        other = await world.complete(BLUE)
        assert (other.status_code, "x-ratelimit-limit-requests" in other.headers) == (200, False)
    after = admissions("refused", "rate_limited", "red"), admissions("admitted", "", "sea")
    assert after == (before[0] + 1, before[1] + 1), "decisions are counted by tenant"


async def test_a_request_belongs_to_its_tenant(text, keys_file):
    async with router(text, keys_file) as world:
        id = (await world.complete(RED)).headers["x-baton-request-id"]
        for path in (f"/v1/requests/{id}", f"/v1/requests/{id}/stream"):
            assert (await world.client.get(path, headers=bearer(OTHER_RED))).status_code == 200
            asked = [path, path.replace(id, "x" * len(id))]
            refused = [await world.client.get(each, headers=bearer(BLUE)) for each in asked]
            told = [error_of(response)["message"].replace(id, "x" * len(id)) for response in refused]
            assert [response.status_code for response in refused] == [404, 404]
            assert told[0] == told[1], "a stranger's request looks as if there were none"


async def test_without_a_key_file_no_key_is_required(text):
    async with router(text, None) as world:
        assert await world.cached_tokens(None) == 0
        assert await world.cached_tokens(RED) == 16, "a key that nobody asked for changes nothing"
        assert await world.cached_tokens(None, cache_salt="s") == 0
        assert {request.salt for request in world.decode.requests[:2]} == {""}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no key"),
        ("# nobody\n\n", "holds no key"),
        (f"{make_entry('a', RED).line()}\nb secret", "line 2: is not <tenant> <64 hex digits>"),
        ("a", "line 1: is not"),
        (f"a b {'0' * 64}", "line 1: is not"),
        (f"a {'0' * 63}", "line 1: is not"),
        (f"a {'A' * 64}", "line 1: is not"),
        (f"a/b {'0' * 64}", "line 1: is not"),
        (f"{'a' * 65} {'0' * 64}", "line 1: is not"),
        (f"a {RED}", "line 1: is not"),
        (f"{make_entry('a', RED).line()}\n{make_entry('b', RED).line()}", "line 2: has the digest of an earlier line"),
        ("\udcff", "is not a text in UTF-8"),
    ],
    ids=range(12),
)
async def test_an_invalid_key_file_prevents_the_start(text, tmp_path, content: str, words: str):
    path = tmp_path / "keys"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(SettingsError) as refusal:
        await start_and_stop(text, path)
    assert words in str(refusal.value)
    assert str(path) in str(refusal.value)
    assert not [secret for secret in ("secret", RED, "0" * 63) if secret in str(refusal.value)]


async def test_a_missing_key_file_is_named(text, tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(BatonError, match=str(path)):
            await start_and_stop(text, path)


async def start_and_stop(text: TextModel, keys_file: Path) -> None:
    settings = RouterSettings(model=MODEL, port=0, api_keys_file=keys_file)
    with listen("127.0.0.1", 0) as sock:
        await run(settings, text, MemoryStore(StoreOptions()), sock, asyncio.Event())


def test_keys_are_long_and_unique():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(KEY_PREFIX) and len(key) == len(KEY_PREFIX) + 43 for key in keys)
