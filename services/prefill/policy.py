"""The order of prompts: which is served first in a step, and when others may overtake one that waits. Pure.

A policy is one ranking function over half-done and waiting prompts together, so a short prompt overtakes a long one at
the edge of a chunk. Whatever the policy, the oldest prompt has a guaranteed share of every step, and at most
`max_overtakes` admissions pass a prompt for which pages are missing. So no prompt starves:

* B1: once its pages are there, a prompt ends within (tokens of older prompts and its own) / (share x budget) steps, and
  one step more for itself and each older one, whatever arrives. With steps of equal time a share is one of the time:
  the oldest prompt gets what takes as long as that many tokens at its beginning would, and at least a page.
* B2: admission waits for a prompt without pages after `max_overtakes` others; pages return by commit or lease end.
* B3: a prompt is held only while another fills pages that it needs itself, at the better rank of the two.
* B4: a long prompt leaves the token budget beyond its threshold to others, in every step that others want.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from baton.domain.arithmetic import ceil_div
from baton.domain.request import EngineRequest
from baton.domain.timing.step_time import StepTimeModel
from baton.engine.chunking import Blocks, StepBudget
from baton.services.prefill.prompt import Prompt

Rank = tuple[float, ...]
"""Place of a prompt in the order; the smallest first."""


class PrefillPolicy(enum.StrEnum):
    """Order of prompts. Ties go by arrival.

    FCFS: arrival; nobody passes the first that lacks pages. LPM: longest prefix match, the most computed tokens first
    (SGLang). SRPT: shortest remaining processing time (Schrage), by tokens. EDF: earliest deadline (Liu and Layland).
    """

    FCFS = "fcfs"
    LPM = "lpm"
    SRPT = "srpt"
    EDF = "edf"


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """`ttft_objective_s`, for EDF: a prompt is due this long after it came, for each token budget of its length.

    `by_priority`: a higher priority comes first, and the policy orders prompts of one priority. The oldest prompt's
    share is the ageing.
    """

    policy: PrefillPolicy = PrefillPolicy.FCFS
    oldest_prompt_share: float = 0.25
    max_overtakes: int = 64
    ttft_objective_s: float = 1.0
    prefix_sharing: bool = True
    by_priority: bool = False


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Bounds of a step and of the worker.

    `long_prompt_tokens`: of one prompt in a step that others want as well; 0: no bound. `leaves_a_quarter`: such a
    prompt leaves a quarter of the token budget to the others in any case. `equal_time`: with this model's predictions
    a number of tokens stands for the time that they take at the beginning of a prompt; None: for itself.
    `whole_images`: no step cuts an image.
    """

    page_size: int
    token_budget: int
    max_partial_prompts: int
    max_pinned_pages: int
    long_prompt_tokens: int = 0
    order: PolicySettings = field(default_factory=PolicySettings)
    leaves_a_quarter: bool = False
    equal_time: StepTimeModel | None = None
    whole_images: bool = False

    def __post_init__(self) -> None:
        if self.token_budget < self.page_size:
            raise ValueError(f"a token budget of {self.token_budget} does not reach one page of {self.page_size}")
        if 0 < self.long_prompt_tokens < self.page_size:
            raise ValueError(f"{self.long_prompt_tokens} tokens of a long prompt do not reach one page")

    def with_token_budget(self, num_tokens: int) -> PrefillLimits:
        """These limits with another token budget, of at least a page."""
        return replace(self, token_budget=max(self.page_size, num_tokens))

    def new_step(self) -> StepBudget:
        """The budget of the next step."""
        return StepBudget(self.token_budget, self.page_size, self.equal_time)

    def blocks(self, request: EngineRequest) -> Blocks:
        """Places of the prompt that no step may cut."""
        return [(span.first, span.end) for span in request.media] if self.whole_images else ()

    @property
    def contested_tokens(self) -> int:
        """Most tokens of one prompt in a step that others want as well."""
        most = self.long_prompt_tokens or self.token_budget
        return max(self.page_size, min(most, 3 * self.token_budget // 4)) if self.leaves_a_quarter else most

    @property
    def guaranteed_tokens(self) -> int:
        """Tokens of every step for the oldest prompt: its share in whole pages, at least one."""
        share = int(self.order.oldest_prompt_share * self.token_budget)
        return max(1, ceil_div(share, self.page_size)) * self.page_size

    def rank(self, prompt: Prompt) -> Rank:
        """The prompt's place among the others."""
        rank = self._rank_by_policy(prompt)
        return (-prompt.request.priority, *rank) if self.order.by_priority else rank

    def _rank_by_policy(self, prompt: Prompt) -> Rank:
        match self.order.policy:
            case PrefillPolicy.FCFS:
                return (prompt.number,)
            case PrefillPolicy.LPM:
                return (-prompt.num_known, prompt.number)
            case PrefillPolicy.SRPT:
                return (len(prompt.request.tokens) - prompt.num_known, prompt.number)
            case PrefillPolicy.EDF:
                return (self._due_at(prompt), prompt.number)

    def _due_at(self, prompt: Prompt) -> float:
        """Time by which EDF wants the first token; never after the call's own deadline."""
        num_budgets = max(1.0, len(prompt.request.tokens) / self.token_budget)
        return min(prompt.deadline, prompt.received_at + self.order.ttft_objective_s * num_budgets)


class AdmissionGate:
    """Says whether a step may admit a further prompt, past those that lack pages. Lives for one step."""

    def __init__(self, order: PolicySettings) -> None:
        self.is_open = True
        self._in_order = order.policy is PrefillPolicy.FCFS
        self._max_overtakes = order.max_overtakes
        self._passed: list[Prompt] = []

    def is_starved(self, prompt: Prompt) -> bool:
        """True if no admission may pass the prompt any more."""
        return prompt.num_overtaken >= self._max_overtakes

    def on_admitted(self) -> None:
        """A prompt was admitted, past those that lack pages."""
        for prompt in self._passed:
            prompt.num_overtaken += 1
            self.is_open = self.is_open and not self.is_starved(prompt)

    def on_refused(self, prompt: Prompt, *, lacks_pages: bool) -> None:
        """A prompt cannot be admitted in this step."""
        if (lacks_pages or prompt.num_overtaken) and prompt not in self._passed:
            self._passed.append(prompt)
        if self._in_order or self.is_starved(prompt):
            self.is_open = False
