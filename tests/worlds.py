"""Tiny worlds: a few small pages, two tokens, a model that is exact, and nothing that runs by itself.

The property tests build their prefill and decode sides here. Every side has the real bookkeeping and the fake runner,
which refuses a row whose page table does not spell its history.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import Phase, settings

from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import (
    EngineRequest,
    FinishReason,
    SamplingParams,
    StopParams,
    banned_tokens,
    finish_reason,
)
from baton.engine.fake_runner import SLOT_BYTES, FakeRunner, fake_slots, fake_token
from baton.kv.memory import PageMemory
from baton.kv.pages import Owner, PagePool
from baton.kv.radix import RadixCache
from baton.kv.tiers import HostTier
from services.decode.arrivals import ArrivalRules, Arrivals
from services.decode.landing import LandingBook, LandingLimits
from services.decode.scheduler import DecodeScheduler
from services.prefill.offers import OfferBook
from services.prefill.scheduler import PrefillLimits, PrefillScheduler

PAGE_SIZE = 2
NUM_PAGES = 8
PAGE_BYTES = PAGE_SIZE * SLOT_BYTES
VOCAB_SIZE = 2

REPRODUCIBLE = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, database=None, deadline=None, report_multiple_bugs=False
)
"""The same examples in every run, so that a red build is always the change's fault."""

UNSHRUNK = settings(REPRODUCIBLE, max_examples=600, phases=(Phase.generate,), print_blob=False)
"""For bugs that were planted: to find them is enough."""


class SmallMemory(PageMemory):
    """A pool's bytes in an ordinary array: no mapping, no huge page, gone with the test."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.buffer = memoryview(bytearray(num_pages * page_bytes))
        self.address = 0


@dataclass(frozen=True)
class PrefillWorld:
    """One prefill worker without its loop. The classes may be replaced by broken ones."""

    memory: SmallMemory
    cache: RadixCache
    offers: OfferBook
    scheduler: PrefillScheduler
    runner: FakeRunner


@dataclass(frozen=True)
class DecodeWorld:
    """One decode worker without its loop. The classes may be replaced by broken ones."""

    memory: SmallMemory
    cache: RadixCache
    landings: LandingBook
    host: HostTier
    scheduler: DecodeScheduler
    arrivals: Arrivals
    runner: FakeRunner


def prefill_world(
    lease_s: float,
    token_budget: int = 2 * PAGE_SIZE,
    max_pinned_pages: int = NUM_PAGES // 2,
    max_chunking: int = 2,
    offer_book: type[OfferBook] = OfferBook,
    prefill_scheduler: type[PrefillScheduler] = PrefillScheduler,
    grants_leases: bool = False,
) -> PrefillWorld:
    memory = SmallMemory(NUM_PAGES, PAGE_BYTES)
    cache = RadixCache(PagePool(NUM_PAGES))
    offers = offer_book(cache.pool, lease_s, grants_leases)
    limits = PrefillLimits(PAGE_SIZE, token_budget, max_chunking, max_pinned_pages)
    runner = FakeRunner(memory, PAGE_SIZE, VOCAB_SIZE)
    return PrefillWorld(memory, cache, offers, prefill_scheduler(cache, offers, limits), runner)


def decode_world(
    digests: bool,
    num_host_pages: int,
    max_rows: int = 4,
    max_window_pages: int = 2,
    landing_book: type[LandingBook] = LandingBook,
    decode_scheduler: type[DecodeScheduler] = DecodeScheduler,
    arrivals: type[Arrivals] = Arrivals,
    token_budget: int = 0,
) -> DecodeWorld:
    memory = SmallMemory(NUM_PAGES, PAGE_BYTES)
    cache = RadixCache(PagePool(NUM_PAGES))
    landings = landing_book(cache, LandingLimits(PAGE_SIZE, max_rows, max_window_pages, pull_deadline_s=1.0))
    host = HostTier(num_host_pages)
    scheduler = decode_scheduler(landings, host, PAGE_SIZE, token_budget)
    door = arrivals(cache.pool, landings, scheduler, ArrivalRules(PAGE_SIZE, digests))
    runner = FakeRunner(memory, PAGE_SIZE, VOCAB_SIZE, SmallMemory(max(1, num_host_pages), PAGE_BYTES))
    return DecodeWorld(memory, cache, landings, host, scheduler, door, runner)


def engine_request(
    name: str,
    prompt: list[int],
    *,
    attempt: int = 1,
    emitted: list[int] | None = None,
    stop: StopParams | None = None,
    seed: int = 0,
    salt: str = "",
) -> EngineRequest:
    """A request under the model of this module, with what earlier attempts emitted."""
    sampling = SamplingParams(temperature=1.0, seed=seed)
    tokens = (*prompt, *(emitted or []))
    id = AttemptId(RequestId(name), attempt)
    return EngineRequest(id, tokens, len(prompt), sampling, stop or StopParams(max_tokens=4), salt)


def next_token(request: EngineRequest, tokens: list[int]) -> tuple[int, FinishReason | None]:
    """What the model says after `tokens`, which begin with the prompt, and whether that ends the sequence."""
    num_outputs = len(tokens) - request.num_prompt_tokens
    banned = banned_tokens(request.stop, num_outputs)
    token = fake_token(tokens, VOCAB_SIZE, request.sampling.seed, banned)
    return token, finish_reason(request.stop, token, num_outputs + 1)


def output_alone(request: EngineRequest) -> list[int]:
    """Everything the model says after the prompt when nobody else is there."""
    tokens, finish = list(request.tokens[: request.num_prompt_tokens]), None
    while finish is None:
        token, finish = next_token(request, tokens)
        tokens.append(token)
    return tokens[request.num_prompt_tokens :]


def page_bytes(tokens: tuple[int, ...], page: int) -> bytes:
    """What the page of index `page` holds of `tokens`; shorter than a page at their end."""
    return b"".join(fake_slots(tokens)[page * PAGE_SIZE : (page + 1) * PAGE_SIZE])


def num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


def check_books(cache: RadixCache) -> None:
    """The books agree with themselves, and every page is in exactly one of them."""
    cache.pool.check()
    cache.check()
    assert sum(cache.pool.counts().values()) == cache.pool.num_pages


def assert_idle(cache: RadixCache) -> None:
    """Nothing is left behind: every page is free or cached."""
    check_books(cache)
    assert cache.pool.num_free + cache.pool.num_cached == cache.pool.num_pages
    assert cache.pool.counts()[Owner.CACHED] == len(cache)
