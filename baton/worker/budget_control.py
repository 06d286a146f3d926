"""Changes a worker's budgets while it runs: checks them, tells the engine, and announces them.

Used by `server` in the asyncio loop. Independent of the role, but for the budgets that a prefill worker lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from baton.domain.errors import InvalidRequest
from baton.domain.worker import WorkerBudgets, WorkerRole
from baton.engine.mailbox import Mailbox
from baton.engine.reply import Reply
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger

log = get_logger()

ENGINE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ChangeBudgets:
    """Command to either engine: new budgets, in force from the next step on; the reply says so."""

    budgets: WorkerBudgets
    reply: Reply[WorkerBudgets]


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """New values of some budgets; None leaves one as it is."""

    prefill_tokens: int | None = None
    rows: int | None = None
    reservations: int | None = None

    def apply(self, budgets: WorkerBudgets) -> WorkerBudgets:
        """`budgets` with the new values."""
        changed = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        return replace(budgets, **changed)


@dataclass(frozen=True, slots=True)
class BudgetRules:
    """Budgets that a worker of this role and page size can keep."""

    role: WorkerRole
    page_size: int

    def check(self, budgets: WorkerBudgets) -> None:
        """Raises `InvalidRequest`, which names the budget."""
        if self.role is WorkerRole.ENCODE and budgets != WorkerBudgets():
            raise InvalidRequest("a worker that was started as encode has no budgets", param="prefill_tokens")
        if 0 < budgets.prefill_tokens < self.page_size:
            message = f"prefill_tokens must be 0 or at least a page of {self.page_size}, or a prompt would not advance"
            raise InvalidRequest(message, param="prefill_tokens")
        if self.role is WorkerRole.PREFILL and (budgets.rows or budgets.reservations):
            param = "rows" if budgets.rows else "reservations"
            message = f"{param}: a worker that was started as prefill has no rows; one started as decode takes both"
            raise InvalidRequest(message, param=param)


class BudgetControl:
    """The budgets of one worker. Changes are made one after another."""

    def __init__(
        self,
        rules: BudgetRules,
        mailbox: Mailbox[Any],
        budgets: Callable[[], WorkerBudgets],
        announce: Callable[[], Awaitable[object]],
    ) -> None:
        """`budgets`: those in force in the engine. `announce` tells the routers; it must be bounded in time."""
        self._rules = rules
        self._mailbox = mailbox
        self._budgets = budgets
        self._announce = announce
        self._changing = asyncio.Lock()
        _show(budgets())

    async def change(self, change: BudgetChange) -> WorkerBudgets:
        """Puts new budgets in force, announces them and returns all.

        Raises `InvalidRequest` for budgets that this worker cannot keep, and `DeadlineExceeded` for a stuck engine.
        """
        async with self._changing:
            before = self._budgets()
            budgets = change.apply(before)
            self._rules.check(budgets)
            if budgets != before:
                budgets = await self._put_in_force(budgets)
                await self._announce()
                log.info("budgets_changed", **_fields(budgets, ""), **_fields(before, "_before"))
            return budgets

    async def _put_in_force(self, budgets: WorkerBudgets) -> WorkerBudgets:
        reply: Reply[WorkerBudgets] = Reply()
        self._mailbox.put(ChangeBudgets(budgets, reply))
        budgets = await reply.wait(ENGINE_TIMEOUT_S)
        _show(budgets)
        return budgets


def _fields(budgets: WorkerBudgets, end: str) -> dict[str, int | None]:
    return {
        f"prefill_tokens{end}": budgets.prefill_tokens,
        f"rows{end}": budgets.rows,
        f"reservations{end}": budgets.reservations,
    }


def _show(budgets: WorkerBudgets) -> None:
    reservations = budgets.rows if budgets.reservations is None else budgets.reservations
    for kind, value in (
        ("prefill_tokens", budgets.prefill_tokens),
        ("rows", budgets.rows),
        ("reservations", reservations),
    ):
        metrics.BUDGET.labels(kind).set(value)
