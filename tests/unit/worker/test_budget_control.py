"""Budgets are checked by name, put in force by the engine, then announced; one change after another."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from baton.domain.errors import InvalidRequest
from baton.domain.worker import WorkerBudgets, WorkerRole
from baton.engine.mailbox import Mailbox
from baton.telemetry.metrics import REGISTRY
from baton.worker.budget_control import BudgetChange, BudgetControl, BudgetRules, ChangeBudgets

PAGE = 16


@dataclass
class Worker:
    """An engine that obeys when it is told to, and the announcements."""

    role: WorkerRole = WorkerRole.DECODE
    budgets: WorkerBudgets = field(default_factory=lambda: WorkerBudgets(0, 8))
    mailbox: Mailbox[ChangeBudgets] = field(default_factory=lambda: Mailbox(8))
    announced: list[WorkerBudgets] = field(default_factory=list)

    def control(self) -> BudgetControl:
        return BudgetControl(BudgetRules(self.role, PAGE), self.mailbox, lambda: self.budgets, self.announce)

    async def announce(self) -> None:
        self.announced.append(self.budgets)

    def turn(self) -> int:
        commands = self.mailbox.take_all(0.0)
        for command in commands:
            self.budgets = command.budgets
            command.reply.send(command.budgets)
        return len(commands)


def test_what_is_not_given_stays():
    assert BudgetChange(rows=3).apply(WorkerBudgets(64, 8, 2)) == WorkerBudgets(64, 3, 2)
    assert BudgetChange(0, 0, 0).apply(WorkerBudgets(64, 8, 2)) == WorkerBudgets(0, 0, 0)
    assert BudgetChange().apply(WorkerBudgets(64, 8)) == WorkerBudgets(64, 8)


@pytest.mark.parametrize(
    ("role", "budgets", "param"),
    [
        (WorkerRole.DECODE, WorkerBudgets(PAGE - 1, 8), "prefill_tokens"),
        (WorkerRole.PREFILL, WorkerBudgets(1), "prefill_tokens"),
        (WorkerRole.PREFILL, WorkerBudgets(512, 1), "rows"),
        (WorkerRole.PREFILL, WorkerBudgets(512, 0, 1), "reservations"),
    ],
)
def test_a_budget_that_the_worker_cannot_keep_is_refused_by_name(role, budgets, param):
    with pytest.raises(InvalidRequest, match=param) as refusal:
        BudgetRules(role, PAGE).check(budgets)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    "budgets", [WorkerBudgets(0, 0, 0), WorkerBudgets(PAGE, 1), WorkerBudgets(10**6, 10**6, 10**6)]
)
def test_any_other_budget_is_kept(budgets):
    BudgetRules(WorkerRole.DECODE, PAGE).check(budgets)
    BudgetRules(WorkerRole.PREFILL, PAGE).check(WorkerBudgets(budgets.prefill_tokens))


async def test_budgets_are_announced_once_they_are_in_force():
    worker = Worker()
    control = worker.control()
    changing = asyncio.create_task(control.change(BudgetChange(prefill_tokens=64)))
    while not worker.turn():
        assert not worker.announced
        await asyncio.sleep(0)
    assert await changing == WorkerBudgets(64, 8)
    assert worker.announced == [WorkerBudgets(64, 8)]
    shown = [REGISTRY.get_sample_value("baton_budget", {"kind": kind}) for kind in ("prefill_tokens", "rows")]
    assert shown == [64, 8]


async def test_concurrent_changes_of_two_budgets_are_both_kept():
    """Each change is of what the one before has left, even though the engine answers late."""
    worker = Worker()
    control = worker.control()
    changes = [
        asyncio.create_task(control.change(change))
        for change in (BudgetChange(prefill_tokens=64), BudgetChange(rows=3), BudgetChange(reservations=2))
    ]
    while not all(change.done() for change in changes):
        worker.turn()
        await asyncio.sleep(0)
    assert worker.budgets == WorkerBudgets(64, 3, 2)
    assert worker.announced[-1] == worker.budgets


async def test_reading_and_refused_changes_touch_neither_engine_nor_registry():
    worker = Worker(WorkerRole.PREFILL, WorkerBudgets(512))
    control = worker.control()
    assert await control.change(BudgetChange()) == WorkerBudgets(512)
    with pytest.raises(InvalidRequest):
        await control.change(BudgetChange(rows=4))
    assert not worker.turn()
    assert not worker.announced
