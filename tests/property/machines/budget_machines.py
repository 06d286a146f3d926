"""The machines of both schedulers with one more rule: an operator changes the budgets at any moment."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from baton.domain.worker import WorkerBudgets
from baton.services.decode.kv_import import Busy
from tests.property.machines.decode_checks import MAX_ROWS
from tests.property.machines.decode_machine import PROMPTS, DecodeMachine
from tests.property.machines.prefill_machine import PrefillMachine
from tests.tiny_workers import PAGE_SIZE, engine_request

BUDGETS = st.builds(
    WorkerBudgets,
    st.sampled_from([0, PAGE_SIZE, 5]),
    st.integers(0, MAX_ROWS),
    st.sampled_from([None, *range(MAX_ROWS + 1)]),
)


class BudgetedDecodeMachine(DecodeMachine):
    """What is above a lowered budget goes on, and nothing new comes until there is room below it."""

    def __init__(self) -> None:
        super().__init__()
        self.most_held = MAX_ROWS  # imports and rows
        self.most_imports = MAX_ROWS

    @rule(budgets=BUDGETS)
    def change_budgets(self, budgets: WorkerBudgets) -> None:
        before = [*self.world.imports.ids(), *self.world.scheduler.ids()]
        self.world.import_policy.change_budgets(budgets)
        self.budgets = budgets
        assert self.world.import_policy.budgets == budgets
        assert [*self.world.imports.ids(), *self.world.scheduler.ids()] == before
        self.most_held, self.most_imports = self._held(), len(self.world.imports)

    @precondition(lambda self: not self.budgets.takes_prompts)
    @rule(prompt=PROMPTS)
    def ask_for_a_local_prompt(self, prompt: list[int]) -> None:
        """Without a budget for prompts none is promised room, not even on an idle worker."""
        request = engine_request(f"refused{next(self.names)}", prompt)
        policy = self.world.import_policy
        answer, effects = policy.reserve(request.id, len(prompt), [], self.now, 5.0, computes_prompt=True)
        policy.abort(request.id)
        assert not effects
        assert isinstance(answer, Busy)
        assert answer.no_prompts

    @invariant()
    def nothing_is_taken_above_a_budget(self) -> None:
        held, num_imports = self._held(), len(self.world.imports)
        reservations = self.budgets.rows if self.budgets.reservations is None else self.budgets.reservations
        assert held <= max(self.budgets.rows, self.most_held)
        assert num_imports <= max(reservations, self.most_imports)
        self.most_held, self.most_imports = min(self.most_held, held), min(self.most_imports, num_imports)

    def _held(self) -> int:
        return len(self.world.imports) + self.world.scheduler.num_rows


class BudgetedPrefillMachine(PrefillMachine):
    """A prompt in progress gets at least a page of the next step, whatever the budget becomes."""

    @rule(num_tokens=st.sampled_from([PAGE_SIZE, 3, 2 * PAGE_SIZE, 16]))
    def change_token_budget(self, num_tokens: int) -> None:
        num_prompts = self.world.scheduler.num_waiting + self.world.scheduler.num_chunking
        self.world.scheduler.change_token_budget(num_tokens)
        self.token_budget = num_tokens
        assert self.world.scheduler.num_waiting + self.world.scheduler.num_chunking == num_prompts
