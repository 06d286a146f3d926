"""Decides which rows of a decode step extend drafts, and how many. Called by the scheduler; pure.

Drafts take what nothing else needs: the rest of the token budget, slots in pages that a row has, and free pages that no
running row will want next. So they preempt nothing, evict nothing and delay no chunk.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.domain.ids import AttemptId
from baton.domain.request import EngineRequest
from baton.domain.timing.step_time import StepShape
from baton.engine.drafts.acceptance import AcceptanceModel
from baton.engine.drafts.base import (
    DRAFT_PLACEHOLDER,
    NO_PROPOSAL,
    Drafter,
    Proposal,
    draft_path,
    first_chain,
    num_off_chain,
    simplest,
)
from baton.engine.drafts.budget import DraftBudget, DraftOption
from baton.engine.drafts.hidden_media import hide_media, num_drafted_tokens
from baton.kv.pages import PagePool

MAX_DRAFT_TOKENS = 15
"""Most drafts of a row and step: with its own token they are the 16 whose bits are those of single ones."""


class DraftSkipReason(enum.StrEnum):
    """Why a running row extended no drafts in a step.

    LOAD: the budget gave none. NO_MATCH: the drafter proposed none. CONSTRAINT: the row's grammar forbids the first.
    LIMIT: its output ends with the next token. PAGES: there is neither a slot nor a spare page. TOKENS: the token
    budget is used up. PREEMPTED: rows wait for pages.
    """

    LOAD = "load"
    NO_MATCH = "no_match"
    CONSTRAINT = "constraint"
    LIMIT = "limit"
    PAGES = "pages"
    TOKENS = "tokens"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What a row could take: `max_tokens` before its output is full, `num_slots` of them in pages that it has.

    `tokens`: its own, prompt and output; all but the last are in place.
    """

    request: EngineRequest
    tokens: Sequence[int]
    max_tokens: int
    num_slots: int

    @classmethod
    def of(cls, request: EngineRequest, tokens: Sequence[int], num_slots: int) -> DraftLimits:
        """The limits of a row that has `tokens`, and pages of `num_slots` slots."""
        max_tokens = request.num_prompt_tokens + request.stop.max_tokens - len(tokens) - 1
        return cls(request, tokens, max_tokens, num_slots - len(tokens))

    @property
    def id(self) -> AttemptId:
        return self.request.id

    @property
    def start(self) -> int:
        """Tokens in place."""
        return len(self.tokens) - 1


