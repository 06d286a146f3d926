"""`baton up --demo`: the page kills and drains workers; no other page and no other router can."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.services.cli.processes.child_command import ChildCommand
from baton.services.cli.processes.demo_control import DemoServer
from baton.services.cli.processes.supervisor import Supervisor
from tests.service.cluster.live_router import TIMEOUT_S, live_router

pytestmark = pytest.mark.timeout(60)

WAITS = "import signal; signal.sigwait({signal.SIGTERM})"
ACTIONS = "/v1/cluster/actions"
OWN = {"x-baton-demo": "1"}


@pytest.fixture
async def demo(tmp_path: Path):
    """A supervisor with a worker and a router, its socket, and a real router that uses it."""
    socket = tmp_path / "control"
    async with Supervisor(tmp_path) as supervisor, DemoServer(supervisor).serving(socket):
        for name in ("decode-0", "router"):
            await supervisor.start(ChildCommand(name, (sys.executable, "-c", WAITS), {}))
        async with live_router(num_decode=1, demo_socket=socket) as router:
            yield supervisor, router


async def post(router: Any, action: str, worker: str, headers: dict[str, str] | None = None) -> Any:
    sent = OWN if headers is None else headers
    return await router.client.post(ACTIONS, json={"action": action, "worker": worker}, headers=sent)


async def test_a_worker_is_killed_and_its_end_is_no_fault(demo):
    supervisor, router = demo
    assert (await router.snapshot())["demo"] is True
    worker = supervisor.children[0]
    assert (await post(router, "kill", "decode-0")).json() == {"error": ""}
    ended = await asyncio.wait_for(supervisor.first_exit(), TIMEOUT_S)
    assert (ended, ended.process.returncode) == (worker, -9)
    assert ended in supervisor.asked, "baton up starts it again without counting it"
    again = await supervisor.restart(ended)
    assert again not in supervisor.asked
    assert supervisor.asked == set()


async def test_a_drain_is_a_sigterm(demo):
    supervisor, router = demo
    assert (await post(router, "drain", "decode-0")).status_code == 200
    ended = await asyncio.wait_for(supervisor.first_exit(), TIMEOUT_S)
    assert ended.process.returncode in (0, -15)


@pytest.mark.parametrize("role", ["prefill", "encode"])
async def test_workers_of_every_role_can_be_ended(demo, role: str):
    supervisor, router = demo
    child = await supervisor.start(ChildCommand(f"{role}-1", (sys.executable, "-c", WAITS), {}))
    assert (await post(router, "kill", child.name)).json() == {"error": ""}
    assert await asyncio.wait_for(supervisor.first_exit(), TIMEOUT_S) is child


@pytest.mark.parametrize(("action", "worker"), [("kill", "router"), ("kill", "decode-9"), ("eat", "decode-0")])
async def test_anything_else_is_refused(demo, action: str, worker: str):
    supervisor, router = demo
    assert (await post(router, action, worker)).status_code == 400
    assert all(child.running for child in supervisor.children)


@pytest.mark.parametrize(
    "headers",
    [{}, {**OWN, "origin": "https://evil.example"}, {**OWN, "host": "evil.example:80"}, {**OWN, "origin": "null"}],
)
async def test_another_page_cannot_act(demo, headers: dict[str, str]):
    supervisor, router = demo
    assert (await post(router, "kill", "decode-0", headers)).status_code == 400
    assert all(child.running for child in supervisor.children)
    same = {**OWN, "origin": router.url}
    assert (await post(router, "kill", "decode-0", same)).status_code == 200


async def test_a_router_without_a_demo_has_no_actions(tmp_path: Path):
    async with live_router(num_decode=1) as router:
        assert (await router.snapshot())["demo"] is False
        assert (await post(router, "kill", "decode-0")).status_code == 404


async def test_a_control_that_is_gone_is_told(tmp_path: Path):
    async with live_router(num_decode=1, demo_socket=tmp_path / "nothing") as router:
        answer = await post(router, "kill", "decode-0")
        assert (answer.status_code, "does not answer" in answer.text) == (503, True)
