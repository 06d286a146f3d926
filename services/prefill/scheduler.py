"""The prefill scheduler. Scarce: tokens per step. Pure: time is an argument, pages are numbers, tokens are ids.

A request's life here, queue by queue:

1. *waiting*: `add` opens an export and appends the prompt. A prompt that never fits fails at once. One of which another
   worker has more cached pages is *importing* first, for a bounded time and beside the order of the others.
   One whose images are not encoded waits, too, and others pass it (`media_gate`).
2. *chunking*: prompts are admitted in the order of `policy`, if a slot, pages for the whole prompt and pin budget are
   free. The longest cached prefix is matched, without the last token, which must be computed to sample from. The rest
   is cut into chunks. A step serves half-done and waiting prompts in one order, under one token budget; the oldest
   has a guaranteed share. A prompt whose next pages another one fills is held until they are there. Matched pages are
   checked first (`baton.kv.page_checks`); a wrong one is quarantined.
3. The full pages of each finished chunk settle, enter the prefix cache and are published, with the digests that they
   settled with, under the export's pins. Pages that decode has already are pinned but not published.
4. *sealed*: the last chunk samples the first token. The partial tail page is published, the export is sealed and the
   prompt leaves the scheduler. Only the export's pins hold its pages now, until commit, abort or lease end.

`abort`, a deadline and the end of the lease remove a prompt at any point and release its pages in that call. A
quarantined page fails the exports that hold it; a prompt that published nothing yet returns to its place in the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from baton.domain.errors import (
    ContextOverflow,
    DeadlineExceeded,
    IntegrityFailure,
    LeaseEnded,
    PageVerdict,
    Superseded,
)
from baton.domain.handoff import PublishedChunk, Suspect
from baton.domain.ids import AttemptId, PageId, PageKey
from baton.domain.request import EngineRequest, SampledToken
from baton.engine.batch import Batch, StepOutput
from baton.engine.chunking import StepBudget
from baton.engine.handoff.export_events import ExportExpired, Seal
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.handoff.page_imports import no_imports
from baton.engine.handoff.page_source import PageSource
from baton.engine.handoff.prompt_tags import PromptTags
from baton.engine.media.store import MediaStore
from baton.engine.messages import Fail, Scored
from baton.kv.page_checks import PageChecks
from baton.kv.pages import Owner
from baton.kv.prefix_cache import PrefixCache
from baton.kv.quarantine import Quarantine
from baton.kv.tiers.lower_tier import TierUse
from baton.services.prefill.media_gate import MediaGate
from baton.services.prefill.page_sharing import PageSharing
from baton.services.prefill.policy import AdmissionGate, PrefillLimits
from baton.services.prefill.prompt import Progress, Prompt, PromptState
from baton.services.prefill.publisher import PagePublisher
from baton.services.prefill.queue import PromptQueue

NOT_SHARED = PageSharing()
NO_MEDIA = MediaGate(MediaStore(0), 0, is_used=False)

_MAX_REMEMBERED = 256
"""Exports that ended with a wrong page, for suspects that are reported while they drain."""


PrefillEffect = PublishedChunk | Progress | Scored | Seal | Fail | ExportExpired


class PrefillScheduler:
    """Queues *waiting -> chunking -> sealed* over one page pool."""

    def __init__(
        self,
        cache: PrefixCache,
        exports: ExportTable,
        limits: PrefillLimits,
        checks: PageChecks,
        tags: PromptTags | None = None,
        sharing: PageSharing = NOT_SHARED,
    ) -> None:
        """`tags` None: pages are published without tags."""
        self._publisher = PagePublisher(cache, exports, tags, limits.page_size)
        self._tier, self.imports = sharing.tier, no_imports(cache) if sharing.imports is None else sharing.imports
        cache.on_evict = None if sharing.tier is None else self._on_evict
        self.cached_exports = sharing.exports
        self.quarantine = Quarantine(cache)
        self._checks = checks
        self._pending: list[PrefillEffect] = []
        self._condemned: deque[AttemptId] = deque(maxlen=_MAX_REMEMBERED)
        self._cache = cache
        self._exports = exports
        self.limits = limits
        self._queue = PromptQueue(cache, limits)
        self._scheduled_at = 0.0
        self.media = NO_MEDIA

    def change_token_budget(self, num_tokens: int) -> None:
        """Bounds later steps by `num_tokens`, at least a page."""
        self.limits = self._queue.limits = self.limits.with_token_budget(num_tokens)

    @property
    def num_waiting(self) -> int:
        return len(self._queue.waiting) + len(self._queue.importing)

    @property
    def num_chunking(self) -> int:
        return len(self._queue.chunking)

    @property
    def num_remaining_tokens(self) -> int:
        """Prompt tokens that are not computed yet; cached ones count until they are matched."""
        return sum(p.num_remaining for p in self._queue)

    def add(
        self,
        request: EngineRequest,
        decode_prefix_len: int,
        deadline: float,
        received_at: float = 0.0,
        source: PageSource | None = None,
        now: float = 0.0,
    ) -> list[PrefillEffect]:
        """Adds a request received at `received_at`; an older attempt that is still here fails.

        `source` has cached pages to import, from `now` on. Raises `Superseded` unless it is the newest attempt.
        """
        effects: list[PrefillEffect] = []
        older = self._exports.open(request.id)
        if older is not None:
            self._remove(older)
            effects.append(Fail(older, Superseded(f"{older}: attempt {request.id.attempt} has come", request.id)))
        size = self.limits.page_size
        if (why := self.limits.why_too_long(request, self._cache)) is not None:
            self._exports.abort(request.id)
            return [*effects, Fail(request.id, ContextOverflow(why))]
        prompt = Prompt.of(request, self._cache, size, decode_prefix_len, (deadline, received_at))
        prompt.identities = self._publisher.identities(request)
        matchable = prompt.keys[: prompt.num_matchable]
        if self._tier is not None:
            prompt.tier_use = TierUse(matchable, prompt.contents)
            source = None if self._tier.must_wait(prompt.tier_use, now) else source  # files are nearer
        fault = self.media.begin(request, self._queue.num_cached_tokens(prompt))
        if fault is not None:
            self.abort(request.id)
            return [*effects, Fail(request.id, fault)]
        self._queue.add(prompt, importing=self.imports.begin(request.id, matchable, source, now, prompt.contents))
        return effects

    def abort(self, id: AttemptId) -> bool:
        """Removes a request from any queue and ends its export. Idempotent; False if there was none."""
        had_export = self._exports.abort(id)
        return self._remove(id) or had_export

    def release(self, id: AttemptId) -> bool:
        """`abort` on behalf of decode, which reads no more: no lease is kept."""
        had_export = self._exports.release(id)
        return self._remove(id) or had_export

    def on_wrong_pages(self, pages: Sequence[PageId], now: float) -> list[PrefillEffect]:
        """Quarantines pages whose bytes differ from their digests, and ends what was computed over them."""
        self.quarantine.add_pages(pages, now)
        return self._end_condemned() if pages else []

    def on_keys_quarantined(self, keys: Sequence[PageKey]) -> list[PrefillEffect]:
        """Takes out imported pages that a source has quarantined, and what was computed over them. Others stay."""
        self.quarantine.add_foreign_keys(keys)
        self.imports.on_keys_quarantined(keys)
        return self._end_condemned()

    def examine(
        self, id: AttemptId, suspects: Sequence[Suspect], now: float
    ) -> tuple[PageVerdict | None, list[PrefillEffect]]:
        """Compares the suspects of a handoff with the digests they were announced with, and quarantines wrong pages.

        Verdict None: the export has ended for another reason, and the pages may have been written again.
        """
        if id in self._condemned:
            return PageVerdict.SOURCE, []
        announced = self._exports.announced(id)
        pages = [one.page for one in suspects if one.page in announced]
        if not pages:
            return None, []
        wrong = self._checks.compare(pages, [announced[page] for page in pages])
        return PageVerdict.SOURCE if wrong else PageVerdict.LINK, self.on_wrong_pages(wrong, now)

    def take_pending_effects(self) -> list[PrefillEffect]:
        """Takes the effects of `schedule`: exports that ended because a matched page was wrong."""
        pending, self._pending = self._pending, []
        return pending

    def expire(self, now: float) -> list[PrefillEffect]:
        """Ends prompts past their deadline and exports past their lease."""
        effects: list[PrefillEffect] = []
        self.imports.expire(now)
        for id in self._exports.expire(now):
            ended = Fail(id, LeaseEnded(f"{id}: its lease was not renewed")) if self._remove(id) else ExportExpired(id)
            effects.append(ended)
        for prompt in [p for p in self._queue if p.deadline <= now]:
            self.abort(prompt.request.id)
            effects.append(Fail(prompt.request.id, DeadlineExceeded(f"{prompt.request.id}: deadline before the seal")))
        return effects

    def next_wakeup(self) -> float | None:
        """Time of the next deadline or lease end."""
        times = [p.deadline for p in self._queue]
        lease = self._exports.next_deadline()
        read = None if self._tier is None else self._tier.next_wakeup()
        others = (lease, read, self.imports.next_deadline())
        return min([*times, *(time for time in others if time is not None)], default=None)

    def schedule(self, now: float) -> Batch | None:
        """Builds a step under the token budget: the oldest prompt's share, then all prompts in the policy's order.

        A long prompt leaves budget to shorter ones first. What they leave is given out again, in the same order.
        """
        self._scheduled_at = now
        self._queue.end_imports(self.imports.take_ended())
        if self._tier is not None:
            self._tier.poll(self.quarantine, now)
        limits = self.limits
        step, gate = limits.new_step(), AdmissionGate(limits.order)
        prompts = self._queue.in_order(self._is_in_flight)
        for id, fault in self.media.faults(self._queue.waiting):
            self.abort(id)
            self._pending.append(Fail(id, fault))
        prompts = [prompt for prompt in prompts if prompt.state is not PromptState.ENDED]
        if self._tier is not None:
            waiting = (one for one in prompts if one.state is PromptState.WAITING)
            self._tier.prefetch((one.tier_use for one in waiting if one.tier_use is not None), now)
        for prompt in [one for one in self._queue.waiting if gate.is_starved(one)]:
            self._admit(prompt, step, gate, now)
        if (oldest := self._queue.oldest) is not None and self._is_begun(oldest, step, gate, now):
            self._give(step, oldest, limits.guaranteed_tokens)
        for prompt in prompts:
            if self._is_begun(prompt, step, gate, now):
                self._give(step, prompt, prompt.most_in_step - step.given(prompt.request.id))
        in_progress = [prompt for prompt in prompts if prompt.state is PromptState.CHUNKING]
        for prompt in in_progress:
            self._give(step, prompt, step.left)
        rows = [prompt.next_chunk(num, now) for prompt in in_progress if (num := step.given(prompt.request.id))]
        return Batch(tuple(rows)) if rows else None

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[PrefillEffect]:
        """Applies a finished step: enters full pages into the cache, publishes and seals."""
        by_id = self._stepped(batch)
        effects: list[PrefillEffect] = []
        for index, (row, sampled) in enumerate(zip(batch.rows, output.sampled, strict=True)):
            prompt = by_id.get(row.id)
            if prompt is None:  # aborted while the step ran
                continue
            prompt.compute_s += now - self._scheduled_at
            self._fill(prompt, prompt.num_filled + len(row.tokens))
            num_matched = prompt.num_cached // self.limits.page_size
            if self._tier is not None:
                self._tier.on_filled(prompt.table.cached_keys, num_matched)
            self.imports.on_filled(prompt.table.cached_keys[num_matched:])
            if index in output.failures:
                self.abort(row.id)
                effects.append(Fail(row.id, output.failures[index]))
                continue
            if index in output.scores:
                effects.append(Scored(row.id, output.scores[index]))
            effects += self._publish(prompt, now)
            prompt.table.pass_windows(prompt.num_filled)
            effects += self._seal(prompt, sampled[0], now) if sampled else [Progress(row.id, prompt.num_filled)]
        return effects

    def _stepped(self, batch: Batch) -> dict[AttemptId, Prompt]:
        """Prompts that are still here and were in `batch`, among others."""
        return {prompt.request.id: prompt for prompt in self._queue.chunking}

    def _fill(self, prompt: Prompt, num_filled: int) -> None:
        """The KV of the first `num_filled` tokens is in place."""
        prompt.num_filled = num_filled
        prompt.table.cache_full_pages(prompt.request.tokens, num_filled)

    def _is_in_flight(self, prompt: Prompt) -> bool:
        """True while a step with a chunk of the prompt is not committed."""
        return False

    def _release(self, prompt: Prompt) -> None:
        """Releases the pages of a prompt that ends before its seal, or starts again."""
        prompt.table.release()

    def _give(self, step: StepBudget, prompt: Prompt, most: int) -> None:
        request, slots = prompt.request, prompt.table.max_step_tokens(prompt.num_scheduled)
        most = most if slots is None else min(most, slots - step.given(request.id))
        step.give(request.id, prompt.num_scheduled, len(request.tokens), most, self.limits.blocks(request))

    def _is_begun(self, prompt: Prompt, step: StepBudget, gate: AdmissionGate, now: float) -> bool:
        """True if the prompt is in progress, perhaps as of now."""
        if prompt.state is PromptState.WAITING:
            return self._admit(prompt, step, gate, now)
        return prompt.state is PromptState.CHUNKING

    def _admit(self, prompt: Prompt, step: StepBudget, gate: AdmissionGate, now: float) -> bool:
        """Moves a waiting prompt to *chunking*. False if it does not fit now, or waits for images: others pass.

        Prompts that end because a matched page is wrong leave *chunking*.
        """
        request = prompt.request
        step.take_back(request.id)  # it may have begun and gone back in this step
        is_held = self._queue.is_held(prompt)  # by one that began in this step
        if is_held or not gate.is_open or self.media.must_wait(request, prompt.num_known):
            return False
        if self._room(prompt, prompt.num_known, self.limits.page_size, step) < self.limits.page_size:
            gate.on_refused(prompt, lacks_pages=False)
            return False
        if self._cache.pool.num_owned(Owner.PINNED) >= self.limits.max_pinned_pages:  # ends: commit, abort or lease
            gate.is_open = False
            return False
        reads = self._tier is not None and prompt.tier_use is not None and self._tier.must_wait(prompt.tier_use, now)
        if reads or not self._has_slot(prompt, prompt.num_known, step):
            gate.on_refused(prompt, lacks_pages=False)
            return False
        num_matched = self._match(prompt, now)
        waits = self.media.must_wait(request, num_matched)
        has_slot = num_matched >= prompt.num_known or self._has_slot(prompt, num_matched, step)
        has_windows = prompt.table.reserve_windows(*self.limits.step_tokens(request))
        if waits or not has_slot or not has_windows or not prompt.table.extend(len(request.tokens)):
            prompt.start_again()
            if not waits:
                gate.on_refused(prompt, lacks_pages=has_slot)
            return False
        prompt.begin(num_matched)
        size = self.limits.page_size
        if self._tier is not None:
            hits = self._tier.on_admitted(prompt.table.cached_keys)
            prompt.num_from_tiers = {name: num * size for name, num in hits.items()}
        used = self.imports.on_admitted(prompt.table.cached_keys)
        prompt.num_imported = {role: num * size for role, num in used.items()}
        self._queue.admit(prompt)
        gate.on_admitted()
        return True

    def _on_evict(self, key: PageKey) -> None:
        """What a tier reads back is the tier's, and no longer imported."""
        self.imports.on_filled([key])
        if self._tier is not None:
            self._tier.on_evict(key)

    def _has_slot(self, prompt: Prompt, num_known: int, step: StepBudget) -> bool:
        """True if a prompt with `num_known` tokens may begin: few are half-done, it ends now, or it is the oldest."""
        if self._num_left_partial(step) < self.limits.max_partial_prompts:
            return True
        num_left = len(prompt.request.tokens) - num_known
        return num_left <= self._room(prompt, num_known, num_left, step) or prompt is self._queue.oldest

    def _room(self, prompt: Prompt, start: int, num_tokens: int, step: StepBudget) -> int:
        """How many of the next `num_tokens` tokens of a waiting prompt, from `start` on, the step could compute."""
        return step.room(prompt.request.id, start, start + num_tokens, prompt.most_in_step)

    def _num_left_partial(self, step: StepBudget) -> int:
        """Number of prompts in progress that the step does not end so far; one that ends in it holds no slot."""
        return sum(step.given(prompt.request.id) < prompt.num_unscheduled for prompt in self._queue.chunking)

    def _match(self, prompt: Prompt, now: float) -> int:
        """Fills the table of a waiting prompt with checked pages; returns the number of their tokens."""
        num_faults = self.quarantine.num_faults
        keys = prompt.keys[: prompt.num_matchable]
        num_tokens = prompt.table.match_checked(keys, self._checks, self.quarantine, now)
        if self.quarantine.num_faults > num_faults:
            self._pending += self._end_condemned()
        return num_tokens

    def _end_condemned(self) -> list[PrefillEffect]:
        """Fails the exports with a condemned page; prompts that published nothing yet start again."""
        effects: list[PrefillEffect] = []
        for id in self._exports.condemned():
            self.release(id)
            self._condemned.append(id)
            message = f"{id}: a page of this worker differed from its digest"
            effects.append(Fail(id, IntegrityFailure(message, PageVerdict.SOURCE)))
        for prompt in [one for one in self._queue.chunking if one.table.holds_condemned()]:
            self._release(prompt)
            prompt.start_again()
            self._queue.put_back(prompt)
        return effects

    def _publish(self, prompt: Prompt, now: float) -> list[PrefillEffect]:
        return [*self._publisher.publish(prompt, now)]

    def _seal(self, prompt: Prompt, sampled: SampledToken, now: float) -> list[PrefillEffect]:
        self._exports.seal(prompt.request.id)
        num_pages = len(prompt.table.pages)
        prompt.table.release()
        prompt.encode_s = self.media.end(prompt.request.id)
        self._queue.seal(prompt)
        return [prompt.seal(num_pages, sampled, now)]

    def _remove(self, id: AttemptId) -> bool:
        """Removes a prompt from its queue and releases its pages. False if it is in no queue."""
        prompt = self._queue.remove(id)
        self.imports.abort(id)
        self.media.end(id)
        if prompt is not None:
            self._release(prompt)
        return prompt is not None
