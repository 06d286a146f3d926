"""A prefill and a decode side joined by lists of messages; driven by `split_machine` and `lease_scenarios`.

Every request's tokens must be those of the model run alone. Reads move the source's bytes when they end, so decode
would compute with pages that prefill frees too soon.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis.stateful import invariant

from baton.domain.errors import BatonError, PageVerdict, WorkerLost
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, RequestId, WorkerId
from baton.domain.request import EngineRequest, FinishReason, OutputToken, StopParams
from baton.domain.trust import OPEN_CLUSTER
from baton.engine.handoff.export_events import Seal
from baton.engine.handoff.import_effects import AbortHandoff, AskVerdict, ConfirmCommit
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.messages import Fail as DecodeFail
from baton.engine.messages import Fail as PrefillFail
from baton.kv.keys import page_keys
from baton.kv.page_tags import TagVerifier
from baton.kv.windows.slots import NO_SLOT
from baton.services.decode.effects import AskCommit, DecodeEffect, EmitTokens, ReportImported
from baton.services.decode.import_policy import ImportPolicy
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import Reserved, SealInfo
from baton.services.decode.scheduler import DecodeScheduler
from baton.services.prefill.scheduler import PrefillEffect, PrefillScheduler
from baton.transfer.base import Pull, PullEvent, PullOutcome
from baton.transfer.digest import wrong_positions
from tests.tiny_workers import (
    PAGE_BYTES,
    PAGE_SIZE,
    TinyPrefill,
    check_invariants,
    engine_request,
    expected_output,
    tiny_decode,
    tiny_prefill,
)

SOURCE = WorkerId("prefill-0")
LEASE_S = 3.0


@dataclass
class Client:
    """One request over all its attempts: its prompt and the received tokens."""

    prompt: list[int]
    stop: StopParams
    seed: int
    received: list[int] = field(default_factory=list)
    attempt: int = 0
    reserved: int = 0  # the newest attempt with a reservation
    running: bool = False
    done: bool = False


@dataclass(frozen=True)
class Renewal:
    """Decode -> prefill."""

    ids: tuple[AttemptId, ...]
    sent_at: float


@dataclass(frozen=True)
class AbortSent:
    """Router -> prefill and decode: abort of an attempt."""

    id: AttemptId


@dataclass(frozen=True)
class CommitReply:
    """Prefill -> decode: answer to a commit; None: the call failed."""

    id: AttemptId
    valid: bool | None


@dataclass(frozen=True)
class LeaseGranted:
    """Prefill -> decode: the answer to a `Renewal`."""

    renewal: Renewal
    ids: tuple[AttemptId, ...]


@dataclass(frozen=True)
class Verdict:
    """Prefill -> decode: the answer about suspects. Reads are damaged on their way here, so it is LINK."""

    question: AskVerdict


FromPrefill = PublishedChunk | Seal | PrefillFail
ToPrefill = AskCommit | ConfirmCommit | AbortHandoff | AskVerdict | Renewal | AbortSent
ToDecode = CommitReply | LeaseGranted | AbortSent | Verdict


class SplitPair:
    """Both sides, the network between them and all clients. Subclasses may replace its classes by broken ones."""

    export_table: type[ExportTable] = ExportTable
    prefill_scheduler: type[PrefillScheduler] = PrefillScheduler
    import_table: type[ImportTable] = ImportTable
    decode_scheduler: type[DecodeScheduler] = DecodeScheduler
    import_policy: type[ImportPolicy] = ImportPolicy
    num_window_slots: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.clients: dict[RequestId, Client] = {}
        self.leased: set[AttemptId] = set()  # handoffs whose leases decode renews
        self.published: dict[AttemptId, deque[FromPrefill]] = {}
        self.messages: list[ToPrefill] = []
        self.replies: list[ToDecode] = []
        self.pulls: list[Pull] = []
        self.errors: dict[AttemptId, BatonError] = {}  # errors of attempts that decode ended
        self.num_bytes_moved = 0
        self.num_proven_by: dict[str, int] = {}
        self.build(True, 4)

    def build(self, digests: bool, num_host_pages: int) -> None:
        self.digests = digests
        self.prefill = self._new_prefill()
        self.decode = tiny_decode(
            digests, num_host_pages, import_table=self.import_table, decode_scheduler=self.decode_scheduler,
            import_policy=self.import_policy, num_window_slots=self.num_window_slots,
        )  # fmt: skip

    def lease_ends_at(self, renewal: Renewal) -> float:
        """End of a lease on decode's clock; the real arithmetic is in `HandoffClient`."""
        return renewal.sent_at + LEASE_S

    # -- what must hold

    @invariant()
    def page_counts_agree(self) -> None:
        check_invariants(self.prefill.cache)
        check_invariants(self.decode.cache)
        assert self.decode.imports.num_reservable_pages >= 0

    @invariant()
    def clients_receive_model_output(self) -> None:
        for name, client in self.clients.items():
            alone = expected_output(engine_request(name, client.prompt, stop=client.stop, seed=client.seed))
            assert client.received == alone[: len(client.received)]

    # -- clients and their router

    def stopped(self) -> list[RequestId]:
        return [name for name, client in self.clients.items() if not client.running and not client.done]

    def start(self, name: RequestId) -> None:
        client = self.clients[name]
        client.attempt += 1
        request = engine_request(
            name, client.prompt, attempt=client.attempt, emitted=client.received, stop=client.stop, seed=client.seed
        )
        keys = page_keys(request.tokens, PAGE_SIZE, request.salt)
        reply, effects = self.decode.import_policy.reserve(request.id, len(request.tokens), keys, self.now, 5.0)
        self.on_decode_effects(effects)
        if isinstance(reply, Reserved):
            self._send(request, reply)

    def _send(self, request: EngineRequest, reply: Reserved) -> None:
        client = self.clients[request.id.request_id]
        client.running, client.reserved = True, client.attempt
        self.on_decode_effects(self.decode.import_policy.claim(reply.id, request, SOURCE, self.now + 30))
        assert client.running, "a reservation that was given was not kept"
        self.on_prefill_effects(self.prefill.scheduler.add(request, reply.prefix_len, self.now + 30))

    def stop(self, id: AttemptId) -> None:
        """Sends a router's abort of an attempt to both workers."""
        self.clients[id.request_id].running = False
        self.messages.append(AbortSent(id))
        self.replies.append(AbortSent(id))

    def is_current(self, id: AttemptId) -> bool:
        client = self.clients[id.request_id]
        return client.running and client.attempt == id.attempt

    def _receive(self, id: AttemptId, token: OutputToken, finish: FinishReason | None) -> None:
        client = self.clients[id.request_id]
        assert id.attempt >= client.reserved, f"{id} emitted although a newer attempt was reserved room"
        if not self.is_current(id):  # its stream is closed
            return
        assert token.index == len(client.received), "a gap or a duplicate"
        client.received.append(token.token)
        if finish is not None:
            client.done, client.running = True, False

    # -- prefill

    def _new_prefill(self) -> TinyPrefill:
        return tiny_prefill(
            LEASE_S, export_table=self.export_table, prefill_scheduler=self.prefill_scheduler,
            grants_leases=not self.digests, num_window_slots=self.num_window_slots,
        )  # fmt: skip

    def restart_prefill(self) -> None:
        """Replaces prefill by a new process of the same name with empty memory."""
        self.prefill = self._new_prefill()
        self.published.clear()
        for message in [message for message in self.messages if not isinstance(message, AbortSent)]:
            self.drop_message(message, reached=False)
        self.messages.clear()
        self.leased.clear()
        self.on_decode_effects(self.decode.import_policy.on_source_replaced(SOURCE))
        for id in self.decode.imports.ids():
            self.on_decode_effects(self.decode.import_policy.on_source_lost(id, WorkerLost("the stream broke")))

    def on_prefill_effects(self, effects: list[PrefillEffect]) -> None:
        for effect in effects:
            line = self.published.setdefault(effect.id, deque())
            match effect:
                case PublishedChunk():
                    line.append(effect)
                case Seal(id, index, first_token, finish):
                    line.append(effect)
                    self._receive(id, OutputToken(index, first_token.token), finish)
                case PrefillFail(id):
                    line.append(effect)
                    if self.is_current(id):
                        self.stop(id)
            if not line:
                del self.published[effect.id]

    def deliver_to_prefill(self, message: ToPrefill) -> None:
        """Delivers a message and its answer."""
        self.messages.remove(message)
        self.replies += self._obey(message)

    def drop_message(self, message: ToPrefill, reached: bool) -> None:
        """Loses a message or its answer. For a commit decode gets an unanswered call."""
        self.messages.remove(message)
        if reached:
            self._obey(message)
        if isinstance(message, AskCommit):
            self.replies.append(CommitReply(message.id, None))
        if isinstance(message, AskVerdict):
            self.replies.append(Verdict(message))

    def _obey(self, message: ToPrefill) -> list[ToDecode]:
        exports = self.prefill.exports
        match message:
            case AbortHandoff(id):
                self.prefill.scheduler.release(id)
            case AskVerdict(id):
                self.prefill.scheduler.release(id)
                return [Verdict(message)]
            case AbortSent(id):
                self.prefill.scheduler.abort(id)
            case AskCommit(id):
                return [CommitReply(id, exports.commit(id))]
            case ConfirmCommit(id):
                exports.commit(id)
            case Renewal(ids):
                ended = exports.renew(ids, self.now)
                return [LeaseGranted(message, tuple(id for id in ids if id not in ended))]
        return []

    # -- decode

    def deliver_published(self, id: AttemptId) -> None:
        event = self.published[id].popleft()
        if not self.published[id]:
            del self.published[id]
        match event:
            case PublishedChunk():
                self.leased |= {id} & set(self.decode.imports.ids())
                self.on_decode_effects(self.decode.import_policy.on_chunk(event, self.now))
            case Seal():
                info = SealInfo(event.first_token, event.finish, event.num_pages)
                self.on_decode_effects(self.decode.import_policy.on_seal(id, info, self.now))
            case PrefillFail(_, error):
                self.on_decode_effects(self.decode.import_policy.on_source_lost(id, error))

    def renew(self) -> None:
        self.messages.append(Renewal(tuple(sorted(self.leased, key=str)), self.now))

    def deliver_to_decode(self, reply: ToDecode) -> None:
        self.replies.remove(reply)
        match reply:
            case CommitReply(id, valid):
                self.on_decode_effects(self.decode.import_policy.on_commit_reply(id, valid, self.now))
            case LeaseGranted(renewal, ids):
                if not self.digests:
                    self.decode.import_policy.on_leases_renewed(ids, self.lease_ends_at(renewal))
            case AbortSent(id):
                self.on_decode_effects(self.decode.import_policy.abort(id))
            case Verdict(AskVerdict(id, _, _, text)):
                self.on_decode_effects(self.decode.import_policy.on_verdict(id, PageVerdict.LINK, text))

    def end_pull(self, pull: Pull, broken: bool, damage: Callable[[Pull], None] = lambda pull: None) -> None:
        """Moves the bytes of a read, applies `damage` and reports the outcome to decode."""
        self.pulls.remove(pull)
        num_bytes, found = PAGE_BYTES * len(pull.local_pages), dict[int, int]()
        self._move_bytes(pull)
        damage(pull)
        memory = self.decode.windowed or self.decode.memory
        wrong = wrong_positions(memory, pull, slice(0, len(pull.local_pages)), TagVerifier(OPEN_CLUSTER), found)
        outcome = PullOutcome.FAILED if broken else PullOutcome.CORRUPT if wrong else PullOutcome.DONE
        self.num_bytes_moved += num_bytes
        corrupt = () if broken else tuple(wrong)
        event = PullEvent(pull, outcome, num_bytes, 0.1, corrupt=corrupt, found=tuple(found.values()))
        self.on_decode_effects(self.decode.import_policy.on_pull_event(event, self.now))

    def _move_bytes(self, pull: Pull) -> None:
        for remote, local in zip(pull.remote_pages, pull.local_pages, strict=True):
            self.decode.memory.page(local)[:] = self.prefill.memory.page(remote)
            ours, theirs = self.decode.windowed, self.prefill.windowed
            if ours is not None and theirs is not None and pull.num_parts is None:
                slot = theirs.slot_of[remote]
                window = bytes(PAGE_BYTES) if slot == NO_SLOT else theirs.windows.page(slot)
                ours.windows.page(ours.slot_of[local])[:] = window

    def on_decode_effects(self, effects: list[DecodeEffect]) -> None:
        for effect in effects:
            match effect:
                case Pull():
                    self.pulls.append(effect)
                case AskCommit(id) | ConfirmCommit(id) | AbortHandoff(id) | AskVerdict(id):
                    self.leased.discard(id)
                    self.messages.append(effect)
                case ReportImported():
                    proof = effect.times.proof
                    self.num_proven_by[proof] = self.num_proven_by.get(proof, 0) + 1
                case EmitTokens(id, tokens, finish):
                    for token in tokens:
                        self._receive(id, token, finish if token is tokens[-1] else None)
                case DecodeFail(id, error):
                    self.errors[id] = error
                    if self.is_current(id):
                        self.stop(id)
