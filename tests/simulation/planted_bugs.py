"""Protocol bugs for a simulated cluster. Each is a product class with one rule removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType
from typing import Any, cast

from baton.domain.errors import BatonError, WorkerLost
from baton.domain.handoff import ExportEvent, ImportEvent, advance_import
from baton.domain.ids import AttemptId, Ballot, OwnerId, RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import EngineRequest, SampledToken
from baton.engine.batch import Batch, HostCopy, Row, StepOutput
from baton.engine.drafts.policy import DraftPolicy
from baton.engine.handoff.kv_export import ExportTable, KvExport
from baton.engine.media.store import MediaKey
from baton.kv.pages import Hold
from baton.rpc.gen import encode_pb2
from baton.rpc.request_metadata import Metadata
from baton.services.decode.effects import DecodeEffect, EmitTokens
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import DecodeRow, ImportedPrompt, KvImport, SealInfo
from baton.services.decode.scheduler import DecodeScheduler
from baton.services.encode.scheduler import EncodeEffect, EncodeScheduler, GiveEmbedding
from baton.services.prefill.media_gate import MediaGate
from baton.services.prefill.scheduler import PrefillEffect, PrefillScheduler
from baton.services.router.dispatch.dispatcher import TokenDispatcher
from baton.services.router.dispatch.placement.query import Avoided
from baton.services.router.dispatch.reserve import PairReservation, Reserver
from baton.services.router.dispatch.tracked_request import TrackedRequest
from baton.store.memory_call_store import MemoryCallStore
from baton.store.memory_store import MemoryStore
from baton.store.ownership import OwnerLease
from baton.store.store import CallOwner, CallRecord, CallStatus, JournalEntry, JournalPart, LeaseState, WriteOutcome
from baton.worker.media.media_receiver import MediaReceiver


class UnpinsBeforeCommit(ExportTable):
    """Prefill releases the pages while decode still reads them."""

    def seal(self, id: AttemptId) -> None:
        super().seal(id)
        export = self._open[id]
        self._pool.drop(export.pages, Hold.PINNED)
        export.pages = []


class NeverUnpins(ExportTable):
    """Committed pages stay pinned."""

    def _end(self, export: KvExport, event: ExportEvent) -> None:
        if event is ExportEvent.COMMIT:
            export.pages = []
        super()._end(export, event)


class AcceptsOlderAttempts(ExportTable):
    """Has no fencing: a late message starts an attempt that is over."""

    def open(self, id: AttemptId) -> AttemptId | None:
        if id in self._open:
            return super().open(id)
        self._fence._newest.pop(id.request_id, None)
        return super().open(id)


class CommitsDuringReads(ImportTable):
    """Joins the batch while reads are in flight."""

    def is_ready(self, id: AttemptId) -> bool:
        kv_import = self._imports.get(id)
        return bool(kv_import and kv_import.seal and kv_import.request)


class CommitsUnannouncedPages(ImportTable):
    """Takes the seal as the end, although pages were not announced."""

    def on_seal(self, id: AttemptId, seal: SealInfo, now: float) -> None:
        kv_import = self._imports.get(id)
        if kv_import is not None:
            kv_import.queued_pulls.clear()
        super().on_seal(id, seal, now)


class FreesDuringReads(ImportTable):
    """Frees pages although a read in flight may still write them."""

    def _release_if_drained(self, kv_import: KvImport) -> None:
        if kv_import in self._draining:
            kv_import.state = advance_import(kv_import.state, ImportEvent.DRAINED)
            kv_import.table.release()
            self._draining.remove(kv_import)


class ReservesPagesTwice(ImportTable):
    """Ignores reserved pages."""

    @property
    def num_reservable_pages(self) -> int:
        return self._cache.num_available


class EmitsTwice(DecodeScheduler):
    """Emits every third token of a sequence twice."""

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[DecodeEffect]:
        effects: list[DecodeEffect] = []
        for effect in super().commit(batch, output, now):
            effects.append(effect)
            if isinstance(effect, EmitTokens) and effect.finish is None and effect.tokens[0].index % 3 == 2:
                effects.append(effect)
        return effects


class _ClaimsAnyEpoch(MemoryCallStore):
    def claim(self, id: RequestId, ballot: Ballot, owner: OwnerId, **fields: Any) -> CallRecord | None:
        call = self.get(id)
        return super().claim(id, call.ballot if call is not None else ballot, owner, **fields)


class ClaimsWithoutComparing(MemoryStore):
    """Gives a call to any claimant, regardless of the ballot."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls = _ClaimsAnyEpoch(self._sequences, self._options, self._clock)