class DraftConstraints(Protocol):
    """Tells what of a proposal a row's constraint allows."""

    def num_allowed(self, request: EngineRequest, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of `drafts` may follow `tokens`, prompt and output of `request`."""
        ...


@dataclass(slots=True)
class DraftTotals:
    """Counts since the start. `accepted_at[n]`: steps that accepted the draft at place n of a row.

    `num_off_chain`: accepted drafts of trees that a chain would not have had: a node before or at them has siblings
    before it.
    """

    num_proposals: int = 0
    num_drafts: int = 0
    num_off_chain: int = 0
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    skipped: dict[DraftSkipReason, int] = field(default_factory=lambda: dict.fromkeys(DraftSkipReason, 0))

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_at)

    def copy(self) -> DraftTotals:
        """The counts as they are now."""
        counts = self.num_proposals, self.num_drafts, self.num_off_chain
        return DraftTotals(*counts, list(self.accepted_at), dict(self.skipped))


class DraftPolicy:
    """Asks one drafter for the rows of each step, and cuts what it proposes to what pays."""

    def __init__(
        self,
        drafter: Drafter,
        max_tokens: int,
        page_size: int,
        pool: PagePool,
        budget: DraftBudget | None = None,
        constraints: DraftConstraints | None = None,
    ) -> None:
        """`max_tokens`: most drafts of a row and step. `budget` None: all that is proposed and fits.

        `constraints` None: proposals of constrained rows are not cut.
        """
        self.allows_trees = True
        """False: a tree is cut to its chain of first children."""
        self._drafter = drafter
        self._pool = pool
        self._max_tokens = min(max_tokens, MAX_DRAFT_TOKENS)
        self._page_size = page_size
        self._budget = budget
        self._constraints = constraints
        self._acceptance = AcceptanceModel()
        self._planned: dict[AttemptId, Proposal] = {}  # the drafts in the step under way
        self.totals = DraftTotals()

    def begin(self, request: EngineRequest, tokens: Sequence[int]) -> None:
        """A row joins the batch for the first time."""
        self._drafter.begin(request.id, hide_media(tokens, request.media), request.salt)
        if self._budget is not None:
            self._budget.add_row()

    def end(self, id: AttemptId) -> None:
        """A row has ended."""
        self._drafter.end(id)
        self._acceptance.end(id)
        self._planned.pop(id, None)

    def accepted(self, id: AttemptId, tokens: Sequence[int], num_drafts: int, path: Sequence[int] = ()) -> None:
        """A step gave the row `tokens`, after `num_drafts` drafts: all but the last were among these.

        `path`: the nodes of a planned tree that these drafts are.
        """
        if num_drafts:
            num_accepted = len(tokens) - 1
            for place in range(num_accepted):
                self.totals.accepted_at[place] += 1
            proposal = self._planned.get(id, NO_PROPOSAL)
            if proposal.parents:
                self.totals.num_off_chain += num_off_chain(proposal.parents, path[:num_accepted])
                self._acceptance.observe_tree(id, proposal, path[:num_accepted])
            else:
                self._acceptance.observe(id, proposal.grade, num_drafts, num_accepted)
        self._drafter.accepted(id, tokens)

    def skip(self, reason: DraftSkipReason, num_rows: int) -> None:
        """Counts rows that were not asked for drafts."""
        self.totals.skipped[reason] += num_rows

    def asks(self, shape: StepShape, num_rows: int, *, rows_wait: bool = False) -> bool:
        """Begins a step with so many rows; True if it may have drafts, which `plan` gives.

        `shape`: the step without drafts. `rows_wait`: preempted rows wait for pages.
        """
        self._acceptance.begin_step()
        if rows_wait:
            self.skip(DraftSkipReason.PREEMPTED, num_rows)
        elif self._budget is not None and not self._budget.worth_asking(shape, num_rows, self._acceptance.highest):
            self.skip(DraftSkipReason.LOAD, num_rows)
        else:
            return True
        return False

    def plan(
        self, rows: Sequence[DraftLimits], shape: StepShape, num_step_tokens: int | None, num_spare_pages: int
    ) -> list[Proposal]:
        """The drafts of each row, perhaps none.

        `shape`: the step without drafts. `num_step_tokens`: tokens that it may have besides; None: any number.
        `num_spare_pages`: pages that nothing else needs; of these only free ones are taken, so that none is evicted
        from the prefix cache.
        """
        left = self._max_tokens * len(rows) if num_step_tokens is None else num_step_tokens
        spare = min(num_spare_pages, self._pool.num_free)
        proposals = []
        for row in rows:
            proposal = self._propose(row, left, spare)
            left -= len(proposal.tokens)
            spare -= len(proposal.tokens) > row.num_slots
            proposals.append(proposal)
        return self._cut(rows, proposals, shape)

    def _propose(self, row: DraftLimits, num_step_tokens: int, num_spare_pages: int) -> Proposal:
        """What the drafter proposes, cut to the row's limits. With a spare page, a row may reach into one more."""
        num_slots = row.num_slots + (self._page_size if num_spare_pages > 0 else 0)
        limit = min(self._max_tokens, row.max_tokens, num_slots, num_step_tokens)
        if limit <= 0:
            self.skip(_reason(row, num_slots), 1)
            return NO_PROPOSAL
        proposal = self._drafter.propose(row.id, limit)
        if not proposal.tokens:
            self.skip(DraftSkipReason.NO_MATCH, 1)
            return NO_PROPOSAL
        if proposal.parents and self.allows_trees:
            return self._tree(row, proposal, limit)
        if proposal.parents:
            proposal = first_chain(proposal, limit)
        is_known = proposal.tokens[0] != DRAFT_PLACEHOLDER
        if is_known and row.request.media:
            limit = min(limit, num_drafted_tokens(proposal.tokens))
            if limit == 0:
                self.skip(DraftSkipReason.NO_MATCH, 1)
                return NO_PROPOSAL
        if is_known and row.request.constraint is not None and self._constraints is not None:
            limit = min(limit, self._constraints.num_allowed(row.request, row.tokens, proposal.tokens[:limit]))
            if limit == 0:
                self.skip(DraftSkipReason.CONSTRAINT, 1)
        return proposal.first(limit)

    def _tree(self, row: DraftLimits, proposal: Proposal, limit: int) -> Proposal:
        """The `limit` most probable nodes of a tree, the best first; the row's constraint allows their paths.

        Equal chances keep their order, and no node is likelier than its parent: so each comes behind its parent.
        """
        allowed = self._allowed_nodes(row, proposal)
        if not allowed:
            constrained = row.request.constraint is not None and proposal.tokens[0] >= 0
            self.skip(DraftSkipReason.CONSTRAINT if constrained else DraftSkipReason.NO_MATCH, 1)
            return NO_PROPOSAL
        proposal = proposal.only(allowed)
        chances = self._acceptance.chances(row.id, proposal)
        best = sorted(range(len(chances)), key=lambda node: -chances[node])
        return proposal.only(best[:limit])

    def _allowed_nodes(self, row: DraftLimits, proposal: Proposal) -> list[int]:
        """The nodes whose paths the vocabulary and the row's constraint allow; all, if they are not made yet."""
        every = range(len(proposal.tokens))
        if proposal.tokens[0] == DRAFT_PLACEHOLDER:
            return list(every)
        constraints = None if row.request.constraint is None else self._constraints
        if constraints is None and not row.request.media:
            return list(every)
        allowed: set[int] = set()
        for leaf in set(every).difference(proposal.parents):
            path = draft_path(proposal.parents, leaf)
            tokens = [proposal.tokens[node] for node in path]
            limit = num_drafted_tokens(tokens)
            if constraints is not None:
                limit = min(limit, constraints.num_allowed(row.request, row.tokens, tokens[:limit]))
            allowed.update(path[:limit])
        return sorted(allowed)

    def _cut(self, rows: Sequence[DraftLimits], proposals: Sequence[Proposal], shape: StepShape) -> list[Proposal]:
        """What of the proposals pays."""
        lengths = [len(proposal.tokens) for proposal in proposals]
        if not any(lengths):
            return list(proposals)
        if self._budget is not None:
            candidates = [self._option(*pair) for pair in zip(rows, proposals, strict=True)]
            wanted, lengths = lengths, self._budget.lengths(candidates, shape)
            self.skip(DraftSkipReason.LOAD, sum(bool(w and not n) for w, n in zip(wanted, lengths, strict=True)))
        planned = []
        for row, proposal, length in zip(rows, proposals, lengths, strict=True):
            if length:
                self.totals.num_proposals += 1
                self.totals.num_drafts += length
                self._planned[row.id] = simplest(proposal.first(length))
            planned.append(simplest(proposal.first(length)))
        return planned

    def _option(self, row: DraftLimits, proposal: Proposal) -> DraftOption:
        acceptance = self._acceptance.estimate(row.id, proposal.grade)
        chances = tuple(self._acceptance.chances(row.id, proposal)) if proposal.parents else ()
        return DraftOption(row.start, len(proposal.tokens), acceptance, chances)


def _reason(row: DraftLimits, num_slots: int) -> DraftSkipReason:
    """Why a row that has no room for drafts has none."""
    if row.max_tokens <= 0:
        return DraftSkipReason.LIMIT
    return DraftSkipReason.PAGES if num_slots <= 0 else DraftSkipReason.TOKENS
