"""The prefill scheduler. Scarce: tokens per step. Pure: time is an argument, pages are numbers, tokens are ids.

A request's life here, queue by queue:

1. *waiting*: `add` opens an export and appends the prompt. A prompt that never fits fails at once.
2. *chunking*: prompts are admitted in order, if a slot, pages for the whole prompt and pin budget are free. The longest
   cached prefix is matched, without the last token, which must be computed to sample from. The rest is cut into chunks.
   Every step continues the prompts in progress before it admits others, all under one token budget.
   Matched pages are checked first (`baton.kv.page_checks`); a wrong one is quarantined.
3. The full pages of each finished chunk settle, enter the prefix cache and are published, with the digests that they
   settled with, under the export's pins. Pages that decode has already are pinned but not published.
4. *sealed*: the last chunk samples the first token. The partial tail page is published, the export is sealed and the
   prompt leaves the scheduler. Only the export's pins hold its pages now, until commit, abort or lease end.

`abort`, a deadline and the end of the lease remove a prompt at any point and release its pages in that call. A
quarantined page fails the exports that hold it; a prompt that published nothing yet returns to the head of the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.domain.arithmetic import ceil_div
from baton.domain.errors import (
    ContextOverflow,
    DeadlineExceeded,
    IntegrityFailure,
    LeaseEnded,
    PageVerdict,
    Superseded,
)
from baton.domain.handoff import PublishedChunk, Suspect
from baton.domain.ids import AttemptId, PageId
from baton.domain.request import EngineRequest, FinishReason, SampledToken, banned_tokens, finish_reason
from baton.domain.timing.attempt_times import PrefillTimes
from baton.engine.batch import Batch, Row, SampleSpec, StepOutput
from baton.engine.chunking import StepBudget
from baton.engine.messages import Fail
from baton.engine.transition_log import log_transition
from baton.kv.page_checks import PageChecks
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, Owner
from baton.kv.prefix_cache import PrefixCache
from baton.kv.quarantine import Quarantine
from services.prefill.kv_export import ExportTable
from services.prefill.prompt import Prompt
from services.prefill.prompt_tags import PromptTags

_MAX_REMEMBERED = 256
"""Exports that ended with a wrong page, for suspects that are reported while they drain."""


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Bounds of a step and of the worker.

    `long_prompt_tokens`: of one prompt in a step that others want as well; 0: none.
    """

    page_size: int
    token_budget: int
    max_partial_prompts: int
    max_pinned_pages: int
    long_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        if self.token_budget < self.page_size:
            raise ValueError(f"a token budget of {self.token_budget} does not reach one page of {self.page_size}")
        if 0 < self.long_prompt_tokens < self.page_size:
            raise ValueError(f"{self.long_prompt_tokens} tokens of a long prompt do not reach one page")


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a prompt: `num_tokens` have their KV, cached ones included."""

    id: AttemptId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Seal:
    """Seal of a prompt: the last chunk is published and the first token, of output index `index`, is sampled."""

    id: AttemptId
    index: int
    first_token: SampledToken
    finish: FinishReason | None
    num_pages: int
    times: PrefillTimes


@dataclass(frozen=True, slots=True)
class ExportExpired:
    """End of a sealed export whose lease ran out before the commit."""

    id: AttemptId


PrefillEffect = PublishedChunk | Progress | Seal | Fail | ExportExpired


class PrefillScheduler:
    """Queues *waiting -> chunking -> sealed* over one page pool."""

    def __init__(
        self,
        cache: PrefixCache,
        exports: ExportTable,
        limits: PrefillLimits,
        checks: PageChecks,
        tags: PromptTags | None = None,
    ) -> None:
        """`tags` None: pages are published without tags."""
        self._tags = tags
        self.quarantine = Quarantine(cache)
        self._checks = checks
        self._pending: list[PrefillEffect] = []
        self._condemned: deque[AttemptId] = deque(maxlen=_MAX_REMEMBERED)
        self._cache = cache
        self._exports = exports
        self._limits = limits
        self._waiting: deque[Prompt] = deque()
        self._chunking: list[Prompt] = []
        self._scheduled_at = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_chunking(self) -> int:
        return len(self._chunking)

    @property
    def num_remaining_tokens(self) -> int:
        """Prompt tokens that are not computed yet; cached ones count until they are matched."""
        return sum(p.num_remaining for p in (*self._waiting, *self._chunking))

    def add(
        self, request: EngineRequest, decode_prefix_len: int, deadline: float, received_at: float = 0.0
    ) -> list[PrefillEffect]:
        """Adds a request received at `received_at`; an older attempt that is still here fails.

        Raises `Superseded` unless it is the newest attempt.
        """
        effects: list[PrefillEffect] = []
        older = self._exports.open(request.id)
        if older is not None:
            self._remove(older)
            effects.append(Fail(older, Superseded(f"{older}: attempt {request.id.attempt} has come", request.id)))
        size = self._limits.page_size
        num_pages = ceil_div(len(request.tokens), size)
        if num_pages > self._cache.pool.num_usable:
            self._exports.abort(request.id)
            message = f"the prompt needs {num_pages} pages, this worker has {self._cache.pool.num_usable}"
            return [*effects, Fail(request.id, ContextOverflow(message))]
        table = PageTable(self._cache, size, request.salt, Hold.LIVE)
        num_decode_pages = min(decode_prefix_len, len(request.tokens) - 1) // size  # the last page is always published
        prompt = Prompt(request, table, deadline, received_at, num_published=num_decode_pages)
        if self._tags is not None:
            prompt.identities = self._tags.identities(request)
        self._waiting.append(prompt)
        log_transition("prompt", request.id, "add", "waiting")
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
        for id in self._exports.expire(now):
            ended = Fail(id, LeaseEnded(f"{id}: its lease was not renewed")) if self._remove(id) else ExportExpired(id)
            effects.append(ended)
        for prompt in [p for p in (*self._waiting, *self._chunking) if p.deadline <= now]:
            self.abort(prompt.request.id)
            effects.append(Fail(prompt.request.id, DeadlineExceeded(f"{prompt.request.id}: deadline before the seal")))
        return effects

    def next_wakeup(self) -> float | None:
        """Time of the next deadline or lease end."""
        times = [p.deadline for p in (*self._waiting, *self._chunking)]
        lease = self._exports.next_deadline()
        return min([*times, *([] if lease is None else [lease])], default=None)

    def schedule(self, now: float) -> Batch | None:
        """Builds a step: continues prompts in progress, then admits others, under the token budget.

        A long prompt leaves budget to the others first. What they leave is given out again, oldest prompt first.
        """
        self._scheduled_at = now
        step = StepBudget(self._limits.token_budget, self._limits.page_size)
        most = self._limits.long_prompt_tokens or self._limits.token_budget
        for prompt in self._chunking:
            step.give(prompt.request.id, prompt.num_filled, len(prompt.request.tokens), most)
        while step.left >= self._limits.page_size and self._admit(step, most, now):
            prompt = self._chunking[-1]
            step.give(prompt.request.id, prompt.num_filled, len(prompt.request.tokens), most)
        for prompt in self._chunking:
            step.give(prompt.request.id, prompt.num_filled, len(prompt.request.tokens), step.left)
        rows = [self._row(prompt, num, now) for prompt in self._chunking if (num := step.given(prompt.request.id))]
        return Batch(tuple(rows)) if rows else None

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[PrefillEffect]:
        """Applies a finished step: enters full pages into the cache, publishes and seals."""
        by_id = {p.request.id: p for p in self._chunking}
        effects: list[PrefillEffect] = []
        for row, sampled in zip(batch.rows, output.sampled, strict=True):
            prompt = by_id.get(row.id)
            if prompt is None:  # aborted while the step ran
                continue
            prompt.num_filled += len(row.tokens)
            prompt.compute_s += now - self._scheduled_at
            prompt.table.cache_full_pages(prompt.request.tokens, prompt.num_filled)
            effects += self._publish(prompt, now)
            effects += self._seal(prompt, sampled, now) if sampled else [Progress(row.id, prompt.num_filled)]
        return effects

    def _admit(self, step: StepBudget, most: int, now: float) -> bool:
        """Moves the first waiting prompt to *chunking*. False if there is none or it does not fit now.

        Beyond `max_partial_prompts`, only a prompt that ends in this step fits. Prompts that end because a matched page
        is wrong leave *chunking*.
        """
        if not self._waiting:
            return False
        fits_step = len(self._waiting[0].request.tokens) <= min(most, step.left)
        if not fits_step and self._num_left_partial(step) >= self._limits.max_partial_prompts:
            return False
        if self._cache.pool.num_owned(Owner.PINNED) >= self._limits.max_pinned_pages:  # ends: commit, abort or lease
            return False
        prompt = self._waiting[0]
        prompt.num_cached = prompt.num_filled = self._match(prompt, now)
        if not prompt.table.extend(len(prompt.request.tokens)):
            prompt.table.release()
            prompt.num_cached = prompt.num_filled = 0
            return False
        self._chunking.append(self._waiting.popleft())
        log_transition("prompt", prompt.request.id, "admit", "chunking")
        return True

    def _num_left_partial(self, step: StepBudget) -> int:
        """Number of prompts in progress that the step does not end so far; one that ends in it holds no slot."""
        return sum(step.given(prompt.request.id) < prompt.num_remaining for prompt in self._chunking)

    def _match(self, prompt: Prompt, now: float) -> int:
        """Fills the table of a waiting prompt with checked pages; returns the number of their tokens."""
        num_faults = self.quarantine.num_faults
        num_tokens = prompt.table.match_checked(prompt.request.tokens[:-1], self._checks, self.quarantine, now)
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
        for prompt in reversed([one for one in self._chunking if one.table.holds_condemned()]):
            self._chunking.remove(prompt)
            prompt.table.release()
            prompt.num_cached = prompt.num_filled = 0
            self._waiting.appendleft(prompt)
            log_transition("prompt", prompt.request.id, "quarantine", "waiting")
        return effects

    def _row(self, prompt: Prompt, num_tokens: int, now: float) -> Row:
        """The prompt's next chunk."""
        tokens, start = prompt.request.tokens, prompt.num_filled
        end = start + num_tokens
        spec = self._sample_spec(prompt.request) if end == len(tokens) else None
        prompt.start_chunk(num_tokens, now)
        return Row(prompt.request.id, tokens[start:end], start, prompt.table.pages, spec)

    @staticmethod
    def _sample_spec(request: EngineRequest) -> SampleSpec:
        banned = banned_tokens(request.stop, request.num_emitted)
        return SampleSpec(request.sampling, request.tokens, request.num_prompt_tokens, banned)

    def _publish(self, prompt: Prompt, now: float) -> list[PrefillEffect]:
        done = prompt.num_remaining == 0
        end = len(prompt.table.pages) if done else prompt.num_filled // self._limits.page_size
        first = prompt.num_published
        if self._tags is not None:
            new = slice(prompt.num_pinned, end)
            self._tags.settle(prompt.table.pages[new], prompt.identities[new])
        if end <= first:
            return []
        pages = prompt.table.pages[first:end]
        digests = self._digests(pages)
        announced = {} if digests is None else dict(zip(pages, digests, strict=True))
        # From the root on, even pages that decode has: holds are closed towards the root (`baton.kv.prefix_cache`).
        self._exports.publish(prompt.request.id, prompt.table.pages[prompt.num_pinned : end], now, announced)
        prompt.num_published = prompt.num_pinned = end
        tags = None if self._tags is None else self._tags.announced(pages, prompt.identities[first:end])
        return [PublishedChunk(prompt.request.id, first, tuple(pages), digests, tags)]

    def _digests(self, pages: Sequence[PageId]) -> tuple[int, ...] | None:
        """Digests to announce: the kept ones. Only a partial tail, which never settles, is hashed here."""
        if self._cache.hasher is None:
            return None
        kept = self._cache.pool.digests
        *full, last = pages
        last_digest = kept.digest(last) if kept.is_settled(last) else self._cache.hasher.digests([last])[0]
        return (*map(kept.digest, full), last_digest)

    def _seal(self, prompt: Prompt, sampled: SampledToken, now: float) -> list[PrefillEffect]:
        request = prompt.request
        self._exports.seal(request.id)
        num_pages = len(prompt.table.pages)
        prompt.table.release()
        self._chunking.remove(prompt)
        finish = finish_reason(request.stop, sampled.token, request.num_emitted + 1)
        log_transition("prompt", request.id, "seal", "sealed")
        return [Seal(request.id, request.num_emitted, sampled, finish, num_pages, prompt.times(now))]

    def _remove(self, id: AttemptId) -> bool:
        """Removes a prompt from its queue and releases its pages. False if it is in no queue."""
        for queue in (self._waiting, self._chunking):
            for prompt in queue:
                if prompt.request.id == id:
                    prompt.table.release()
                    queue.remove(prompt)
                    log_transition("prompt", id, "end", "ended")
                    return True
        return False