class _PutsAnyBallot(MemoryCallStore):
    def put(self, record: CallRecord) -> CallOwner:
        stored = self._calls.pop(record.id, None)
        if stored is not None and stored.record.ballot == record.ballot:
            self._calls[record.id] = stored
        return super().put(record)


class PutsLowerBallots(MemoryStore):
    """Enters a call again under whatever ballot its owner has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls = _PutsAnyBallot(self._sequences, self._options, self._clock)


class JournalsWithoutFencing(MemoryStore):
    """Journals tokens of any attempt."""

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[WriteOutcome]:
        records = [await self.get(entry.id.request_id) for entry in entries]
        newest = [
            replace(entry, id=max(record.attempt_id, entry.id, key=lambda id: id.order)) if record else entry
            for entry, record in zip(entries, records, strict=True)
        ]
        return await super().write_journal(newest)


class ReadsOneTooFar(MemoryStore):
    """Continues a journal one token too far."""

    async def read_journal(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        return await super().read_journal(id, start + 1 if start else 0, wait_s)


class ForgetsToEndCalls(MemoryStore):
    """Leaves ended calls open."""

    async def end_call(
        self,
        id: RequestId,
        ballot: Ballot,
        status: CallStatus,
        trace: bytes = b"",
        ended_sequences: Sequence[RequestId] = (),
    ) -> bool:
        return True


class ForgetsConstraints(DecodeScheduler):
    """An imported row is not constrained."""

    def add(self, imported: ImportedPrompt) -> None:
        super().add(replace(imported, request=replace(imported.request, constraint=None)))


class ScoresCachedPages(PrefillScheduler):
    """A scored prompt takes what is cached, like any other."""

    def add(self, request: EngineRequest, *args: Any, **kwargs: Any) -> list[PrefillEffect]:
        effects = super().add(request, *args, **kwargs)
        for prompt in self._queue.waiting:
            prompt.num_matchable = (len(prompt.request.tokens) - 1) // self.limits.page_size
        return effects


class _RenewsOnce:
    """A store that takes an owner's lease once and never renews it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._state: LeaseState | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def hold_lease(self, owner: OwnerId, number: int) -> LeaseState:
        if self._state is None:
            self._state = await self._store.hold_lease(owner, number)
        return LeaseState(self._state.generation, number)


