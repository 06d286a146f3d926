"""The import policy: turns events of an import into effects and decides when an import is valid. Pure.

Stands between the import table (state of each handoff) and the scheduler (rows). Its rules: which attempts are
admitted, how an import fails, and which proof a commit needs. Called by the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from baton.domain.arithmetic import ceil_div
from baton.domain.errors import (
    BatonError,
    ContextOverflow,
    DeadlineExceeded,
    IntegrityFailure,
    Interrupted,
    LeaseEnded,
    LinkBroken,
    PageVerdict,
    Superseded,
    WorkerLost,
)
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageId, PageKey, ReservationId, WorkerId
from baton.domain.request import EngineRequest, OutputToken
from baton.domain.worker import WorkerBudgets
from baton.engine.handoff.cached_exports import ExportLimits
from baton.engine.handoff.import_effects import AbortHandoff, AskVerdict, ConfirmCommit
from baton.engine.messages import Fail
from baton.kv.growth import GrowthReserve
from baton.kv.pages import PagePool
from baton.kv.quarantine import Quarantine
from baton.services.decode.effects import AskCommit, DecodeEffect, ReportImported
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import Busy, ProofKind, Reserved, SealInfo
from baton.services.decode.page_faults import PageFaults
from baton.services.decode.scheduler import DecodeScheduler
from baton.transfer.base import PullEvent


@dataclass(frozen=True, slots=True)
class ImportRules:
    """`digests`: pages are checked here (V3). Otherwise a commit needs the source's answer (V1) or a lease (V2).

    `tagged`: the fingerprint that pages' tags have to bind; None: tags are not checked.
    """

    page_size: int
    digests: bool
    tagged: str | None = None


class ImportPolicy:
    """Admission and validation of imports for one decode engine."""

    def __init__(
        self,
        pool: PagePool,
        imports: ImportTable,
        scheduler: DecodeScheduler,
        rules: ImportRules,
        faults: PageFaults,
        growth: GrowthReserve | None = None,
    ) -> None:
        self._pool = pool
        self._imports = imports
        self._scheduler = scheduler
        self._rules = rules
        self._faults = faults
        self._growth = growth

    @property
    def budgets(self) -> WorkerBudgets:
        """Budgets in force."""
        limits = self._imports.limits
        return WorkerBudgets(self._scheduler.chunks.token_budget, limits.max_rows, limits.max_reservations)

    def change_budgets(self, budgets: WorkerBudgets) -> None:
        """Puts budgets in force. Rows, imports and local prompts beyond a lowered one go on to their end."""
        rows, reservations = budgets.rows, budgets.reservations
        self._scheduler.chunks = replace(self._scheduler.chunks, token_budget=budgets.prefill_tokens)
        self._imports.limits = replace(self._imports.limits, max_rows=rows, max_reservations=reservations)

    def reserve(
        self,
        id: AttemptId,
        num_tokens: int,
        keys: Sequence[PageKey],
        now: float,
        deadline_s: float,
        max_new_tokens: int = 0,
        computes_prompt: bool = False,
    ) -> tuple[Reserved | Busy, list[DecodeEffect]]:
        """Reserves pages and a row for one attempt, and fails older attempts of the same request.

        `max_new_tokens`: most output tokens of the attempt; the growth reserve counts on them. `computes_prompt`: the
        prompt is to be computed here, which needs a budget for prompts now; a later change of it does not matter.

        Raises `Superseded` for an older attempt and for one that is decoding already."""
        if id in self._scheduler.ids():
            raise Superseded(f"{id} is decoding here already", id)
        effects = self._abort_older(id)
        if computes_prompt and not self._scheduler.takes_prompts and self._imports.get(id) is None:
            self._imports.fence(id)
            return Busy(self._imports.num_reserved_pages, no_prompts=True), effects
        if self._scheduler.num_preempted:  # preempted rows come back before new ones
            self._imports.fence(id)
            return Busy(self._imports.num_reserved_pages), effects
        num_rows = self._scheduler.num_rows
        reply = self._imports.reserve(id, num_tokens, keys, num_rows, now, deadline_s, computes_prompt)
        if isinstance(reply, Reserved) and not self._can_grow(id, max_new_tokens):
            self._imports.abort(id)
            reply = Busy(self._imports.num_reserved_pages)
        self._faults.on_reserved(id)
        return reply, effects

    def claim(
        self,
        reservation_id: ReservationId,
        request: EngineRequest,
        source: WorkerId | None,
        deadline: float,
        received_at: float = 0.0,
    ) -> list[DecodeEffect]:
        """Claims a reservation for `Generate`. An ended reservation and a request that never fits fail at once.

        `source` None: the prompt is computed here.
        """
        num_tokens = request.num_prompt_tokens + request.stop.max_tokens
        num_pages = ceil_div(num_tokens, self._rules.page_size)
        if num_pages > self._pool.num_usable:
            message = f"{num_tokens} tokens need {num_pages} pages, this worker has {self._pool.num_usable}"
            return self.fail(request.id, ContextOverflow(message))
        if source is None:
            return self._claim_local(reservation_id, request, received_at)
        if self._imports.claim(reservation_id, request, source, deadline, received_at):
            return []
        return self._fail_ended(reservation_id, request.id)

    def on_chunk(self, chunk: PublishedChunk, now: float) -> list[DecodeEffect]:
        """Starts the reads of published pages."""
        id = chunk.id
        if self._rules.digests and chunk.digests is None and self._imports.get(id) is not None:
            return self.fail(id, LinkBroken(f"{id}: pages came without digests, which are checked here"))
        try:
            rules = self._rules
            return [*self._imports.on_chunk(chunk, now, check_digests=rules.digests, tagged=rules.tagged)]
        except Interrupted as error:
            return self.fail(id, error)

    def on_seal(self, id: AttemptId, seal: SealInfo, now: float) -> list[DecodeEffect]:
        """Completes the list of pages to read. A seal with a finished sequence ends the attempt here."""
        if seal.finish is not None:
            return self.abort(id)
        try:
            self._imports.on_seal(id, seal, now)
        except Interrupted as error:
            return self.fail(id, error)
        return self._advance(id, now)

    def on_source_lost(self, id: AttemptId, error: BatonError) -> list[DecodeEffect]:
        """Fails the import if the watch broke before the seal. After the seal only the reads decide."""
        kv_import = self._imports.get(id)
        if kv_import is None or kv_import.seal is not None:
            return []
        return self.fail(id, error)

    def on_pull_event(self, event: PullEvent, now: float) -> list[DecodeEffect]:
        """Records the outcome of a read."""
        id = self._imports.attempt_of_pull(event.pull.id)
        try:
            effects: list[DecodeEffect] = [*self._imports.on_pull_event(event, now)]
        except IntegrityFailure as error:
            return [] if id is None else self._ask_verdict(id, str(error))
        except Interrupted as error:
            return [] if id is None else self.fail(id, error)
        return effects if id is None else effects + self._advance(id, now)

    def on_verdict(self, id: AttemptId, verdict: PageVerdict | None, message: str) -> list[DecodeEffect]:
        """Reports an attempt whose import ended with suspects."""
        return [Fail(id, IntegrityFailure(message, verdict))]

    def on_keys_quarantined(self, source: WorkerId, keys: Collection[PageKey]) -> list[DecodeEffect]:
        """Takes a source's quarantined pages out of this pool as well, and fails the attempts that hold them."""
        return self._fail_ruined(self._faults.on_keys_quarantined(source, keys))

    def on_wrong_pages(self, pages: Sequence[PageId], now: float) -> list[DecodeEffect]:
        """Quarantines pages of this pool that differ from their digests, and fails the attempts that hold them."""
        return self._fail_ruined(self._faults.take_out(pages, now))

    @property
    def quarantine(self) -> Quarantine:
        """The pages that were taken out of this pool."""
        return self._faults.quarantine

    def num_free_pages(self) -> int:
        """Available pages that no reservation counts on, nor the next step of any row; negative if there are too few.

        While rows wait for memory there are none.
        """
        if self._scheduler.num_preempted:
            return -self._pool.num_pages
        return self._imports.num_reservable_pages - self._scheduler.num_rows

    def limits_of_next_attempt(self, id: AttemptId, now: float) -> ExportLimits | None:
        """Limits of an export of what a row has left that was sent back; None if `id` is no next attempt of one.

        It gets all that the next step of the rows here leaves: what is not given has to be computed again elsewhere.
        """
        if not self._scheduler.sent_back.is_next_attempt(id, now):
            return None
        num_rows = self._scheduler.num_rows - self._scheduler.num_preempted
        return ExportLimits(self._pool.num_pages, lambda: self._imports.num_reservable_pages - num_rows)

    def on_given(self, id: AttemptId) -> None:
        """Cached pages are pinned for `id`."""
        self._scheduler.sent_back.on_given(id)

    def check_pages(self, now: float) -> list[DecodeEffect]:
        """Checks this turn's share of matched pages. Fails holders of a wrong one; commits those that waited."""
        checked = self._faults.check(now)
        effects = self._fail_ruined(checked.ruined)
        for id in checked.ready:
            effects += self._advance(id, now)
        return effects

    def on_leases_renewed(self, ids: Sequence[AttemptId], lease_ends_at: float) -> None:
        """Extends the leases of `ids` to `lease_ends_at` on this worker's clock."""
        self._imports.on_leases_renewed(ids, lease_ends_at)

    def on_source_replaced(self, source: WorkerId) -> list[DecodeEffect]:
        """Fails the unfinished imports from `source`: its pages were lost with the old process."""
        lost = WorkerLost(f"{source} restarted in the middle of a handoff")
        return [effect for id in self._imports.unfinished(source) for effect in self.fail(id, lost)]

    def on_commit_reply(self, id: AttemptId, valid: bool | None, now: float) -> list[DecodeEffect]:
        """Handles the answer to an `AskCommit`. `valid` None: no answer came, and leases have to prove the pages."""
        if not self._imports.is_ready(id):
            return []
        if valid:
            return self._commit(id, ProofKind.PINS, now)
        if valid is None and self._imports.is_proven(id):
            return self._commit(id, ProofKind.LEASE, now)
        why = "were not held" if valid is False else "cannot be asked for, and no lease covers every read"
        return self.fail(id, LeaseEnded(f"{id}: prefill's pins {why}"))

    def abort(self, id: AttemptId) -> list[DecodeEffect]:
        """Ends an attempt in any state. Idempotent."""
        self._scheduler.abort(id)
        source = self._imports.abort(id)
        return [] if source is None else [AbortHandoff(id, source)]

    def fail(self, id: AttemptId, error: BatonError) -> list[DecodeEffect]:
        """Aborts an attempt and reports `error` to the router."""
        return [*self.abort(id), Fail(id, error)]

    def expire(self, now: float) -> list[DecodeEffect]:
        """Fails the imports that are past their deadline."""
        effects: list[DecodeEffect] = []
        for id in self._imports.expire(now):
            claimed = (kv_import := self._imports.get(id)) is not None and kv_import.request is not None
            error = DeadlineExceeded(f"{id}: not landed in time") if claimed else WorkerLost(f"{id}: never claimed")
            effects += self.fail(id, error)
        return effects

    def next_wakeup(self, now: float) -> float | None:
        """Time of the next deadline; `now` while matched pages wait for their check."""
        return now if self._faults.is_waiting else self._imports.next_deadline()

    def _can_grow(self, id: AttemptId, max_new_tokens: int) -> bool:
        """True if the rows and imports can grow beside a new reservation. One that was made before stays."""
        reserved = self._imports.get(id)
        if self._growth is None or reserved is None or reserved.max_new_tokens or reserved.request is not None:
            return True
        reserved.max_new_tokens = max(1, max_new_tokens)
        imports = [kv_import for one in self._imports.ids() if (kv_import := self._imports.get(one)) is not None]
        growths = [*self._scheduler.growths(), *(kv_import.growth for kv_import in imports)]
        return self._growth.fits(growths, self._imports.num_reservable_pages)

    def _claim_local(
        self, reservation_id: ReservationId, request: EngineRequest, received_at: float
    ) -> list[DecodeEffect]:
        reserved = self._imports.get(request.id)
        if not self._scheduler.takes_prompts and (reserved is None or not reserved.computes_prompt):
            return self.fail(request.id, LinkBroken(f"{request.id}: this worker computes no prompts"))
        ruined = self._faults.check_at_once(request.id, received_at)
        effects = self._fail_ruined(ruined)
        if request.id in ruined:
            return effects
        try:
            prompt = self._imports.claim_local(reservation_id, request)
        except Interrupted as error:
            return effects + self.fail(request.id, error)
        if prompt is None:
            return effects + self._fail_ended(reservation_id, request.id)
        self._scheduler.add_prompt(prompt)
        return effects

    def _fail_ended(self, reservation_id: ReservationId, id: AttemptId) -> list[DecodeEffect]:
        return self.fail(id, LeaseEnded(f"{id}: reservation {reservation_id} has ended"))

    def _fail_ruined(self, ids: Sequence[AttemptId]) -> list[DecodeEffect]:
        """Ends attempts whose pages are wrong where they lie. The pages were taken out, so any worker may retry."""
        why = "a page that it held was damaged in memory"
        return [e for id in ids for e in self.fail(id, IntegrityFailure(f"{id}: {why}", PageVerdict.PULLER))]

    def _ask_verdict(self, id: AttemptId, message: str) -> list[DecodeEffect]:
        """Ends an import with suspects. Its failure is reported when the source has answered."""
        kv_import = self._imports.get(id)
        suspects = () if kv_import is None else tuple(kv_import.suspects)
        source = self._imports.abort(id)
        failure = Fail(id, IntegrityFailure(message))
        return [failure] if source is None else [AskVerdict(id, source, suspects, message)]

    def _advance(self, id: AttemptId, now: float) -> list[DecodeEffect]:
        if not self._imports.is_ready(id):
            return []
        if self._rules.digests:
            return self._commit(id, ProofKind.DIGESTS, now)
        kv_import = self._imports.get(id)
        return [] if kv_import is None or kv_import.source is None else [AskCommit(id, kv_import.source)]

    def _commit(self, id: AttemptId, proof: ProofKind, now: float) -> list[DecodeEffect]:
        imported = self._imports.commit(id, proof, now)
        self._scheduler.add(imported)
        request, first = imported.request, imported.first_token
        report = ReportImported(
            id, imported.source, imported.received_at, len(request.tokens), imported.prefix_len, imported.times,
            OutputToken(request.num_emitted, first.token, first.logprobs),
        )  # fmt: skip
        return [ConfirmCommit(id, imported.source), report] if self._rules.digests else [report]

    def _abort_older(self, id: AttemptId) -> list[DecodeEffect]:
        here = (*self._imports.ids(), *self._scheduler.ids())
        older = [one for one in here if one.request_id == id.request_id and one.order < id.order]
        newer = f"attempt {id.attempt} has come"
        return [effect for one in older for effect in self.fail(one, Superseded(f"{one}: {newer}", id))]
