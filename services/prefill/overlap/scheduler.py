"""The prefill scheduler with steps in flight while the next one is built. Pure, like the scheduler it extends.

All tokens of a prompt are known, so the next chunk follows the one in flight (`Prompt.num_scheduled`) and no result is
taken for granted: nothing is cached, published, digested or sealed before the step is committed. Only the end of a
prompt is seen late. An abort, a deadline, a lease end or a quarantined page may remove a prompt, or start it again,
while steps write its pages. Its part of these steps is dropped then, and a `PageFence` keeps the pages until they end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from baton.domain.arithmetic import ceil_div
from baton.domain.errors import Broken
from baton.domain.ids import AttemptId, PageId
from baton.engine.batch import Batch, StepOutput
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.handoff.prompt_tags import PromptTags
from baton.engine.overlap.page_fence import PageFence
from baton.kv.page_checks import PageChecks
from baton.kv.prefix_cache import PrefixCache
from baton.services.prefill.page_sharing import PageSharing
from baton.services.prefill.policy import PrefillLimits
from baton.services.prefill.prompt import Prompt
from baton.services.prefill.scheduler import NOT_SHARED, PrefillEffect, PrefillScheduler


@dataclass(frozen=True, slots=True)
class _StepPrompts:
    """A step in flight, and its prompts with their `num_starts`: one that has begun again is in it no more."""

    batch: Batch
    prompts: Mapping[AttemptId, tuple[Prompt, int]]
    scheduled_at: float

    def has(self, prompt: Prompt) -> bool:
        return self.prompts.get(prompt.request.id) == (prompt, prompt.num_starts)


class OverlapPrefillScheduler(PrefillScheduler):
    """Every batch that is started is told by `on_started`, in order, and committed in the same order."""

    def __init__(
        self,
        cache: PrefixCache,
        exports: ExportTable,
        limits: PrefillLimits,
        checks: PageChecks,
        tags: PromptTags | None = None,
        sharing: PageSharing = NOT_SHARED,
    ) -> None:
        super().__init__(cache, exports, limits, checks, tags, sharing)
        self.fence = PageFence(cache.pool)
        self._in_flight: deque[_StepPrompts] = deque()
        self._ended: _StepPrompts | None = None  # the step that is being committed
        self._committed_at = 0.0

    def on_started(self, batch: Batch) -> None:
        """The batch that was scheduled last has started, perhaps without rows of prompts that have ended meanwhile."""
        here = super()._stepped(batch)
        prompts = {row.id: (here[row.id], here[row.id].num_starts) for row in batch.rows}
        self._in_flight.append(_StepPrompts(batch, prompts, self._scheduled_at))
        self.fence.on_started()

    def filled_pages(self, batch: Batch) -> list[PageId]:
        """Pages that the oldest step in flight, which has run, has filled for prompts that are still in it.

        Full ones, and the partial last one of a prompt. They stay as they are until the step is committed.
        """
        return [page for _, pages in self._filled(batch) for page in pages]

    def keep_digests(self, batch: Batch, digests: Mapping[PageId, int]) -> None:
        """Settles pages of the oldest step in flight by `digests` of their bytes. `commit` then hashes none of them."""
        kept = self._cache.pool.digests
        for prompt, pages in self._filled(batch):
            for page in kept.unsettled([page for page in pages if page in digests]):
                if page == prompt.table.pages[-1] and len(prompt.request.tokens) % self.limits.page_size:
                    prompt.tail_digest = digests[page]
                else:
                    kept.set(page, digests[page])

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[PrefillEffect]:
        """Applies the oldest step in flight. Raises `Broken` for any other."""
        if not self._in_flight or self._in_flight[0].batch is not batch:
            raise Broken("steps are committed in the order of their start")
        self._ended = self._in_flight.popleft()
        self.fence.on_ended()
        self._scheduled_at = max(self._ended.scheduled_at, self._committed_at)
        self._committed_at = now
        return super().commit(batch, output, now)

    def _filled(self, batch: Batch) -> list[tuple[Prompt, list[PageId]]]:
        """What `filled_pages` gives, by prompt. Raises `Broken` for any but the oldest step."""
        if not self._in_flight or self._in_flight[0].batch is not batch:
            raise Broken("pages are digested in the order of the steps")
        here, size, filled = super()._stepped(batch), self.limits.page_size, list[tuple[Prompt, list[PageId]]]()
        for row in batch.rows:
            prompt = here.get(row.id)
            if prompt is not None and self._in_flight[0].has(prompt):
                end = row.start + len(row.tokens)
                last = ceil_div(end, size) if end == len(prompt.request.tokens) else end // size
                filled.append((prompt, prompt.table.pages[row.start // size : last]))
        return filled

    def _stepped(self, batch: Batch) -> dict[AttemptId, Prompt]:
        ended = self._ended
        return {id: one for id, one in super()._stepped(batch).items() if ended is not None and ended.has(one)}

    def _fill(self, prompt: Prompt, num_filled: int) -> None:
        """A page that another prompt has cached meanwhile replaces the prompt's own, which a step ahead still reads."""
        is_read = self._is_in_flight(prompt)
        with self.fence.replacement(prompt.table, num_filled // self.limits.page_size) if is_read else nullcontext():
            super()._fill(prompt, num_filled)

    def _release(self, prompt: Prompt) -> None:
        if self._is_in_flight(prompt):
            self.fence.hold(prompt.table.pages)
        super()._release(prompt)

    def _is_in_flight(self, prompt: Prompt) -> bool:
        return any(step.has(prompt) for step in self._in_flight)
