"""The policy classes that a simulated cluster is made of, so that tests can plant a broken one."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.intake import Intake
from baton.engine.lifetime import Lifetime
from baton.state.memory import MemoryBook
from baton.state.ownership import Ownership
from baton.state.writer import BookWriter
from services.decode.arrivals import Arrivals
from services.decode.handoffs import Handoffs
from services.decode.landing import LandingBook
from services.decode.scheduler import DecodeScheduler
from services.prefill.offers import OfferBook
from services.prefill.scheduler import PrefillScheduler
from services.router.api.fence import Fence
from services.router.dispatch.dispatcher import TokenDispatcher
from simulation.scenario import VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Parts:
    """The real ones, unless told otherwise."""

    offer_book: type[OfferBook] = OfferBook
    prefill_scheduler: type[PrefillScheduler] = PrefillScheduler
    landing_book: type[LandingBook] = LandingBook
    decode_scheduler: type[DecodeScheduler] = DecodeScheduler
    arrivals: type[Arrivals] = Arrivals
    handoffs: type[Handoffs] = Handoffs
    lifetime: type[Lifetime] = Lifetime
    dispatcher: type[TokenDispatcher] = TokenDispatcher
    book: type[MemoryBook] = MemoryBook
    writer: type[BookWriter] = BookWriter
    ownership: type[Ownership] = Ownership
    fence: type[Fence] = Fence


@dataclass(frozen=True, slots=True)
class Sizes:
    """How small the world is, and its times: defaults, but for leases and deadlines."""

    page_size: int = 2
    num_prefill_pages: int = 14
    num_decode_pages: int = 12
    token_budget: int = 4
    max_chunking: int = 2
    max_pinned_pages: int = 7
    max_rows: int = 4
    max_window_pages: int = 2
    max_model_len: int = 32
    lease_s: float = 1.2
    renew_s: float = 0.5
    pull_deadline_s: float = 1.0
    promise_s: float = 1.5
    heartbeat_s: float = 0.5
    worker_ttl_s: float = 2.0
    max_step_age_s: float = 1.5
    patience_s: float = 3.0
    max_attempts: int = 4
    drain_s: float = 2.0
    owner_ttl_s: float = 1.5


SIZES = Sizes()
MODEL = "fake"


def fingerprint(version: int) -> str:
    """Of workers that have this version of the model."""
    return f"{MODEL} {version}"


INTAKE = Intake(VOCAB_SIZE, SIZES.max_model_len)
