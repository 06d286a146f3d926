"""The end of a worker process: the order of its steps, the drain, and faults that cut it short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from baton.domain.worker import WorkerStatus
from baton.worker import lifecycle as lifecycle_module
from baton.worker.lifecycle import WorkerLifecycle
from baton.worker.registration import Registration, RegistrationLoss

SOON_S = 10.0
NEVER_S = 600.0


class Worker:
    """A lifecycle with requests to finish; records its steps."""

    def __init__(self, num_requests: int = 0) -> None:
        self.lifecycle = WorkerLifecycle(asyncio.Event())
        self.num_requests = num_requests
        self.diary: list[str] = []
        self.announced = asyncio.Event()

    async def announce(self) -> None:
        self.diary.append(f"announced {self.lifecycle.status.value}")
        self.announced.set()

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def withdraw(self) -> None:
        self.diary.append("left")

    async def close(self) -> None:
        self.diary.append("closed")

    def live(self, timeout_s: float = NEVER_S) -> asyncio.Task[None]:
        return asyncio.create_task(
            self.lifecycle.run(
                cast(Registration, self), num_requests=lambda: self.num_requests, drain_timeout_s=timeout_s,
                close=self.close,
            )
        )  # fmt: skip


async def ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait_for(task, SOON_S)


async def test_draining_is_announced_first_and_withdrawal_comes_last():
    worker = Worker(num_requests=1)
    life = worker.live()
    worker.lifecycle.stop()
    await asyncio.wait_for(worker.announced.wait(), SOON_S)
    assert worker.lifecycle.draining
    assert not life.done()
    worker.num_requests = 0
    worker.lifecycle.on_idle()
    await ended(life)
    assert worker.diary == ["announced draining", "closed", "left"]
    assert worker.lifecycle.exit_code == 0


async def test_a_drain_counts_requests_again_after_it_was_idle():
    """A request may arrive between the wake-up and the count."""
    worker = Worker(num_requests=2)
    life = worker.live()
    worker.lifecycle.stop()
    await asyncio.wait_for(worker.announced.wait(), SOON_S)
    worker.lifecycle.on_idle()
    done, _ = await asyncio.wait([life], timeout=0.05)
    assert not done
    worker.num_requests = 0
    worker.lifecycle.on_idle()
    await ended(life)


async def test_a_drain_ends_at_its_timeout():
    worker = Worker(num_requests=1)
    life = worker.live(timeout_s=0.05)
    worker.lifecycle.stop()
    await ended(life)
    assert worker.diary[-2:] == ["closed", "left"]
    assert worker.lifecycle.exit_code == 0


FAULTS = [
    lambda one: one.on_crash(RuntimeError("engine")),
    lambda one: one.on_registration_lost(RegistrationLoss.REPLACED),
]


@pytest.mark.parametrize("fault", FAULTS, ids=["crashed", "replaced"])
@pytest.mark.parametrize("draining", [False, True])
async def test_a_fault_ends_the_process_without_a_drain(fault: Callable[[WorkerLifecycle], None], draining: bool):
    """Without an engine a drain has nothing to wait for."""
    worker = Worker(num_requests=1)
    life = worker.live()
    if draining:
        worker.lifecycle.stop()
        await asyncio.wait_for(worker.announced.wait(), SOON_S)
    fault(worker.lifecycle)
    await ended(life)
    assert worker.lifecycle.exit_code == 1
    assert worker.diary[-2:] == ["closed", "left"]


async def test_a_task_that_fails_ends_the_process():
    worker = Worker()

    async def fails() -> None:
        raise ValueError("ours")

    live = worker.lifecycle.run(
        cast(Registration, worker), fails(), num_requests=lambda: 0, drain_timeout_s=NEVER_S, close=worker.close
    )
    await asyncio.wait_for(live, SOON_S)
    assert worker.lifecycle.exit_code == 1


async def test_a_worker_is_ready_until_it_drains():
    worker = Worker()
    life = worker.live()
    assert worker.lifecycle.status is WorkerStatus.READY
    worker.lifecycle.stop()
    await ended(life)
    assert worker.lifecycle.drained.is_set()


async def test_an_unfit_worker_drains_and_ends_with_an_error():
    """Its memory is faulty: nothing new is placed on it, and its supervisor starts another process."""
    worker = Worker(num_requests=1)
    life = worker.live()
    worker.lifecycle.on_unfit()
    await asyncio.wait_for(worker.announced.wait(), SOON_S)
    assert worker.diary == ["announced draining"]
    worker.num_requests = 0
    worker.lifecycle.on_idle()
    await ended(life)
    assert worker.lifecycle.exit_code == 1


async def test_a_task_that_swallows_a_cancellation_ends_all_the_same(monkeypatch: pytest.MonkeyPatch):
    """As a library does whose own timeout meets it: without a second cancellation the process would never end."""
    monkeypatch.setattr(lifecycle_module, "CANCEL_AGAIN_S", 0.01)
    num_cancelled, began = 0, asyncio.Event()

    class Stubborn(Worker):
        async def run(self) -> None:
            nonlocal num_cancelled
            began.set()
            while num_cancelled < 3:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    num_cancelled += 1

    worker = Stubborn()
    living = worker.live()
    await began.wait()
    worker.lifecycle.stop()
    await ended(living)
    assert num_cancelled == 3
    assert worker.diary[-1] == "left"
