"""The order of prompts: which is served first in a step, and when others may overtake one that waits. Pure.

A policy is one ranking function over half-done and waiting prompts together, so a short prompt overtakes a long one at
the edge of a chunk. Whatever the policy, the oldest prompt has a guaranteed share of every step, and at most
`max_overtakes` admissions pass a prompt for which pages are missing. So no prompt starves:

* B1: once its pages are there, a prompt ends within (tokens of older prompts and its own) / (share x budget) steps, and
  one step more for itself and each older one, whatever arrives. With steps of equal time a share is one of the time:
  the oldest prompt gets what takes as long as that many tokens at its beginning would, and at least a page.
* B2: admission waits for a prompt without pages after `max_overtakes` others; pages return by commit or lease end.
* B3: a prompt is held only while another fills pages that it needs itself, at the better rank of the two.
* B4: a long prompt leaves the token budget beyond its threshold to shorter ones, in every step that they want.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.domain.arithmetic import ceil_div
from baton.domain.request import EngineRequest
from baton.domain.timing.step_time import MIN_STEPS, StepTimeModel
from baton.engine.chunking import Blocks, StepBudget
from baton.kv.prefix_cache import PrefixCache
from baton.services.prefill.prompt import Prompt

MIN_COMING = 2
"""Fewer prompts gain no more from a common step than the first one loses."""

GAP_S = 0.003
"""Longest wait for the next prompt of a burst."""

GAP_SHARE = 0.02
"""Share of the predicted time of the common step, less the mean error, that the wait may take at most."""

MAX_GAPS = 4
"""Longest wait of all, in gaps."""

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

    `long_prompt_tokens`: of one prompt in a step that shorter ones want as well; 0: no bound. `leaves_a_quarter`: such
    a prompt leaves a quarter of the token budget to the others in any case. `equal_time`: with this model's predictions
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

    def step_tokens(self, request: EngineRequest) -> tuple[int, int, int]:
        """Tokens of the prompt in one step: at most, and as few as window slots may allow. No image is cut.

        The third number is the prompt's length.
        """
        longest = max((end - first for first, end in self.blocks(request)), default=0) + self.page_size
        num_tokens = len(request.tokens)
        return min(num_tokens, max(self.token_budget, longest)), min(num_tokens, longest), num_tokens

    def why_too_long(self, request: EngineRequest, cache: PrefixCache) -> str | None:
        """Why the prompt never fits the worker's pool; None if it does."""
        num_pages, pool = ceil_div(len(request.tokens), self.page_size), cache.pool
        if num_pages > pool.num_usable:
            return f"the prompt needs {num_pages} pages, this worker has {pool.num_usable}"
        if pool.windows is None or cache.window is None:
            return None
        num_slots = min(num_pages, cache.window.most_pages(self.step_tokens(request)[1]))
        if num_slots > pool.windows.num_usable:
            return f"the prompt needs {num_slots} window slots, this worker has {pool.windows.num_usable}"
        return None

    @property
    def contested_tokens(self) -> int:
        """Most tokens of one prompt in a step that shorter ones want as well."""
        most = self.long_prompt_tokens or self.token_budget
        return max(self.page_size, min(most, 3 * self.token_budget // 4)) if self.leaves_a_quarter else most

    @property
    def guaranteed_tokens(self) -> int:
        """Tokens of every step for the oldest prompt: its share in whole pages, at least one."""
        share = int(self.order.oldest_prompt_share * self.token_budget)
        return max(1, ceil_div(share, self.page_size)) * self.page_size

    def share_step(self, ordered: Sequence[Prompt]) -> None:
        """Sets `most_in_step` of prompts in their order: a long one leaves tokens only to shorter ones behind it.

        Tokens that a prompt leaves to longer ones would make it end later, and them no sooner. What it leaves is for
        those that are short: a long one behind it is bounded, too, so what nobody takes goes back in their order.
        """
        fewest, leaves = math.inf, list[bool]()
        for prompt in reversed(ordered):
            num_left = len(prompt.request.tokens) - prompt.num_known
            leaves.append(fewest < num_left)
            fewest = min(fewest, num_left)
        is_bounded = False
        for prompt, leaves_some in zip(ordered, reversed(leaves), strict=True):
            is_bounded = is_bounded or leaves_some
            prompt.most_in_step = self.contested_tokens if is_bounded else self.token_budget

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


class PredictsPrompts(Protocol):
    """The part of `StepTimeModel` that is used here."""

    @property
    def num_steps(self) -> int: ...

    @property
    def error(self) -> float: ...

    def seconds_of(self, num_tokens: int, start: int, chunk_tokens: int) -> float: ...


class BurstGate:
    """Gathers the prompts of a burst into one step, where the worker borrows the cores of idle ones.

    Once the first prompt of a burst is sealed, decode computes on its own cores, which prefill had borrowed until then.
    So prompts that come a moment after the first one are computed on fewer cores. While some are on their way, as their
    router tells, an idle engine waits for them: a moment only, as they may go to another worker or nowhere. The bound
    goes by the prediction less its mean error: times of steps vary with the cores that others lend, so the prediction
    is seldom `reliable` here.

        idle --(a prompt, others are coming)--> holds --(all are here | nothing came for a gap | a full step)--> steps

    Times are those of the engine's clock, in seconds.
    """

    def __init__(self, step_time: PredictsPrompts) -> None:
        self._step_time = step_time
        self._num_coming = 0
        self._began_at = 0.0
        self._until: float | None = None

    def on_added(self, num_coming: int, num_tokens: int, token_budget: int, now: float, *, is_idle: bool) -> None:
        """A prompt has come; its router was about to send `num_coming` others.

        `num_tokens`: of the prompts that wait here. `is_idle`: no prompt was here before it.
        """
        if is_idle and num_coming >= MIN_COMING and self._step_time.num_steps >= MIN_STEPS:
            self._num_coming, self._began_at = num_coming, now
        elif self._until is None:
            return
        else:
            self._num_coming = min(self._num_coming - 1, num_coming)
        self._until = None
        if self._num_coming > 0 and num_tokens < token_budget:
            common = min(token_budget, num_tokens * (1 + self._num_coming))
            common_s = (1.0 - self._step_time.error) * self._step_time.seconds_of(common, 0, token_budget)
            gap_s = min(GAP_S, GAP_SHARE * common_s)
            self._until = min(now + gap_s, self._began_at + MAX_GAPS * gap_s)

    def holds(self, now: float) -> bool:
        """True if the next step waits still."""
        if self._until is not None and now >= self._until:
            self._until = None
        return self._until is not None

    def next_wakeup(self) -> float | None:
        """When the wait ends at the latest; None without one."""
        return self._until
