"""`baton top` reads what a real router shows."""

from __future__ import annotations

import asyncio

import pytest

from baton.services.cli.top.screen import ScreenOptions, draw
from baton.services.cli.top.snapshot_reader import SnapshotReader
from tests.mock_workers import Hold, Phase, ScriptedAction
from tests.service.takeover.router_cluster import TIMEOUT_S, opened, router_cluster

pytestmark = pytest.mark.timeout(60)


async def test_workers_links_and_an_open_request_are_on_the_screen(tmp_path):
    held = [ScriptedAction(Phase.DECODE, Hold(), index=2)]
    async with router_cluster(tmp_path, num_routers=1, decode=held) as w, asyncio.timeout(TIMEOUT_S):
        reader = SnapshotReader([str(w.routers[0].http.base_url)], None)
        async with opened(w.routers[0], max_tokens=8) as stream:
            await stream.take(2)
            text = draw(await reader.read(), ScreenOptions(), keys=False).plain
            assert stream.call_id[:20] in text
            w.decode.release()
            await stream.rest()
        await reader.close()
    assert " prefill prefill-0 ready" in text
    assert "prefill-0 > decode-0 up" in text
    assert "decoding" in text
