"""Budgets change at random moments: the schedulers keep all their invariants, and nothing is dropped.

Each planted bug breaks one rule of a budget.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from baton.domain.worker import WorkerBudgets
from baton.services.decode.import_policy import ImportPolicy
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import ImportLimits
from baton.services.prefill.policy import PolicySettings, PrefillPolicy
from tests.property.machines.budget_machines import BudgetedDecodeMachine, BudgetedPrefillMachine
from tests.tiny_workers import PLANTED_BUG_SETTINGS, REPEATABLE_SETTINGS


class OrderedMachine(BudgetedPrefillMachine):
    """Short prompts overtake long ones."""

    order = PolicySettings(PrefillPolicy.SRPT, max_overtakes=2)


def test_decode_side_with_budgets_that_change():
    run_state_machine_as_test(
        BudgetedDecodeMachine, settings=settings(REPEATABLE_SETTINGS, max_examples=60, stateful_step_count=50)
    )


@pytest.mark.parametrize("machine", [BudgetedPrefillMachine, OrderedMachine])
def test_prefill_scheduler_with_budgets_that_change(machine: type[BudgetedPrefillMachine]):
    run_state_machine_as_test(machine, settings=REPEATABLE_SETTINGS)


class DropsWhatIsAbove(ImportPolicy):
    """Ends imports above a lowered budget."""

    def change_budgets(self, budgets: WorkerBudgets) -> None:
        super().change_budgets(budgets)
        for id in self._imports.ids()[budgets.rows :]:
            self._imports.abort(id)


class ForgetsRows(ImportTable):
    """Counts imports only against a lowered bound of rows."""

    def reserve(self, id, num_tokens, keys, num_rows, now, deadline_s, computes_prompt=False):
        return super().reserve(id, num_tokens, keys, 0, now, deadline_s, computes_prompt)


class IgnoresReservations(ImportPolicy):
    """Puts only the other budgets in force, but reports all."""

    def change_budgets(self, budgets: WorkerBudgets) -> None:
        super().change_budgets(replace(budgets, reservations=None))
        self._told = budgets

    @property
    def budgets(self) -> WorkerBudgets:
        return self._told


class TakesPromptsWithoutBudget(ImportPolicy):
    """Reserves room for local prompts whatever the budget."""

    def reserve(self, *arguments, computes_prompt: bool = False, **named):
        return super().reserve(*arguments, **named)


def planted(**replacements: object) -> type[BudgetedDecodeMachine]:
    return type("Planted", (BudgetedDecodeMachine,), replacements)


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(planted(import_policy=DropsWhatIsAbove), id="drop"),
        pytest.param(planted(import_table=ForgetsRows), id="rows-forgotten"),
        pytest.param(planted(import_policy=IgnoresReservations), id="reservations-ignored"),
        pytest.param(planted(import_policy=TakesPromptsWithoutBudget), id="prompts-taken"),
    ],
)
def test_planted_bug_is_found(machine: type[BudgetedDecodeMachine]):
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=PLANTED_BUG_SETTINGS)


def test_a_row_is_free_below_both_bounds():
    limits = ImportLimits(2, max_rows=3, max_window_pages=1, pull_deadline_s=1.0)
    assert limits.has_row(num_rows=2, num_imports=0)
    assert not limits.has_row(num_rows=2, num_imports=1)
    assert not replace(limits, max_reservations=1).has_row(num_rows=0, num_imports=1)
    assert replace(limits, max_reservations=1).has_row(num_rows=2, num_imports=0)
