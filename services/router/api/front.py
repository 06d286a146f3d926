"""Puts the router's upper half together: everything between HTTP and the dispatcher. `app` and tests build it.

What it gets of the reception book is a `Memory`; without one nothing is durable and no earlier request is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import baton
from baton.domain.ids import OwnerId
from baton.state.memory import MemoryBook
from services.router.api.carry import Carrier, CarryContext, CarryStore
from services.router.api.custody import CallPen, Custody, NoPen
from services.router.api.delivery import AnswerContext
from services.router.api.fence import Fence
from services.router.api.observer import Observer
from services.router.api.reader import CallReader
from services.router.api.resume import Resumption
from services.router.api.validation import Validator
from services.router.generation import Dispatcher
from services.router.text.model import TextModel

FINGERPRINT = f"baton-{baton.__version__}"


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """The API's share of the router's settings. `max_model_len`: prompt and answer together.

    `always_ids`: every streamed event has an id, not only those for clients that ask for an event stream.
    """

    model_name: str
    max_model_len: int
    max_body_bytes: int = 4 * 1024 * 1024
    request_deadline_s: float = 600.0
    ping_interval_s: float = 15.0
    always_ids: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """The reception book as the upper half uses it: read, written, and who this router is in it."""

    store: CarryStore = field(default_factory=MemoryBook)
    pen: CallPen = field(default_factory=NoPen)
    owner: OwnerId = field(default_factory=lambda: OwnerId("router/0"))
    fence: Fence = field(default_factory=Fence)


@dataclass(frozen=True, slots=True)
class Front:
    """The upper half. `carrier` is the caller's to drain and close."""

    reader: CallReader
    answers: AnswerContext
    resumption: Resumption
    carrier: Carrier


def build_front(
    text: TextModel, dispatcher: Dispatcher, limits: ApiLimits, observer: Observer, memory: Memory
) -> Front:
    """Inside the running loop that everything is used on."""
    validator = Validator(text, limits.model_name, limits.max_model_len, limits.request_deadline_s)
    reader = CallReader(validator, text, FINGERPRINT)
    custody = Custody(memory.pen, memory.owner)
    carrier = Carrier(CarryContext(memory.store, reader, dispatcher, text, custody, memory.fence))
    resumption = Resumption(memory.store, reader, text, carrier, limits.ping_interval_s)
    answers = AnswerContext(
        dispatcher,
        text,
        observer,
        custody,
        memory.fence,
        resumption.follow,
        limits.ping_interval_s,
        limits.always_ids,
    )
    return Front(reader, answers, resumption, carrier)