class NeverRenewsLease(OwnerLease):
    """Takes its lease at the start and never renews it."""

    def __init__(self, store: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(_RenewsOnce(store), *args, **kwargs)


class DropsWaitingRequests(TokenDispatcher):
    """A drain ends requests that still wait in the queue."""

    async def _wait_for_slot(self, tracked: TrackedRequest) -> None:
        await super()._wait_for_slot(tracked)
        if self.draining:
            raise WorkerLost("it was still waiting")


class _IgnoresFingerprint(Reserver):
    async def reserve(
        self,
        request: EngineRequest,
        avoided: Avoided,
        deadline: float,
        fingerprint: str = "",
        metadata: Metadata = (),
        affinity: str = "",
        processor: str = "",
        may_start: bool = False,
    ) -> PairReservation | None:
        options = {"metadata": metadata, "affinity": affinity, "processor": processor, "may_start": may_start}
        return await super().reserve(request, avoided, deadline, **cast(Any, options))


class ForgetsPinnedModel(TokenDispatcher):
    """Continues on any worker, whatever its model version."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reserver = _IgnoresFingerprint(self._workers, self._aborts, self._limits.reserve, self._prefill)
        cast(Any, self._workers).has_model = lambda fingerprint, processor="": True


class DropsFingerprint(MemoryStore):
    """Drops the model's fingerprint, so a takeover does not know which model began."""

    async def advance(self, id: AttemptId, *events: RequestEvent, **changed: Any) -> RequestState:
        return await super().advance(id, *events, **{**changed, "fingerprint": ""})


MORE_TOKENS = 99


class SettlesBeforeTheWalk(DecodeScheduler):
    """Takes digests of pages that rejected drafts have filled."""

    def _settle(self, batch: Batch, ends: list[int], by_id: Mapping[AttemptId, DecodeRow]) -> None:
        super()._settle(batch, [row.start + len(row.tokens) for row in batch.rows], by_id)


class AcceptsBehindAFinish(DecodeScheduler):
    """Drafts behind the end of an output, and emits those that were accepted."""

    def _add_drafts(self, rows: list[Row], policy: DraftPolicy) -> None:
        stops = [row.request.stop for row in self._running]
        for row in self._running:
            row.request = replace(row.request, stop=replace(row.request.stop, max_tokens=MORE_TOKENS))
        super()._add_drafts(rows, policy)
        for row, stop in zip(self._running, stops, strict=True):
            row.request = replace(row.request, stop=stop)

    @staticmethod
    def _walk(
        batch_row: Row, by_id: Mapping[AttemptId, DecodeRow], sampled: tuple[SampledToken, ...]
    ) -> tuple[SampledToken, ...]:
        drafts = batch_row.tokens[batch_row.num_known_tokens :]
        matching = takewhile(lambda pair: pair[0] == pair[1].token, zip(drafts, sampled, strict=False))
        return sampled[: len(list(matching)) + 1]


class KeepsProposalAtPreemption(DecodeScheduler):
    """A preempted row comes back with the drafts of its last step as if they were output."""

    _kept: Mapping[AttemptId, Sequence[int]] = MappingProxyType({})

    def _add_drafts(self, rows: list[Row], policy: DraftPolicy) -> None:
        super()._add_drafts(rows, policy)
        self._kept = {row.id: row.tokens[row.num_known_tokens :] for row in rows}

    def _preempt(self, row: DecodeRow, copies: list[HostCopy], now: float) -> None:
        super()._preempt(row, copies, now)
        row.tokens += self._kept.get(row.request.id, ())


class KeepsTreeAtPreemption(KeepsProposalAtPreemption):
    """A preempted row comes back with the nodes of its last tree as if they were output; chains are dropped.

    Not of its last step only: with a spare page for branches there is one for every row's next token.
    """

    def _add_drafts(self, rows: list[Row], policy: DraftPolicy) -> None:
        trees = self._kept
        super()._add_drafts(rows, policy)
        self._kept = {**trees, **{row.id: row.tokens[row.num_known_tokens :] for row in rows if row.parents}}


class SettlesTreesBeforeTheWalk(DecodeScheduler):
    """Takes digests of pages that a rejected node of a tree has filled."""

    def _settle(self, batch: Batch, ends: list[int], by_id: Mapping[AttemptId, DecodeRow]) -> None:
        pairs = zip(batch.rows, ends, strict=True)
        super()._settle(batch, [row.start + len(row.tokens) if row.path else end for row, end in pairs], by_id)


class AcceptsTreesBehindAFinish(AcceptsBehindAFinish):
    """The same for paths of trees only."""

    @staticmethod
    def _walk(
        batch_row: Row, by_id: Mapping[AttemptId, DecodeRow], sampled: tuple[SampledToken, ...]
    ) -> tuple[SampledToken, ...]:
        scheduler = AcceptsBehindAFinish if batch_row.path else DecodeScheduler
        return scheduler._walk(batch_row, by_id, sampled)


class NeverEndsLeases(EncodeScheduler):
    """A pull that has ended keeps its image."""

    def close(self, lease: int) -> None:
        if self._leases.get(lease) is None or not self._leases[lease].is_answered:
            super().close(lease)


class GivesAnotherImage(EncodeScheduler):
    """Gives a pull whatever is encoded with as many rows."""

    def _answer(self, key: MediaKey) -> list[EncodeEffect]:
        effects = super()._answer(key)
        for index, effect in enumerate(effects):
            if isinstance(effect, GiveEmbedding):
                made = [item for item in self.store._held.values() if item.num_rows == effect.item.num_rows]
                effects[index] = replace(effect, item=next(item for item in made if item.rows is not None))
        return effects


class ComputesWithoutImages(MediaGate):
    """A prompt does not wait for its images."""

    def must_wait(self, request: EngineRequest, num_known: int) -> bool:
        super().must_wait(request, num_known)
        return False


class ComparesNoEmbeddings(MediaGate):
    """A step uses the embeddings that are held, whatever has become of them."""

    def check(self, rows: Sequence[Row]) -> list[tuple[AttemptId, BatonError]]:
        return []


class ComputesOnAnything(ComputesWithoutImages, ComparesNoEmbeddings):
    """A prompt neither waits for its images, nor is it known before the step that they are not there."""


class KeepsRoomOfUploads(MediaReceiver):
    """The bytes of an upload or a pull count for ever."""

    def _release(self, num_bytes: int) -> None:
        pass


def takes_any_part(part: encode_pb2.EmbeddingPart, digests: Sequence[int], at: int, num_bytes: int) -> bytes:
    """In place of the puller's check: takes a part whatever its digest."""
    return part.data
