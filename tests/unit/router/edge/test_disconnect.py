"""Work on a request ends with its client, its time, or a client that does not read; and the task stays usable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from baton.domain.errors import Cancelled, DeadlineExceeded
from baton.services.router.edge.disconnect import CONNECTION, ClientTooSlow, cancel_on_disconnect, join_tasks

LONG_S = 60.0


class Connection:
    """The connection of a request, as `BoundedHttpProtocol` is one. `lose` ends it."""

    def __init__(self) -> None:
        self.too_slow = self.lost = False
        self.on_lost: Callable[[], None] | None = None

    def has_body(self, scope: Any) -> bool:
        return True

    def hang_up(self) -> None:
        self.too_slow = True
        self.lose()

    def lose(self) -> None:
        self.lost = True
        if self.on_lost is not None:
            self.on_lost()


class Work:
    """Waits for the test. `closed`: its cleanup ran to its end."""

    def __init__(self) -> None:
        self.started, self.may_end = asyncio.Event(), asyncio.Event()
        self.num_tasks = 0
        self.closed = False

    async def run(self) -> str:
        try:
            self.num_tasks = len(asyncio.all_tasks())
            self.started.set()
            await self.may_end.wait()
            return "done"
        finally:
            await asyncio.sleep(0)  # a cleanup that waits is not cancelled again
            self.closed = True


class Exchange:
    """A request in a task of its own."""

    def __init__(self, connection: Connection | None, timeout_s: float = LONG_S) -> None:
        self.work, self.connection = Work(), connection
        self.too_slow: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.disconnected = asyncio.Event()
        self.scope: dict[str, Any] = {"extensions": {} if connection is None else {CONNECTION: connection}}
        self.num_tasks_before = len(asyncio.all_tasks())
        self.task = asyncio.create_task(self._run(timeout_s))

    async def _run(self, timeout_s: float) -> str:
        try:
            return await cancel_on_disconnect(self.scope, self._receive, self.work.run(), timeout_s, self.too_slow)
        except (Cancelled, DeadlineExceeded):
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancelling(), "a timeout around the response would take it for its own cancel"
            await asyncio.sleep(0)  # the task can go on: it sends the error
            raise

    async def _receive(self) -> dict[str, Any]:
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def result(self) -> str:
        return await asyncio.wait_for(self.task, 5)


async def test_the_result_is_that_of_the_work_in_the_task_of_its_request() -> None:
    exchange = Exchange(Connection())
    await exchange.work.started.wait()
    assert exchange.work.num_tasks == exchange.num_tasks_before + 1, "the request's own task and no other"
    exchange.work.may_end.set()
    assert await exchange.result() == "done"
    assert exchange.connection is not None
    assert exchange.connection.on_lost is None


async def test_a_connection_that_is_lost_cancels() -> None:
    exchange = Exchange(connection := Connection())
    await exchange.work.started.wait()
    connection.lose()
    with pytest.raises(Cancelled, match="disconnected"):
        await exchange.result()
    assert exchange.work.closed


async def test_a_connection_that_was_lost_before_cancels_what_has_begun() -> None:
    (connection := Connection()).lose()
    exchange = Exchange(connection)
    with pytest.raises(Cancelled):
        await exchange.result()
    assert exchange.work.started.is_set()
    assert exchange.work.closed


async def test_a_server_without_calls_is_asked_for_the_disconnect() -> None:
    exchange = Exchange(None)
    await exchange.work.started.wait()
    exchange.disconnected.set()
    with pytest.raises(Cancelled):
        await exchange.result()
    assert len(asyncio.all_tasks()) == 1, "the task that asked has ended"


async def test_the_time_of_the_work_is_bounded() -> None:
    exchange = Exchange(Connection(), 0.01)
    with pytest.raises(DeadlineExceeded):
        await exchange.result()
    assert exchange.work.closed


async def test_a_client_that_reads_too_slowly_is_hung_up() -> None:
    exchange = Exchange(connection := Connection())
    await exchange.work.started.wait()
    exchange.too_slow.set_result(None)
    with pytest.raises(ClientTooSlow, match="unread"):
        await exchange.result()
    assert connection.too_slow


async def test_a_client_that_the_connection_hung_up_is_too_slow() -> None:
    exchange = Exchange(connection := Connection())
    await exchange.work.started.wait()
    connection.hang_up()
    with pytest.raises(ClientTooSlow, match="no byte"):
        await exchange.result()


async def test_a_server_that_stops_still_cancels() -> None:
    exchange = Exchange(connection := Connection(), LONG_S)
    await exchange.work.started.wait()
    exchange.task.cancel()
    connection.lose()
    with pytest.raises(asyncio.CancelledError):
        await exchange.result()


async def test_an_error_of_the_work_comes_out_even_beside_a_disconnect() -> None:
    connection = Connection()

    async def failing() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("cleanup")

    scope = {"extensions": {CONNECTION: connection}}
    asyncio.get_running_loop().call_soon(connection.lose)
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(ValueError, match="cleanup"):
        await cancel_on_disconnect(scope, lambda: asyncio.sleep(0, {}), failing(), LONG_S, never)
    await asyncio.sleep(0)  # not cancelled any more


async def test_ended_tasks_are_joined_without_a_pass_of_the_loop():
    failed = asyncio.create_task(_fail())
    await asyncio.wait((failed,))
    passed: list[bool] = []
    asyncio.get_running_loop().call_soon(passed.append, True)
    await join_tasks((failed,))
    assert passed == []
    assert not failed._log_traceback  # its error counts as retrieved


async def test_running_tasks_are_waited_for():
    work = Work()
    running, ended = asyncio.create_task(work.run()), asyncio.create_task(_fail())
    await asyncio.wait((ended,))
    asyncio.get_running_loop().call_soon(work.may_end.set)
    await join_tasks((running, ended))
    assert work.closed


async def _fail() -> None:
    raise RuntimeError("failed")
