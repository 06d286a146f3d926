"""The place of one request in the admission queue, and what it is expected to cost. Values; time is an argument.

A charge is in tokens: 1 for a prompt token that is not cached, `OUTPUT_CHARGE` for an output token.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.errors import Overloaded
from baton.domain.values.quick_init import quick_init

OUTPUT_CHARGE = 2.0
"""Charge of an output token. It costs more than a prompt token, because a step computes fewer of them."""

PRIORITY_S = 10.0
"""A request overtakes those of one priority less that came up to this much earlier."""

SLOT_BYTES, TOKEN_BYTES = 32 * 1024, 48
"""Memory of a waiting request, and of each token of its prompt: pointer, integer, text."""


@quick_init
@dataclass(frozen=True, slots=True)
class SlotSpec:
    """A request as the admission queue sees it. `num_tokens` of prompt; `max_tokens` bounds the output."""

    tenant: str = ""
    num_tokens: int = 0
    max_tokens: int = 1
    priority: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory while it waits."""
        return SLOT_BYTES + TOKEN_BYTES * self.num_tokens


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one admitted request.

    `order`: arrival, moved forward or back by the priority; smaller starts first within a tenant. `started_at` is None
    until it starts. `forced`: it was admitted whatever the bounds, and stays. `charged`: tokens so far, of the
    `expected_charge`. `refusal`: set when it had to leave the queue. `suspended_at`: when it was suspended; None once
    it runs again. The times do not count what passed between.
    """

    spec: SlotSpec
    order: float
    forced: bool = False
    started_at: float | None = None
    has_first_token: bool = False
    first_token_at: float = 0.0
    last_tokens_at: float = 0.0
    num_output_tokens: int = 0
    expected_charge: float = 0.0
    charged: float = 0.0
    refusal: Overloaded | None = None
    suspended_at: float | None = None

    @property
    def remaining_charge(self) -> float:
        """What it is expected to be charged still."""
        return max(0.0, self.expected_charge - self.charged)

    def start_again(self, now: float) -> float:
        """Moves the times of a slot that had started on by the time that it was suspended, and returns its start."""
        gap_s = 0.0 if self.suspended_at is None else now - self.suspended_at
        self.suspended_at = None
        self.first_token_at += gap_s
        self.last_tokens_at += gap_s
        self.started_at = (self.started_at or 0.0) + gap_s
        return self.started_at

    @property
    def num_served_tokens(self) -> int:
        """Prompt tokens that were not cached, and output tokens."""
        return round(self.charged - (OUTPUT_CHARGE - 1.0) * self.num_output_tokens)


def order_of(priority: int, arrived_at: float) -> float:
    """Rank of a request within its tenant. Ageing is part of it: a later one of higher priority comes after."""
    return arrived_at - PRIORITY_S * priority
