"""Scenarios of one handoff without digests whose commit gets no answer, so that leases have to prove it.

A scenario is a list of `Event`, in any order. Other prompts keep prefill busy, so an unpinned page is soon reused. In
the end client and caches must hold the model's tokens.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import StopParams
from baton.services.decode.effects import AskCommit
from tests.property.machines.split_pair import LEASE_S, Client, Renewal, SplitPair
from tests.tiny_workers import PAGE_SIZE, assert_idle, engine_request

NAME = RequestId("told")
_salts = itertools.count()


class Event(enum.Enum):
    """Event of a scenario."""

    CHUNK = enum.auto()  # prefill computes one
    DELIVERED = enum.auto()  # decode receives everything published so far
    READ = enum.auto()  # one read ends
    RENEWAL = enum.auto()  # decode sends a renewal
    RENEWED = enum.auto()  # the renewal arrives
    GRANTED = enum.auto()  # the answer arrives
    WAIT = enum.auto()  # a third of a lease
    WAIT_LONG = enum.auto()  # more than a lease
    BUSY = enum.auto()  # every unheld page is overwritten
    GIVEN_UP = enum.auto()  # the router's abort arrives at prefill
    RESTART = enum.auto()  # prefill restarts


_USUAL = (
    Event.CHUNK, Event.DELIVERED, Event.RENEWAL, Event.RENEWED, Event.GRANTED, Event.CHUNK, Event.CHUNK, Event.CHUNK,
    Event.DELIVERED,
)  # fmt: skip
_UNUSUAL = st.sampled_from(
    [
        None, Event.READ, Event.RENEWAL, Event.RENEWED, Event.WAIT, Event.WAIT_LONG, Event.BUSY, Event.GIVEN_UP,
        Event.RESTART,
    ]
)  # fmt: skip


@st.composite
def scenarios(draw: st.DrawFn) -> list[Event]:
    """The usual events of a handoff with a lease; between any two of them there may be another."""
    between = [draw(_UNUSUAL) for _ in range(len(_USUAL) + 3)]
    interleaved = itertools.chain.from_iterable(itertools.zip_longest(between, _USUAL))
    return [event for event in interleaved if event is not None]


def run_scenario(pair: SplitPair, prompt: list[int], events: Sequence[Event]) -> None:
    """Runs one handoff with all `events` and ends it. Raises what goes wrong."""
    pair.build(digests=False, num_host_pages=0)
    pair.clients[NAME] = Client(prompt, StopParams(4), seed=0)
    pair.start(NAME)
    for event in events:
        apply_event(pair, event)
    _end(pair)
    for name in ("again", "and again"):  # cached pages of the prompt must be the right ones
        _request_again(pair, RequestId(name), prompt)
    assert_idle(pair.decode.cache)


def apply_event(pair: SplitPair, event: Event) -> None:
    """Applies one event, if it is possible."""
    match event:
        case Event.CHUNK:
            _prefill_steps(pair, 1)
        case Event.DELIVERED:
            deliver_all_published(pair)
        case Event.READ:
            for pull in pair.pulls[:1]:
                pair.end_pull(pull, broken=False)
        case Event.RENEWAL if pair.leased:
            pair.renew()
        case Event.RENEWED:
            for message in [message for message in pair.messages if isinstance(message, Renewal)]:
                pair.deliver_to_prefill(message)
        case Event.GRANTED:
            for reply in list(pair.replies):
                pair.deliver_to_decode(reply)
        case Event.WAIT | Event.WAIT_LONG:
            _wait(pair, 1.0 if event is Event.WAIT else 4.0)
        case Event.BUSY:
            _overwrite_free_pages(pair)
        case Event.GIVEN_UP:
            pair.prefill.scheduler.abort(AttemptId(NAME, 1))
        case Event.RESTART:
            pair.restart_prefill()
            _overwrite_free_pages(pair)


def _prefill_steps(pair: SplitPair, num_steps: int) -> None:
    scheduler = pair.prefill.scheduler
    for _ in range(num_steps):
        if (batch := scheduler.schedule(pair.now)) is not None:
            pair.on_prefill_effects(scheduler.commit(batch, pair.prefill.runner.run(batch), pair.now))


def _wait(pair: SplitPair, seconds: float) -> None:
    pair.now += seconds
    pair.on_prefill_effects(pair.prefill.scheduler.expire(pair.now))
    pair.on_decode_effects(pair.decode.import_policy.expire(pair.now))


def deliver_all_published(pair: SplitPair) -> None:
    """Delivers everything published to decode."""
    while pair.published:
        pair.deliver_published(next(iter(pair.published)))


def _overwrite_free_pages(pair: SplitPair) -> None:
    """Overwrites unheld pages by other prompts, whose handoffs are not modelled."""
    scheduler, runner = pair.prefill.scheduler, pair.prefill.runner
    while (num_pages := pair.prefill.cache.pool.num_free + pair.prefill.cache.pool.num_cached) > 0:
        salt = f"busy {next(_salts)}"
        request = engine_request(salt, [1, 0, 0] * num_pages, salt=salt)
        request = engine_request(salt, list(request.tokens[: num_pages * PAGE_SIZE]), salt=salt)
        scheduler.add(request, 0, pair.now + 30)
        while (batch := scheduler.schedule(pair.now)) is not None and batch.rows[0].id == request.id:
            scheduler.commit(batch, runner.run(batch), pair.now)
        scheduler.release(request.id)
        return


def _end(pair: SplitPair) -> None:
    """Ends the reads, loses the answer to the commit, and runs the row if it may."""
    deliver_all_published(pair)
    while pair.pulls:
        pair.end_pull(pair.pulls[0], broken=False)
    for asked in [message for message in pair.messages if isinstance(message, AskCommit)]:
        pair.drop_message(asked, reached=False)
    while pair.replies:
        pair.deliver_to_decode(pair.replies[0])
    for message in list(pair.messages):
        pair.deliver_to_prefill(message)
    _decode_steps(pair)
    pair.page_counts_agree()
    pair.clients_receive_model_output()
    pair.stop(AttemptId(NAME, 1))
    deliver_everything(pair)
    _wait(pair, 2 * LEASE_S)  # after a lost commit the lease ends the pins
    deliver_everything(pair)


def _request_again(pair: SplitPair, name: RequestId, prompt: list[int]) -> None:
    client = pair.clients[name] = Client(prompt, StopParams(4), seed=0)
    pair.start(name)
    _prefill_steps(pair, 12)
    deliver_everything(pair)
    _decode_steps(pair)
    deliver_everything(pair)
    pair.clients_receive_model_output()
    assert client.done, "an undisturbed handoff did not come to its end"


def _decode_steps(pair: SplitPair) -> None:
    scheduler = pair.decode.scheduler
    pair.on_decode_effects(pair.decode.import_policy.check_pages(pair.now))
    while (batch := scheduler.schedule(pair.now)) is not None:
        pair.on_decode_effects(scheduler.commit(batch, pair.decode.runner.run(batch), pair.now))


def deliver_everything(pair: SplitPair) -> None:
    """Delivers all messages."""
    while pair.published or pair.pulls or pair.messages or pair.replies:
        deliver_all_published(pair)
        for pull in list(pair.pulls):
            pair.end_pull(pull, broken=False)
        for message in list(pair.messages):
            pair.deliver_to_prefill(message)
        for reply in list(pair.replies):
            pair.deliver_to_decode(reply)
