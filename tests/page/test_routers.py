"""The page of one router shows the requests of the others, and a router that left no more."""

from __future__ import annotations

import pytest

from tests.mock_workers import Hold, Phase, ScriptedAction
from tests.page.browser import Opener, axe_violations, watched_router
from tests.redis_server import running_redis
from tests.service.cluster.live_router import live_router

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


async def test_requests_of_another_router_are_in_the_lanes(opened: Opener):
    from playwright.async_api import expect

    with running_redis() as server:
        async with watched_router(opened, router_id="a", redis_url=server.url, num_decode=1) as (a, open_page):
            page = await open_page()
            async with live_router(router_id="b", redis_url=server.url, beside=a) as b:
                decode = a.mock.decodes[0]
                decode.script = [ScriptedAction(Phase.DECODE, Hold(), index=2)]
                async with b.client.stream("POST", "/v1/completions", json=BODY) as answer:
                    id = answer.headers["x-baton-request-id"]
                    await expect(page.locator(f'.chip[title="{id}"]')).to_be_visible()
                    routers = page.get_by_label("Routers")
                    await expect(routers.locator('[data-router="b"]')).to_contain_text("b: 1 open")
                    assert await axe_violations(page) == []
                    decode.release()
                    await answer.aread()
                panel = page.get_by_label("One request")  # its stages come from the store
                await expect(panel).to_contain_text("E2E")
            await expect(page.locator('[data-router="b"]')).to_have_count(0)


BODY = {"model": "mock", "prompt": list(range(100, 117)), "max_tokens": 4, "stream": True}
