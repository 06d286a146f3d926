"""A prefill side and a decode side joined by messages in lists: any order, any delay, any abort, one honest client.

Each request's tokens must be those of the model run alone, whatever happens between the two. Reads move the source's
bytes when they end, so what prefill frees too soon is what decode would compute with.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.domain.ids import AttemptId, RequestId, WorkerId
from baton.domain.request import EngineRequest, FinishReason, OutputToken, StopParams
from baton.kv.keys import page_keys
from baton.transfer.base import Pull, PullEvent, PullOutcome
from baton.transfer.digest import digest_pages, mismatches
from services.decode.arrivals import Arrivals
from services.decode.effects import AbortHandoff, AskCommit, ConfirmCommit, DecodeEffect, EmitTokens, StartPull
from services.decode.effects import Fail as DecodeFail
from services.decode.landing import LandingBook, Promised, SealInfo
from services.decode.scheduler import DecodeScheduler
from services.prefill.offers import OfferBook
from services.prefill.scheduler import Fail as PrefillFail
from services.prefill.scheduler import PrefillEffect, PrefillScheduler, PublishChunk, Seal
from tests.worlds import (
    PAGE_BYTES,
    PAGE_SIZE,
    assert_idle,
    check_books,
    decode_world,
    engine_request,
    output_alone,
    prefill_world,
)

SOURCE = WorkerId("prefill-0")
LEASE_S = 3.0
MAX_STEPS_TO_END = 400
SHARED = [0, 1, 1, 0, 1, 0, 0, 1]
PROMPTS = st.builds(
    lambda num_shared, tail: SHARED[:num_shared] + tail,
    st.sampled_from([0, 2, 4, 8]),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
)


@dataclass
class Client:
    """One request: what was asked and what was received, over all attempts."""

    prompt: list[int]
    stop: StopParams
    seed: int
    received: list[int] = field(default_factory=list)
    attempt: int = 0
    running: bool = False
    done: bool = False


@dataclass(frozen=True)
class Published:
    """A chunk on its way from prefill to decode, with the digests its pages had when it was announced."""

    chunk: PublishChunk
    digests: tuple[int, ...]


Announcement = Published | Seal | PrefillFail
Word = AskCommit | ConfirmCommit | AbortHandoff


class SplitMachine(RuleBasedStateMachine):
    """Rules are what the network, the engines, the clients and the clock may do."""

    offer_book: type[OfferBook] = OfferBook
    prefill_scheduler: type[PrefillScheduler] = PrefillScheduler
    landing_book: type[LandingBook] = LandingBook
    decode_scheduler: type[DecodeScheduler] = DecodeScheduler
    arrivals: type[Arrivals] = Arrivals
    may_check_digests = True

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.clients: dict[RequestId, Client] = {}
        self.requests: dict[AttemptId, EngineRequest] = {}
        self.announcements: dict[AttemptId, deque[Announcement]] = {}
        self.words: list[Word] = []
        self.answers: list[tuple[AttemptId, bool]] = []
        self.pulls: list[Pull] = []
        self.num_bytes_moved = 0
        self.names = itertools.count()
        self.begin(True, 4)

    @initialize(digests=st.booleans(), num_host_pages=st.sampled_from([0, 4]))
    def begin(self, digests: bool, num_host_pages: int) -> None:
        self.digests = digests = digests and self.may_check_digests
        self.prefill = prefill_world(LEASE_S, offer_book=self.offer_book, prefill_scheduler=self.prefill_scheduler)
        self.decode = decode_world(
            digests, num_host_pages, landing_book=self.landing_book, decode_scheduler=self.decode_scheduler,
            arrivals=self.arrivals,
        )  # fmt: skip

    # -- clients and their router

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 5), seed=st.integers(0, 3))
    def new_client(self, prompt: list[int], max_tokens: int, seed: int) -> None:
        name = RequestId(f"r{next(self.names)}")
        self.clients[name] = Client(prompt, StopParams(max_tokens), seed)
        self._start(name)

    @precondition(lambda self: self._stopped())
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        self._start(data.draw(st.sampled_from(self._stopped())))

    @precondition(lambda self: any(client.running for client in self.clients.values()))
    @rule(data=st.data(), gone=st.booleans())
    def hang_up(self, data: st.DataObject, gone: bool) -> None:
        """The client goes away, or the router gives the attempt up and will try again."""
        name = data.draw(st.sampled_from([name for name, client in self.clients.items() if client.running]))
        self.clients[name].done = gone
        self._stop(AttemptId(name, self.clients[name].attempt))

    # -- engines, network, clock

    @rule(num_steps=st.integers(1, 3))
    def prefill_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            batch = self.prefill.scheduler.schedule(self.now)
            if batch is not None:
                output = self.prefill.runner.run(batch)
                self._hear_prefill(self.prefill.scheduler.commit(batch, output, self.now))

    @precondition(lambda self: self.decode.scheduler.num_rows)
    @rule(num_steps=st.integers(1, 4))
    def decode_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            batch = self.decode.scheduler.schedule(self.now)
            if batch is not None:
                output = self.decode.runner.run(batch)
                self._hear(self.decode.scheduler.commit(batch, output, self.now))
            self._hear(self.decode.scheduler.take_pending())

    @precondition(lambda self: self.announcements)
    @rule(data=st.data(), count=st.integers(1, 3))
    def announce(self, data: st.DataObject, count: int) -> None:
        id = data.draw(st.sampled_from(list(self.announcements)))
        for _ in range(min(count, len(self.announcements[id]))):
            self._deliver(id)

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), breaks=st.integers(0, 9))
    def end_read(self, data: st.DataObject, breaks: int) -> None:
        self._end_read(data.draw(st.sampled_from(self.pulls)), broken=breaks == 0)

    @precondition(lambda self: self.words)
    @rule(data=st.data())
    def tell_prefill(self, data: st.DataObject) -> None:
        self._tell_prefill(data.draw(st.sampled_from(self.words)))

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def tell_decode(self, data: st.DataObject) -> None:
        self._tell_decode(data.draw(st.sampled_from(self.answers)))

    @rule()
    def renew(self) -> None:
        self.prefill.offers.renew(list(self.requests), self.now)

    @rule(dt=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, dt: float) -> None:
        self.now += dt
        self._hear_prefill(self.prefill.scheduler.expire(self.now))
        self._hear(self.decode.arrivals.expire(self.now))

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

    def teardown(self) -> None:
        """With a quiet network everybody gets everything, then every page of both sides comes back."""
        for _ in range(MAX_STEPS_TO_END):
            if all(client.done for client in self.clients.values()):
                break
            self._calm_round()
        for name, client in self.clients.items():
            assert client.done, f"{name} starved"
        self._empty_the_network()
        self.wait(1000.0)
        self._empty_the_network()
        assert_idle(self.prefill.cache)
        assert_idle(self.decode.cache)
        assert self.decode.host.num_free == self.decode.host.num_slots
        assert len(self.prefill.offers) == len(self.decode.landings) == self.decode.landings.num_draining == 0

    # -- how it is done

    def _calm_round(self) -> None:
        for name in self._stopped():
            self._start(name)
        self.prefill_steps(1)
        self._empty_the_network()
        self.decode_steps(1)
        self.now += 0.1
        self.renew()

    def _empty_the_network(self) -> None:
        while self.announcements or self.pulls or self.words or self.answers:
            for id in list(self.announcements):
                self._deliver(id)
            for pull in list(self.pulls):
                self._end_read(pull, broken=False)
            for word in list(self.words):
                self._tell_prefill(word)
            for answer in list(self.answers):
                self._tell_decode(answer)

    def _stopped(self) -> list[RequestId]:
        return [name for name, client in self.clients.items() if not client.running and not client.done]

    def _start(self, name: RequestId) -> None:
        client = self.clients[name]
        client.attempt += 1
        request = engine_request(
            name, client.prompt, attempt=client.attempt, emitted=client.received, stop=client.stop, seed=client.seed
        )
        keys = page_keys(request.tokens, PAGE_SIZE, request.salt)
        answer, effects = self.decode.arrivals.promise(request.id, len(request.tokens), keys, self.now, 5.0)
        self._hear(effects)
        if not isinstance(answer, Promised):
            return
        client.running = True
        self.requests[request.id] = request
        self._hear(self.decode.arrivals.claim(answer.id, request, SOURCE, self.now + 30))
        assert client.running, "a promise that was given was not kept"
        self._hear_prefill(self.prefill.scheduler.add(request, answer.prefix_len, self.now + 30))

    def _stop(self, id: AttemptId) -> None:
        """What a router does with an attempt that is over for it."""
        self.clients[id.request_id].running = False
        self.prefill.scheduler.abort(id)
        self._hear(self.decode.arrivals.abort(id))

    def _is_current(self, id: AttemptId) -> bool:
        client = self.clients[id.request_id]
        return client.running and client.attempt == id.attempt

    def _receive(self, id: AttemptId, token: OutputToken, finish: FinishReason | None) -> None:
        assert self._is_current(id), f"{id} emitted although it was over"
        client = self.clients[id.request_id]
        assert token.index == len(client.received), "a gap or a duplicate"
        client.received.append(token.token)
        if finish is not None:
            client.done, client.running = True, False

    def _hear_prefill(self, effects: list[PrefillEffect]) -> None:
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
                    if self._is_current(id):
                        self._stop(id)
            if not line:
                del self.announcements[effect.id]

    def _deliver(self, id: AttemptId) -> None:
        event = self.announcements[id].popleft()
        if not self.announcements[id]:
            del self.announcements[id]
        match event:
            case Published(chunk, digests):
                known = digests if self.digests else None
                self._hear(self.decode.arrivals.chunk(id, chunk.first_page, chunk.pages, known, self.now))
            case Seal():
                info = SealInfo(event.first_token, event.finish, event.num_pages)
                self._hear(self.decode.arrivals.sealed(id, info, self.now))
            case PrefillFail(_, error):
                self._hear(self.decode.arrivals.source_lost(id, error))

    def _end_read(self, pull: Pull, broken: bool) -> None:
        self.pulls.remove(pull)
        memory, num_bytes = self.decode.memory, PAGE_BYTES * len(pull.local_pages)
        for remote, local in zip(pull.remote_pages, pull.local_pages, strict=True):
            memory.page(local)[:] = self.prefill.memory.page(remote)
        wrong = [] if pull.digests is None else mismatches(memory, pull.local_pages, pull.digests)
        outcome = PullOutcome.FAILED if broken else PullOutcome.CORRUPT if wrong else PullOutcome.DONE
        self.num_bytes_moved += num_bytes
        event = PullEvent(pull, outcome, num_bytes, 0.1, corrupt=() if broken else tuple(wrong))
        self._hear(self.decode.arrivals.pulled(event, self.now))

    def _tell_prefill(self, word: Word) -> None:
        self.words.remove(word)
        match word:
            case AbortHandoff(id):
                self.prefill.scheduler.abort(id)
            case AskCommit(id):
                self.answers.append((id, self.prefill.offers.commit(id)))
            case ConfirmCommit(id):
                self.prefill.offers.commit(id)

    def _tell_decode(self, answer: tuple[AttemptId, bool]) -> None:
        self.answers.remove(answer)
        self._hear(self.decode.arrivals.commit_answer(*answer, self.now))

    def _hear(self, effects: list[DecodeEffect]) -> None:
        for effect in effects:
            match effect:
                case StartPull(pull):
                    self.pulls.append(pull)
                case AskCommit() | ConfirmCommit() | AbortHandoff():
                    self.words.append(effect)
                case EmitTokens(id, tokens, finish):
                    for token in tokens:
                        self._receive(id, token, finish if token is tokens[-1] else None)
                case DecodeFail(id):
                    if self._is_current(id):
                        self._stop(id)
                case _:
                    pass
