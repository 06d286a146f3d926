"""The decode scheduler. Scarce: pages and rows. Pure: time is an argument, pages are numbers, tokens are ids.

A row's life here, queue by queue:

1. *imported*: `add` takes a validated import with its pages. Its room was reserved, so it joins the next step.
   *local*: `add_prompt` takes a prompt to compute here. Its chunks get the token budget that the running rows leave,
   oldest prompt first. The last chunk samples the first token, and the row runs.
2. *running*: every step computes one token for every row. A row that crosses a page edge takes a page first. If no
   unreserved page is left, a row is *preempted*, the newest unless `order` says otherwise: its pages are copied to host
   memory and released. Last of all, rows get drafts; the step verifies them, and only accepted ones count as filled.
3. *preempted*: the oldest row resumes first, unless `order` says otherwise, and before later imports, when its pages
   fit and one page is left for every running row. The digests of its pages move to host memory and back. If host
   memory is full as well, or the copy was damaged there, the row fails with `SentBack` (see `rows.send_back`).
   Local prompts hold all their pages from the start and are never preempted.
4. The row ends with its last token, by `abort` or by `SentBack`. Its full pages stay in the prefix cache.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterator, Mapping

from baton.domain.arithmetic import ceil_div
from baton.domain.errors import BatonError, SentBack
from baton.domain.ids import AttemptId, PageId, PageKey
from baton.domain.request import EngineRequest, OutputToken, SampledToken, finish_reason
from baton.domain.timing.row_timer import RowTimer, StepTotals
from baton.domain.timing.step_time import Segment, StepShape
from baton.engine.batch import Batch, HostCopy, Row, SampleSpec, ScoreSpec, StepOutput
from baton.engine.chunking import ChunkBudget, cut
from baton.engine.drafts.policy import DraftLimits, DraftPolicy
from baton.engine.messages import Fail, Scored
from baton.engine.transition_log import log_transition
from baton.kv.growth import RowGrowth
from baton.kv.keys import page_keys
from baton.kv.page_table import PageTable
from baton.kv.swap_space import SwapSpace
from baton.services.decode.effects import DecodeEffect, EmitTokens
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import DecodeRow, ImportedPrompt, LocalPrompt
from baton.services.decode.rows.rules import RowRules
from baton.services.decode.rows.send_back import SendBackReason, SentBackPages


def _arrival_number(row: DecodeRow) -> int:
    return row.arrival_number


def _segments(rows: list[Row]) -> Iterator[Segment]:
    return ((len(row.tokens), row.start) for row in rows)


class DecodeScheduler:
    """Queues *imported | local -> running <-> preempted* over one page pool and one swap space."""

    def __init__(
        self,
        imports: ImportTable,
        host: SwapSpace,
        page_size: int,
        chunks: ChunkBudget | None = None,
        rules: RowRules | None = None,
    ) -> None:
        """`chunks` sizes those of local prompts, and may be replaced between steps; None: a page a step."""
        rules = rules or RowRules()
        self._growth, self._drafts, self._order = rules.growth, rules.drafts, rules.order
        self._imports = imports
        self.chunks = chunks or ChunkBudget(0, page_size)
        self._local: deque[DecodeRow] = deque()
        self._host = host
        self._page_size = page_size
        self._imported: deque[DecodeRow] = deque()
        self._running: list[DecodeRow] = []  # oldest first
        self._preempted: list[DecodeRow] = []  # oldest first
        self._pending: list[DecodeEffect] = []
        self._arrival_numbers = itertools.count()
        self._totals = StepTotals()
        self._scheduled_at = 0.0
        self.num_preemptions = 0
        self.num_send_backs = dict.fromkeys(SendBackReason, 0)
        self.sent_back = SentBackPages()
        self.num_local_prompt_tokens = 0
        self.num_local_cached_tokens = 0

    @property
    def num_rows(self) -> int:
        """Rows that count against the worker's row limit."""
        return sum(map(len, self._queues))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_preempted(self) -> int:
        return len(self._preempted)

    @property
    def num_local_tokens(self) -> int:
        """Tokens of local prompts that are not computed yet."""
        return sum(len(row.tokens) - row.num_filled for row in self._local)

    @property
    def takes_prompts(self) -> bool:
        """True if new local prompts are taken. Those that are here go on without a budget, by a page a step."""
        return self.chunks.token_budget > 0

    def num_recomputed_tokens(self, batch: Batch) -> int:
        """Prompt tokens in a batch that prefill had computed already, as they are of no local prompt. Always 0."""
        local = {row.request.id for row in self._local}
        filled = [row for row in batch.rows if row.sample is None or row.start < row.sample.num_prompt_tokens]
        return sum(row.num_prompt_tokens for row in filled if row.id not in local)

    def growths(self) -> list[RowGrowth]:
        """All rows, as the growth reserve sees them."""
        return [row.growth() for row in itertools.chain(*self._queues)]

    def ids(self) -> Iterator[AttemptId]:
        """Attempts in any queue."""
        return (row.request.id for row in itertools.chain(*self._queues))

    def ruined_ids(self, keys: frozenset[PageKey]) -> list[AttemptId]:
        """Attempts that hold a condemned page, and rows with KV that was computed through one of `keys`.

        A preempted row's pages are not cached, nor are those of one that came back, until it fills its next page.
        """
        rows = itertools.chain(*self._queues)
        return [row.request.id for row in rows if row.table.holds_condemned() or (keys and self._used(row, keys))]

    def _used(self, row: DecodeRow, keys: frozenset[PageKey]) -> bool:
        salt, media = row.request.salt, row.request.media
        return not keys.isdisjoint(page_keys(row.tokens[: row.num_filled], self._page_size, salt, media))

    def add(self, imported: ImportedPrompt) -> None:
        """Adds a validated import: the prompt's KV is in place, and the first token was sent."""
        request = imported.request
        tokens = [*request.tokens, imported.first_token.token]
        self._imported.append(self._row(request, imported.table, tokens, len(request.tokens)))

    def add_prompt(self, prompt: LocalPrompt) -> None:
        """Adds a prompt that holds all its pages; the first `prefix_len` tokens are filled."""
        request = prompt.request
        self._local.append(self._row(request, prompt.table, [*request.tokens], prompt.prefix_len))
        self.num_local_prompt_tokens += len(request.tokens)
        self.num_local_cached_tokens += prompt.prefix_len
        log_transition("row", request.id, "add_prompt", "local")

    def abort(self, id: AttemptId) -> bool:
        """Removes a row from any queue and releases its pages. Idempotent; False if there was none."""
        for queue in self._queues:
            for row in [one for one in queue if one.request.id == id]:
                queue.remove(row)
                self._release(row)
                self._learn_length(row)
                log_transition("row", id, "abort", "ended")
                return True
        return False

    def schedule(self, now: float) -> Batch | None:
        """Builds a step: resume, join, grow (preempting if needed), one token per row, local chunks, then drafts."""
        self._scheduled_at = now
        copies: list[HostCopy] = []
        self._resume(copies, now)
        for row in self._imported:
            self._join(row, "join", now)
        self._imported.clear()
        self._grow(copies, now)
        rows = [self._batch_row(row) for row in self._running]
        self._add_local_chunks(rows)
        if self._drafts is not None and self._running:
            self._add_drafts(rows, self._drafts)
        return Batch(tuple(rows), tuple(copies)) if rows or copies else None

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[DecodeEffect]:
        """Applies a finished step: the tokens of running rows, and the progress of local prompts."""
        batch = output.batch or batch
        self._totals.num_steps += 1
        if self._growth is not None:
            self._growth.on_step()
        self._totals.seconds += now - self._scheduled_at
        by_id = self._stepped_rows(batch)
        effects = self.take_pending_effects()
        emitted, ends = output.sampled, [row.start + len(row.tokens) for row in batch.rows]
        if any(row.drafted for row in batch.rows):
            emitted = tuple(self._walk(row, by_id, tokens) for row, tokens in zip(batch.rows, emitted, strict=True))
            ends = [row.filled_end(len(tokens)) for row, tokens in zip(batch.rows, emitted, strict=True)]
        self._settle(batch, ends, by_id)
        for index, (batch_row, tokens, end) in enumerate(zip(batch.rows, emitted, ends, strict=True)):
            row = by_id.get(batch_row.id)
            if row is None:  # aborted while the step ran
                continue
            if batch_row.drafted:
                row.tokens += [sampled.token for sampled in tokens[:-1]]
                row.table.shrink(end)
            self._advance_row(row, end)
            if index in output.scores:
                effects.append(Scored(row.request.id, output.scores[index]))
            if tokens:
                effects.append(self._emit(row, tokens, batch_row, now))
            elif index in output.failures:
                effects.append(self._fail(row, output.failures[index], now))
        return effects

    def take_pending_effects(self) -> list[DecodeEffect]:
        """Takes the effects of `schedule`: rows that were sent back."""
        pending, self._pending = self._pending, []
        return pending

    def next_wakeup(self) -> float | None:
        """None: rows never wait for a point in time."""
        return None

    @property
    def _queues(self) -> tuple[deque[DecodeRow] | list[DecodeRow], ...]:
        return self._imported, self._local, self._running, self._preempted

    def _resume(self, copies: list[HostCopy], now: float) -> None:
        while self._preempted:
            row = self._order.next_back(self._preempted, now)
            num_missing, num_free = row.table.num_missing(len(row.tokens)), self._imports.num_reservable_pages
            if self._running and num_missing + len(self._running) + self.sent_back.num_pages(now) > num_free:
                return
            if num_missing > num_free or not row.take_room(self._imports.limits.max_row_tokens, len(self._running)):
                return
            self._preempted.remove(row)
            if not self._host.is_intact(row.host_slots):
                self._send_back(row, SendBackReason.DAMAGED_COPY, "its pages were damaged in host memory")
                continue
            copies.append(row.copy_back(row.host_slots))
            row.table.settle(*self._host.kept(row.host_slots, row.num_filled // self._page_size))
            self._host.free(row.host_slots)
            row.host_slots = ()
            self._order.on_resumed(row, now)
            self._join(row, "resume", now)

    def _join(self, row: DecodeRow, event: str, now: float) -> None:
        bisect.insort(self._running, row, key=_arrival_number)
        row.timer.enter(now)
        if self._drafts is not None and event != "resume":
            self._drafts.begin(row.request, row.tokens)
        log_transition("row", row.request.id, event, "running")

    def _grow(self, copies: list[HostCopy], now: float) -> None:
        for row in list(self._running):
            grows = row.table.has_windows or len(row.tokens) > row.table.num_slots
            while grows and row in self._running and not self._ensure_page(row):
                self._preempt(self._order.victim(self._running, self._fits_host), copies, now)

    def _ensure_page(self, row: DecodeRow) -> bool:
        return row.take_next(self._imports.limits.max_row_tokens, self._imports.num_reservable_pages)

    def _fits_host(self, row: DecodeRow) -> bool:
        return ceil_div(row.num_filled, self._page_size) <= self._host.num_free

    def _preempt(self, row: DecodeRow, copies: list[HostCopy], now: float) -> None:
        """Copies a row's filled pages to the swap space. Sends the row back if it is full."""
        self._running.remove(row)
        pages = row.table.pages[: ceil_div(row.num_filled, self._page_size)]
        slots = self._host.allocate(len(pages))
        if slots is None:
            row.timer.leave(now)
            self.sent_back.keep(row, now)
            self._send_back(row, SendBackReason.NO_MEMORY, "no page and no host memory left")
            return
        row.timer.preempt(now)
        row.preempted_at = now
        self.num_preemptions += 1
        if self._growth is not None:
            self._growth.on_preempted([one.growth() for one in self._running])
        copies.append(row.copy_out(slots))
        self._host.keep(slots, row.table.digests(len(pages)), row.table.windowless(len(pages)))
        row.host_slots = slots
        row.table.release()
        bisect.insort(self._preempted, row, key=_arrival_number)
        log_transition("row", row.request.id, "preempt", "preempted")

    def _send_back(self, row: DecodeRow, reason: SendBackReason, why: str) -> None:
        """Ends a row that is in no queue; the router retries it."""
        self.num_send_backs[reason] += 1
        self._release(row)
        self._pending.append(Fail(row.request.id, SentBack(f"{row.request.id}: {why}"), row.timer.times()))
        log_transition("row", row.request.id, "send_back", "ended")

    def _add_local_chunks(self, rows: list[Row]) -> None:
        if not self._local:
            return
        beside = StepShape.of(_segments(rows))
        budget = self.chunks.tokens(beside, self._local[0].num_filled)
        for row in self._local:
            num_tokens = cut(row.num_filled, len(row.tokens), row.most_tokens(budget), self._page_size)
            if num_tokens == 0:
                return
            rows.append(self._batch_row(row, num_tokens))
            budget -= num_tokens

    def _add_drafts(self, rows: list[Row], policy: DraftPolicy) -> None:
        """Gives drafts to running rows, whose places in `rows` are the first."""
        shape, budget = StepShape.of(_segments(rows)), self.chunks.token_budget
        if not policy.asks(shape, len(self._running), rows_wait=bool(self._preempted)):
            return
        left = budget - sum(len(row.tokens) for row in rows) if budget else None
        limits = [DraftLimits.of(row.request, row.tokens, row.table.num_slots) for row in self._running]
        planned = policy.plan(limits, shape, left, self._imports.num_reservable_pages - len(self._running))
        for index, (row, proposal) in enumerate(zip(self._running, planned, strict=True)):
            if proposal.tokens and row.table.extend(len(row.tokens) + len(proposal.tokens)):
                row.cover_windows(len(row.tokens) + len(proposal.tokens))
                rows[index] = rows[index].with_drafts(row.request, proposal.tokens, proposal.parents)

    def _batch_row(self, row: DecodeRow, num_tokens: int = 1) -> Row:
        request, start, end = row.request, row.num_filled, row.num_filled + num_tokens
        if row.table.has_windows:
            row.cover_windows(end)
        spec = SampleSpec.of(request, row.tokens) if end == len(row.tokens) else None
        score = ScoreSpec.of(request, start, end) if row in self._local else None
        pages, media = row.table.pages, request.media
        return Row(request.id, row.tokens[start:end], start, pages, spec, score, media=media)

    def _stepped_rows(self, batch: Batch) -> dict[AttemptId, DecodeRow]:
        """Rows of a finished step that are still here, and perhaps others."""
        return {row.request.id: row for queue in (self._running, self._local) for row in queue}

    @staticmethod
    def _walk(
        batch_row: Row, by_id: Mapping[AttemptId, DecodeRow], sampled: tuple[SampledToken, ...]
    ) -> tuple[SampledToken, ...]:
        """The tokens that a row emits of those that were sampled for it."""
        row = by_id.get(batch_row.id) if batch_row.drafted else None
        return sampled if row is None else row.emitted(batch_row, sampled)

    def _settle(self, batch: Batch, ends: list[int], by_id: Mapping[AttemptId, DecodeRow]) -> None:
        """Hashes the pages that a step has filled up to `ends`, in one batch: on a GPU each call copies to the host."""
        full: list[PageId] = []
        for batch_row, end in zip(batch.rows, ends, strict=True):
            if (row := by_id.get(batch_row.id)) is not None:
                full += row.table.pages[row.num_filled // self._page_size : end // self._page_size]
        self._imports.settle(full)

    def _advance_row(self, row: DecodeRow, num_filled: int) -> None:
        crosses_edge = num_filled // self._page_size > row.num_filled // self._page_size
        row.num_filled = num_filled
        if crosses_edge:
            row.table.cache_full_pages(row.tokens, num_filled)
        if row.table.has_windows:
            row.table.pass_windows(num_filled)

    def _emit(self, row: DecodeRow, sampled: tuple[SampledToken, ...], stepped: Row, now: float) -> EmitTokens:
        """Emits the row's newest tokens; all but the last are its own already. Only the last one may end it."""
        last = sampled[-1]
        row.tokens.append(last.token)
        num_output = row.num_output_tokens
        if row in self._local:
            self._local.remove(row)
            row.reserve_windows(self._imports.limits.max_row_tokens)
            self._join(row, "prompt_done", now)
        elif self._drafts is not None:
            self._drafts.accepted(row.request.id, row.tokens[-len(sampled) :], len(stepped.drafted), stepped.path)
        tokens: tuple[OutputToken, ...] = (OutputToken(num_output - 1, last.token, last.logprobs),)
        if stepped.drafted:
            first = num_output - len(sampled)
            tokens = tuple([OutputToken(index, one.token, one.logprobs) for index, one in enumerate(sampled, first)])
        finish = finish_reason(row.request.stop, last.token, num_output)
        if finish is None:
            return EmitTokens(row.request.id, tokens, None)
        self._running.remove(row)
        row.timer.leave(now)
        self._release(row)
        self._learn_length(row)
        log_transition("row", row.request.id, finish.value, "ended")
        return EmitTokens(row.request.id, tokens, finish, row.timer.times())

    def _fail(self, row: DecodeRow, error: BatonError, now: float) -> Fail:
        """Ends a row that a step has failed."""
        if row in self._local:
            self._local.remove(row)
        else:
            self._running.remove(row)
            row.timer.leave(now)
        self._release(row)
        log_transition("row", row.request.id, "fail", "ended")
        return Fail(row.request.id, error, row.timer.times())

    def _row(self, request: EngineRequest, table: PageTable, tokens: list[int], num_filled: int) -> DecodeRow:
        timer, level = RowTimer(self._totals), float(request.priority)
        return DecodeRow(next(self._arrival_numbers), request, table, tokens, num_filled, timer, level=level)

    def _learn_length(self, row: DecodeRow) -> None:
        """Learns from an ended output; the router aborts one that ends with a stop string."""
        if self._growth is not None and row.num_output_tokens:
            self._growth.on_ended(row.num_output_tokens)

    def _release(self, row: DecodeRow) -> None:
        row.table.release()
        if self._drafts is not None:
            self._drafts.end(row.request.id)
        if row.host_slots:
            self._host.free(row.host_slots)
            row.host_slots = ()
