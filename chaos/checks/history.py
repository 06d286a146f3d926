"""Checks that a client's events and the state store's records are consistent. Pure; needs no oracle.

A client's history is its events in order and its end; the store's is every observation of a sequence's record, in order
of time, and the journal of its tokens. `store_watcher` collects the store's side, `check` finds contradictions. A store
that was lost (a restarted Redis) has gaps, so absent records contradict nothing; present ones must fit.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.domain.lifecycle import RequestState
from baton.store.store import JournalPart, SequenceRecord
from chaos.clients.client import Event, StreamEnd, Transcript

_CURSOR = re.compile(r"([^:]+):([\d.~a-f]*)(?:\+\d)?")


class Rule(enum.Enum):
    """Rules of a history."""

    ONE_END = "a sequence reaches one terminal state and stays there; only a cancelled one may be resumed"
    ATTEMPTS_GROW = "a sequence's attempt never goes down"
    ONE_OWNER = "while the store keeps its data, one router owns a call in an epoch"
    WRITERS_GROW = "no attempt writes a journal behind a later one"
    EMITTED_GROWS = "a sequence's count of emitted tokens never goes down"
    INDICES = "a choice's event ids count up by one, and no other choice's count moves with them"
    ENDS_ONCE = "a choice ends once, and nothing of it comes afterwards"
    JOURNAL_AGREES = "client and journal have the same token at every index both know"
    COUNTS_AGREE = (
        "a finished sequence's record counts the tokens that its client received, or more behind a stop string"
    )
    ENDS_AGREE = "the client's end equals the store's"
    DURABLE = "a call that was announced as durable is never lost"
    OWN_CALL = "every event of an answer names the call that was asked for"
    OWN_TENANT = "a call's record names the tenant whose key asked for it"


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A broken rule, and its place."""

    rule: Rule
    where: str

    def __str__(self) -> str:
        return f"{self.where} ({self.rule.name}: {self.rule.value})"


@dataclass(frozen=True, slots=True)
class SequenceHistory:
    """The store's side of one choice: observations of its record in order of time; None: no journal was found."""

    choice: int
    observations: tuple[SequenceRecord, ...]
    journal: JournalPart | None


@dataclass(frozen=True, slots=True)
class ClientHistory:
    """The client's side of a call. `has_stop_strings`: text may end its answer.

    The journal is written before the text of its tokens is read, and one message may bring several: tokens behind a
    stop string are then written and counted, and never sent.
    """

    call_id: str
    events: tuple[Event, ...]
    end: StreamEnd | None
    durable: bool = False
    has_stop_strings: bool = False
    tenant: str = ""

    @classmethod
    def of(cls, transcript: Transcript) -> ClientHistory:
        """The history that a client has written down."""
        has_stop_strings = bool(transcript.request.parameters.get("stop"))
        tenant = transcript.request.tenant
        return cls(
            transcript.call_id, tuple(transcript.events), transcript.end, transcript.durable, has_stop_strings,
            "" if tenant is None else tenant.name,
        )  # fmt: skip

    def tokens(self, choice: int) -> tuple[int, ...]:
        """Events of one choice."""
        return tuple(token for event in self.events if event.choice == choice for token in event.tokens)

    def finished(self, choice: int) -> bool:
        """True if the choice's last event was received."""
        return any(event.finish for event in self.events if event.choice == choice)

    def agrees(self, choice: int, num_written: int) -> bool:
        """True if the finished choice may have so many tokens in the store."""
        num_received = len(self.tokens(choice))
        if self.has_stop_strings and any(e.finish == "stop" for e in self.events if e.choice == choice):
            return num_written >= num_received
        return num_written == num_received


def check(
    client: ClientHistory, sequences: Sequence[SequenceHistory], stored_tenant: str | None = None
) -> list[Contradiction]:
    """All contradictions of one call. `stored_tenant`: of its record; None without one."""
    found = [*_ids(client), *_names(client), *_choice_ends(client), *_durable(client)]
    if stored_tenant not in (None, client.tenant):
        where = f"{client.call_id}: {client.tenant!r} asked, it is {stored_tenant!r}'s in the store"
        found.append(Contradiction(Rule.OWN_TENANT, where))
    for sequence in sequences:
        found += [*_observations(sequence), *_owners(sequence), *_writers(sequence)]
        found += [*_journal(client, sequence), *_end(client, sequence)]
    return found


def _ids(client: ClientHistory) -> Iterator[Contradiction]:
    """Checks ids, vectors `<call>:<count of choice 0>.<count of choice 1>...`; a client without ids has none."""
    last: tuple[int, ...] | None = None
    for event in client.events:
        found = _CURSOR.fullmatch(event.id)
        if found is None:
            continue
        counts = tuple(int(count.partition("~")[0]) for count in found[2].split(".") if count)
        before = last or (0,) * len(counts)
        expected = tuple(count + (choice == event.choice) for choice, count in enumerate(before))
        if counts != expected:
            yield Contradiction(Rule.INDICES, f"{client.call_id}: {event.id} follows {before}, choice {event.choice}")
            return
        last = counts


