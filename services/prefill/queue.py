"""The prompts of a prefill worker: *importing*, *waiting* for admission, or *chunking*. Orders them for a step. Pure.

Owned by `scheduler`, which moves prompts and owns their pages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from baton.domain.ids import AttemptId, PageKey
from baton.engine.transition_log import log_transition
from baton.kv.prefix_cache import PrefixCache
from baton.services.prefill.policy import PrefillLimits
from baton.services.prefill.prompt import Prompt, PromptState

MIN_SHARED_PAGES = 2
"""Pages worth waiting for. One is computed sooner than the prompt that waits for it is scheduled."""


class PendingPages:
    """Pages that prompts in progress will fill, by key. Each has the prompt that fills it as its owner.

    In-batch prefix sharing, as SGLang's, which defers such prompts for one round: here a prompt is held until the pages
    that it shares with the owner are there, so that they are computed once.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._owners: dict[PageKey, Prompt] = {}

    def add(self, owner: Prompt) -> None:
        """Enters the pages that a prompt will fill."""
        for key in owner.keys[owner.num_filled // self._page_size :]:
            self._owners.setdefault(key, owner)

    def remove(self, owner: Prompt) -> None:
        """Removes the pages of a prompt that has ended or starts again: nobody waits for it."""
        for key in owner.keys:
            if self._owners.get(key) is owner:
                del self._owners[key]

    def find_owner(self, prompt: Prompt) -> Prompt | None:
        """The prompt that fills the next pages that a waiting one lacks; None if it should not wait for them."""
        first = prompt.num_known // self._page_size
        last = first if prompt.owner is not None else first + MIN_SHARED_PAGES - 1
        if last >= prompt.num_matchable:
            return None
        owner = self._owners.get(prompt.keys[last])
        if owner is None:
            return None
        num_full = (
            owner.num_filled // self._page_size * self._page_size
        )  # the rest of an image's last page is not there
        return owner if num_full <= prompt.num_known else None


class PromptQueue:
    """Waiting prompts in the order of their arrival, and those in progress in the order of their admission.

    Importing ones take no part in the order: others overtake them.
    """

    def __init__(self, cache: PrefixCache, limits: PrefillLimits) -> None:
        self.importing: list[Prompt] = []
        self.waiting: list[Prompt] = []
        self.chunking: list[Prompt] = []
        self.oldest: Prompt | None = None
        self._cache = cache
        self.limits = limits
        self._pending = PendingPages(limits.page_size)
        self._num_added = 0

    def __iter__(self) -> Iterator[Prompt]:
        return iter((*self.importing, *self.waiting, *self.chunking))

    def add(self, prompt: Prompt, *, importing: bool = False) -> None:
        """Appends a new prompt. `importing`: it waits for pages of another worker first."""
        self._num_added += 1
        prompt.number = self._num_added
        if importing:
            prompt.state = PromptState.IMPORTING
            self.importing.append(prompt)
        else:
            self.waiting.append(prompt)
        log_transition("prompt", prompt.request.id, "add", prompt.state.name.lower())

    def end_imports(self, ids: Collection[AttemptId]) -> None:
        """Moves importing prompts to their places in *waiting*, which are those of their arrival. Ignores others."""
        for prompt in [one for one in self.importing if one.request.id in ids]:
            self.importing.remove(prompt)
            prompt.state = PromptState.WAITING
            self.waiting = sorted((*self.waiting, prompt), key=lambda one: one.number)
            log_transition("prompt", prompt.request.id, "import_ended", "waiting")

    def admit(self, prompt: Prompt) -> None:
        """Moves a waiting prompt, whose pages are allocated, to *chunking*."""
        self.waiting.remove(prompt)
        if self.limits.order.prefix_sharing:
            self._pending.add(prompt)
        self.chunking.append(prompt)
        prompt.state = PromptState.CHUNKING
        log_transition("prompt", prompt.request.id, "admit", "chunking")

    def put_back(self, prompt: Prompt) -> None:
        """Moves a prompt in progress to its old place in *waiting*; it starts again."""
        self.chunking.remove(prompt)
        self._pending.remove(prompt)
        prompt.state = PromptState.WAITING
        self.waiting = sorted((*self.waiting, prompt), key=lambda one: one.number)
        log_transition("prompt", prompt.request.id, "quarantine", "waiting")

    def seal(self, prompt: Prompt) -> None:
        """Takes out a prompt that is done."""
        self.chunking.remove(prompt)
        self._pending.remove(prompt)
        prompt.state = PromptState.ENDED
        log_transition("prompt", prompt.request.id, "seal", "sealed")

    def remove(self, id: AttemptId) -> Prompt | None:
        """Takes out the prompt of an attempt; None if it is not here."""
        prompt = next((one for one in self if one.request.id == id), None)
        if prompt is not None:
            by_state = {PromptState.IMPORTING: self.importing, PromptState.WAITING: self.waiting}
            by_state.get(prompt.state, self.chunking).remove(prompt)
            self._pending.remove(prompt)
            prompt.state = PromptState.ENDED
            log_transition("prompt", id, "end", "ended")
        return prompt

    def in_order(self, is_in_flight: Callable[[Prompt], bool]) -> list[Prompt]:
        """Prompts in the order in which a step serves them, without held ones and those that steps in flight end.

        Finds the oldest. The owner of pages for which others are held has the best rank, and the greatest age, of them
        all.
        """
        for prompt in self.chunking:
            if not is_in_flight(prompt):  # a chunk that was scheduled and not started is scheduled again
                prompt.num_scheduled = prompt.num_filled
            prompt.num_known = prompt.num_scheduled
        for prompt in self.waiting:
            prompt.num_known, prompt.most_in_step = self.num_cached_tokens(prompt), self.limits.contested_tokens
        ordered = (*self.waiting, *(prompt for prompt in self.chunking if prompt.num_unscheduled))
        ranks = {prompt: self.limits.rank(prompt) for prompt in ordered}
        numbers = {prompt: prompt.number for prompt in ordered}
        for prompt in self.waiting:
            if self.is_held(prompt) and (owner := prompt.owner) is not None:
                rank, number = ranks.pop(prompt), numbers.pop(prompt)
                if owner in ranks:  # it has tokens left for a step
                    ranks[owner], numbers[owner] = min(ranks[owner], rank), min(numbers[owner], number)
        self.oldest = min(numbers, key=numbers.__getitem__, default=None)
        served = sorted(ranks, key=ranks.__getitem__)
        self.limits.share_step(served)
        return served

    def is_held(self, prompt: Prompt) -> bool:
        """True if a waiting prompt should wait for pages that another one fills."""
        prompt.owner = self._pending.find_owner(prompt)
        return prompt.owner is not None

    def num_cached_tokens(self, prompt: Prompt) -> int:
        """Tokens of a prompt's cached prefix."""
        return self.limits.page_size * self._cache.num_matching(prompt.keys[: prompt.num_matchable])
