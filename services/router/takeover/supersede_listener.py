"""Aborts the local run of a sequence when another router has taken it over.

The store's writer reports a refused attempt; `respond` and `takeover` listen while they run a call. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.domain.errors import Superseded
from baton.domain.ids import AttemptId, RequestId
from baton.services.router.generation import SequenceSpec

OnSuperseded = Callable[[Superseded], None]


@dataclass(frozen=True, slots=True)
class _Listener:
    """The run of a sequence that began with `attempt`."""

    attempt: int
    on_superseded: OnSuperseded


class SupersedeListener:
    """Owned by one event loop."""

    def __init__(self) -> None:
        self._listeners: dict[RequestId, _Listener] = {}

    @contextmanager
    def listening(self, sequences: Iterable[SequenceSpec], on_superseded: OnSuperseded) -> Iterator[None]:
        """Calls `on_superseded` within the block when the store has a newer attempt of one of the sequences."""
        listeners: dict[RequestId, _Listener] = {}
        for sequence in sequences:
            listeners[sequence.id] = _Listener(sequence.attempt, on_superseded)
        self._listeners |= listeners
        try:
            yield
        finally:
            for id, listener in listeners.items():
                if self._listeners.get(id) is listener:
                    del self._listeners[id]

    def on_superseded(self, id: AttemptId) -> None:
        """The store refused this attempt. No effect if the sequence runs here under a newer attempt."""
        listener = self._listeners.get(id.request_id)
        if listener is not None and id.attempt >= listener.attempt:
            listener.on_superseded(Superseded(f"request {id.request_id} was taken over by another router"))