def _names(client: ClientHistory) -> Iterator[Contradiction]:
    for event in client.events:
        found = _CURSOR.fullmatch(event.id)
        if found is not None and found[1] != client.call_id:
            yield Contradiction(Rule.OWN_CALL, f"{client.call_id}: received the event {event.id}")
            return


def _durable(client: ClientHistory) -> Iterator[Contradiction]:
    if client.durable and client.end in (StreamEnd.LOST, StreamEnd.TIMED_OUT):
        yield Contradiction(Rule.DURABLE, f"{client.call_id}: {client.end.value} after {len(client.events)} events")


def _choice_ends(client: ClientHistory) -> Iterator[Contradiction]:
    ended: set[int] = set()
    for event in client.events:
        if event.choice in ended:
            yield Contradiction(Rule.ENDS_ONCE, f"{client.call_id}: choice {event.choice} goes on after its end")
        if event.finish:
            ended.add(event.choice)


def _observations(sequence: SequenceHistory) -> Iterator[Contradiction]:
    for earlier, later in pairwise(sequence.observations):
        where = f"{earlier.id}: {_short(earlier)} then {_short(later)}"
        if later.attempt < earlier.attempt:
            yield Contradiction(Rule.ATTEMPTS_GROW, where)
        if later.num_emitted < earlier.num_emitted:
            yield Contradiction(Rule.EMITTED_GROWS, where)
        if earlier.state.terminal and later.state is not earlier.state and not _resumed(earlier, later):
            yield Contradiction(Rule.ONE_END, where)


def _owners(sequence: SequenceHistory) -> Iterator[Contradiction]:
    """Checks the owner tags: each router process has one."""
    owners: dict[int, int] = {}
    for record in sequence.observations:
        epoch, tag = record.attempt_id.ballot
        if owners.setdefault(epoch, tag) != tag:
            yield Contradiction(Rule.ONE_OWNER, f"{record.id}: {owners[epoch]:08x} and {tag:08x} in epoch {epoch}")
            return


def _writers(sequence: SequenceHistory) -> Iterator[Contradiction]:
    """Checks the attempts of the journal's entries."""
    for earlier, later in pairwise(sequence.journal.writers if sequence.journal else ()):
        if later.order < earlier.order:
            yield Contradiction(Rule.WRITERS_GROW, f"{earlier} wrote before {later}")
            return


def _resumed(earlier: SequenceRecord, later: SequenceRecord) -> bool:
    return earlier.state is RequestState.CANCELLED and later.attempt > earlier.attempt


def _journal(client: ClientHistory, sequence: SequenceHistory) -> Iterator[Contradiction]:
    if sequence.journal is None:
        return
    received = client.tokens(sequence.choice)
    written = [token.token for token in sequence.journal.tokens]
    for index, (theirs, ours) in enumerate(zip(received, written, strict=False)):
        if theirs != ours:
            where = f"{client.call_id} choice {sequence.choice}, token {index}: received {theirs}, written {ours}"
            yield Contradiction(Rule.JOURNAL_AGREES, where)
            return
    indices = [token.index for token in sequence.journal.tokens]
    if indices != list(range(len(indices))):
        yield Contradiction(
            Rule.JOURNAL_AGREES, f"{client.call_id} choice {sequence.choice}: journal indices {indices}"
        )
    if (
        sequence.journal.finish is not None
        and client.finished(sequence.choice)
        and not client.agrees(sequence.choice, len(written))
    ):
        where = (
            f"{client.call_id} choice {sequence.choice}: received {len(received)} tokens, {len(written)} are written"
        )
        yield Contradiction(Rule.COUNTS_AGREE, where)


def _end(client: ClientHistory, sequence: SequenceHistory) -> Iterator[Contradiction]:
    if not sequence.observations:
        return
    last = sequence.observations[-1]
    where = f"{client.call_id} choice {sequence.choice}: client {client.end and client.end.value}, store {_short(last)}"
    if client.finished(sequence.choice):
        if last.state in (RequestState.FAILED, RequestState.REFUSED):
            yield Contradiction(Rule.ENDS_AGREE, where)
        if last.state is RequestState.FINISHED and not client.agrees(sequence.choice, last.num_emitted):
            yield Contradiction(Rule.COUNTS_AGREE, where)
    elif client.end is StreamEnd.DONE or (client.end is StreamEnd.FAILED and last.state is RequestState.FINISHED):
        yield Contradiction(Rule.ENDS_AGREE, where)


def _short(record: SequenceRecord) -> str:
    return f"{record.state.value} attempt {record.attempt}, {record.num_emitted} emitted"
