"""A prefill side and a decode side joined by messages in lists: what `split_machine` and `lease_story` drive.

Each request's tokens must be those of the model run alone, whatever happens between the two. Reads move the source's
bytes when they end, so what prefill frees too soon is what decode would compute with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis.stateful import invariant

from baton.domain.errors import BatonError, WorkerLost
from baton.domain.ids import AttemptId, RequestId, WorkerId
from baton.domain.request import EngineRequest, FinishReason, OutputToken, StopParams
from baton.kv.keys import page_keys
from baton.transfer.base import Pull, PullEvent, PullOutcome
from baton.transfer.digest import digest_pages, mismatches
from services.decode.arrivals import Arrivals
from services.decode.boarding import Promised, SealInfo
from services.decode.effects import (
    AbortHandoff,
    AskCommit,
    ConfirmCommit,
    DecodeEffect,
    EmitTokens,
    ReportLanded,
    StartPull,
)
from services.decode.effects import Fail as DecodeFail
from services.decode.landing import LandingBook
from services.decode.scheduler import DecodeScheduler
from services.prefill.offers import OfferBook
from services.prefill.scheduler import Fail as PrefillFail
from services.prefill.scheduler import PrefillEffect, PrefillScheduler, PublishChunk, Seal
from tests.worlds import (
    PAGE_BYTES,
    PAGE_SIZE,
    PrefillWorld,
    check_books,
    decode_world,
    engine_request,
    output_alone,
    prefill_world,
)

SOURCE = WorkerId("prefill-0")
LEASE_S = 3.0


@dataclass
class Client:
    """One request: what was asked and what was received, over all attempts."""

    prompt: list[int]
    stop: StopParams
    seed: int
    received: list[int] = field(default_factory=list)
    attempt: int = 0
    promised: int = 0  # the newest attempt that decode has promised room
    running: bool = False
    done: bool = False


@dataclass(frozen=True)
class Published:
    """A chunk on its way from prefill to decode, with the digests its pages had when it was announced."""

    chunk: PublishChunk
    digests: tuple[int, ...]


@dataclass(frozen=True)
class Renewal:
    """Decode -> prefill."""

    ids: tuple[AttemptId, ...]
    sent_at: float


@dataclass(frozen=True)
class GivenUp:
    """Router -> prefill, and -> decode: nobody waits for this attempt any more."""

    id: AttemptId


@dataclass(frozen=True)
class CommitAnswer:
    """Prefill -> decode; None: the call failed, whatever prefill made of it."""

    id: AttemptId
    valid: bool | None


@dataclass(frozen=True)
class Granted:
    """Prefill -> decode: the answer to a `Renewal`."""

    renewal: Renewal
    ids: tuple[AttemptId, ...]


Announcement = Published | Seal | PrefillFail
Word = AskCommit | ConfirmCommit | AbortHandoff | Renewal | GivenUp
Answer = CommitAnswer | Granted | GivenUp


class SplitPair:
    """Both sides, the network between them, and every client. Its classes may be replaced by broken ones."""

    offer_book: type[OfferBook] = OfferBook
    prefill_scheduler: type[PrefillScheduler] = PrefillScheduler
    landing_book: type[LandingBook] = LandingBook
    decode_scheduler: type[DecodeScheduler] = DecodeScheduler
    arrivals: type[Arrivals] = Arrivals

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.clients: dict[RequestId, Client] = {}
        self.leased: set[AttemptId] = set()  # handoffs whose leases decode renews
        self.announcements: dict[AttemptId, deque[Announcement]] = {}
        self.words: list[Word] = []
        self.answers: list[Answer] = []
        self.pulls: list[Pull] = []
        self.errors: dict[AttemptId, BatonError] = {}  # what decode said of attempts that it gave up
        self.num_bytes_moved = 0
        self.num_proven_by: dict[str, int] = {}
        self.make(True, 4)

    def make(self, digests: bool, num_host_pages: int) -> None:
        self.digests = digests
        self.prefill = self._make_prefill()
        self.decode = decode_world(
            digests, num_host_pages, landing_book=self.landing_book, decode_scheduler=self.decode_scheduler,
            arrivals=self.arrivals,
        )  # fmt: skip

    def lease_ends_at(self, renewal: Renewal) -> float:
        """On decode's clock; the real arithmetic is in `Handoffs` and has its own test."""
        return renewal.sent_at + LEASE_S

    # -- what must hold

    @invariant()
    def books_agree(self) -> None:
        check_books(self.prefill.cache)
        check_books(self.decode.cache)
        assert self.decode.landings.num_promisable >= 0

    @invariant()
    def clients_hear_what_the_model_says(self) -> None:
        for name, client in self.clients.items():
            alone = output_alone(engine_request(name, client.prompt, stop=client.stop, seed=client.seed))
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
        answer, effects = self.decode.arrivals.promise(request.id, len(request.tokens), keys, self.now, 5.0)
        self.hear(effects)
        if isinstance(answer, Promised):
            self._send(request, answer)

    def _send(self, request: EngineRequest, answer: Promised) -> None:
        client = self.clients[request.id.request_id]
        client.running, client.promised = True, client.attempt
        self.hear(self.decode.arrivals.claim(answer.id, request, SOURCE, self.now + 30))
        assert client.running, "a promise that was given was not kept"
        self.hear_prefill(self.prefill.scheduler.add(request, answer.prefix_len, self.now + 30))

    def stop(self, id: AttemptId) -> None:
        """What a router does with an attempt that is over for it; both workers hear of it, sooner or later."""
        self.clients[id.request_id].running = False
        self.words.append(GivenUp(id))
        self.answers.append(GivenUp(id))

    def is_current(self, id: AttemptId) -> bool:
        client = self.clients[id.request_id]
        return client.running and client.attempt == id.attempt

    def _receive(self, id: AttemptId, token: OutputToken, finish: FinishReason | None) -> None:
        client = self.clients[id.request_id]
        assert id.attempt >= client.promised, f"{id} emitted although a newer attempt was promised room"
        if not self.is_current(id):  # its stream is closed
            return
        assert token.index == len(client.received), "a gap or a duplicate"
        client.received.append(token.token)
        if finish is not None:
            client.done, client.running = True, False

    # -- prefill

    def _make_prefill(self) -> PrefillWorld:
        return prefill_world(
            LEASE_S, offer_book=self.offer_book, prefill_scheduler=self.prefill_scheduler,
            grants_leases=not self.digests,
        )  # fmt: skip

    def restart_prefill(self) -> None:
        """Another process with the same name: its memory is empty, and nobody there knows of anything."""
        self.prefill = self._make_prefill()
        self.announcements.clear()
        for word in [word for word in self.words if not isinstance(word, GivenUp)]:
            self.lose(word, reached=False)
        self.words.clear()
        self.leased.clear()
        self.hear(self.decode.arrivals.source_replaced(SOURCE))
        for id in self.decode.landings.ids():
            self.hear(self.decode.arrivals.source_lost(id, WorkerLost("the stream broke")))

    def hear_prefill(self, effects: list[PrefillEffect]) -> None:
        for effect in effects:
            line = self.announcements.setdefault(effect.id, deque())
            match effect:
                case PublishChunk(_, _, pages):
                    line.append(Published(effect, digest_pages(self.prefill.memory, pages)))
                case Seal(id, index, first_token, finish):
                    line.append(effect)
                    self._receive(id, OutputToken(index, first_token.token), finish)
                case PrefillFail(id):
                    line.append(effect)
                    if self.is_current(id):
                        self.stop(id)
            if not line:
                del self.announcements[effect.id]

    def tell_prefill(self, word: Word) -> None:
        """A word arrives, and so does its answer."""
        self.words.remove(word)
        self.answers += self._obey(word)

    def lose(self, word: Word, reached: bool) -> None:
        """A word is lost, or its answer is: decode hears that a commit could not be asked for, and nothing else."""
        self.words.remove(word)
        if reached:
            self._obey(word)
        if isinstance(word, AskCommit):
            self.answers.append(CommitAnswer(word.id, None))

    def _obey(self, word: Word) -> list[Answer]:
        offers = self.prefill.offers
        match word:
            case AbortHandoff(id):
                self.prefill.scheduler.release(id)
            case GivenUp(id):
                self.prefill.scheduler.abort(id)
            case AskCommit(id):
                return [CommitAnswer(id, offers.commit(id))]
            case ConfirmCommit(id):
                offers.commit(id)
            case Renewal(ids):
                ended = offers.renew(ids, self.now)
                return [Granted(word, tuple(id for id in ids if id not in ended))]
        return []

    # -- decode

    def deliver(self, id: AttemptId) -> None:
        event = self.announcements[id].popleft()
        if not self.announcements[id]:
            del self.announcements[id]
        match event:
            case Published(chunk, digests):
                known = digests if self.digests else None
                self.leased |= {id} & set(self.decode.landings.ids())
                self.hear(self.decode.arrivals.chunk(id, chunk.first_page, chunk.pages, known, self.now))
            case Seal():
                info = SealInfo(event.first_token, event.finish, event.num_pages)
                self.hear(self.decode.arrivals.sealed(id, info, self.now))
            case PrefillFail(_, error):
                self.hear(self.decode.arrivals.source_lost(id, error))

    def renew(self) -> None:
        self.words.append(Renewal(tuple(sorted(self.leased)), self.now))

    def tell_decode(self, answer: Answer) -> None:
        self.answers.remove(answer)
        match answer:
            case CommitAnswer(id, valid):
                self.hear(self.decode.arrivals.commit_answer(id, valid, self.now))
            case Granted(renewal, ids):
                if not self.digests:
                    self.decode.arrivals.renewed(ids, self.lease_ends_at(renewal))
            case GivenUp(id):
                self.hear(self.decode.arrivals.abort(id))

    def end_read(self, pull: Pull, broken: bool, damage: Callable[[Pull], None] = lambda pull: None) -> None:
        """The bytes move, `damage` is done to them, and decode hears how it went."""
        self.pulls.remove(pull)
        memory, num_bytes = self.decode.memory, PAGE_BYTES * len(pull.local_pages)
        for remote, local in zip(pull.remote_pages, pull.local_pages, strict=True):
            memory.page(local)[:] = self.prefill.memory.page(remote)
        damage(pull)
        wrong = [] if pull.digests is None else mismatches(memory, pull.local_pages, pull.digests)
        outcome = PullOutcome.FAILED if broken else PullOutcome.CORRUPT if wrong else PullOutcome.DONE
        self.num_bytes_moved += num_bytes
        event = PullEvent(pull, outcome, num_bytes, 0.1, corrupt=() if broken else tuple(wrong))
        self.hear(self.decode.arrivals.pulled(event, self.now))

    def hear(self, effects: list[DecodeEffect]) -> None:
        for effect in effects:
            match effect:
                case StartPull(pull):
                    self.pulls.append(pull)
                case AskCommit(id) | ConfirmCommit(id) | AbortHandoff(id):
                    self.leased.discard(id)
                    self.words.append(effect)
                case ReportLanded():
                    self.num_proven_by[effect.proof.value] = self.num_proven_by.get(effect.proof.value, 0) + 1
                case EmitTokens(id, tokens, finish):
                    for token in tokens:
                        self._receive(id, token, finish if token is tokens[-1] else None)
                case DecodeFail(id, error):
                    self.errors[id] = error
                    if self.is_current(id):
                        self.stop(id)
                case _:
                    pass
