"""The prompts of a prefill worker: *waiting* for admission, or *chunking*. Puts them in order for a step. Pure.

Owned by `scheduler`, which moves prompts and owns their pages.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.domain.ids import AttemptId
from baton.engine.transition_log import log_transition
from baton.kv.prefix_cache import PrefixCache
from services.prefill.policy import PrefillLimits
from services.prefill.prompt import Prompt, PromptState


class PromptQueue:
    """Waiting prompts in the order of their arrival, and those in progress in the order of their admission."""

    def __init__(self, cache: PrefixCache, limits: PrefillLimits) -> None:
        self.waiting: list[Prompt] = []
        self.chunking: list[Prompt] = []
        self.oldest: Prompt | None = None
        self._cache = cache
        self._limits = limits
        self._num_added = 0

    def __iter__(self) -> Iterator[Prompt]:
        return iter((*self.waiting, *self.chunking))

    def add(self, prompt: Prompt) -> None:
        """Appends a new prompt."""
        self._num_added += 1
        prompt.number = self._num_added
        self.waiting.append(prompt)
        log_transition("prompt", prompt.request.id, "add", "waiting")

    def admit(self, prompt: Prompt) -> None:
        """Moves a waiting prompt to *chunking*."""
        self.waiting.remove(prompt)
        self.chunking.append(prompt)
        prompt.state = PromptState.CHUNKING
        log_transition("prompt", prompt.request.id, "admit", "chunking")

    def put_back(self, prompt: Prompt) -> None:
        """Moves a prompt in progress to its old place in *waiting*; it starts again."""
        self.chunking.remove(prompt)
        prompt.state = PromptState.WAITING
        self.waiting = sorted((*self.waiting, prompt), key=lambda one: one.number)
        log_transition("prompt", prompt.request.id, "quarantine", "waiting")

    def seal(self, prompt: Prompt) -> None:
        """Takes out a prompt that is done."""
        self.chunking.remove(prompt)
        prompt.state = PromptState.ENDED
        log_transition("prompt", prompt.request.id, "seal", "sealed")

    def remove(self, id: AttemptId) -> Prompt | None:
        """Takes out the prompt of an attempt; None if it is not here."""
        prompt = next((one for one in self if one.request.id == id), None)
        if prompt is not None:
            (self.waiting if prompt.state is PromptState.WAITING else self.chunking).remove(prompt)
            prompt.state = PromptState.ENDED
            log_transition("prompt", id, "end", "ended")
        return prompt

    def in_order(self) -> list[Prompt]:
        """All prompts in the order in which a step serves them. Finds the oldest."""
        for prompt in self.chunking:
            prompt.num_known = prompt.num_filled
        for prompt in self.waiting:
            prompt.num_known = self._num_cached_tokens(prompt)
        self.oldest = min(self, key=lambda prompt: prompt.number, default=None)
        return sorted(self, key=self._limits.rank)

    def _num_cached_tokens(self, prompt: Prompt) -> int:
        return self._limits.page_size * self._cache.num_matching(prompt.keys[: prompt.num_matchable])
