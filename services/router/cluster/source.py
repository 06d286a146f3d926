"""The interface between the cluster view and the parts of the router that it shows. No behaviour.

`baton.services.router.cluster_reader` implements it over the dispatcher and the worker set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.domain.ids import Incarnation
from baton.domain.lifecycle import RequestState
from baton.domain.worker import WorkerRecord


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A worker that is not lost. `absence`: reason why the router gives it nothing, or ""."""

    record: WorkerRecord
    absence: str = ""


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A sequence that waits or runs. `request_id`: of its HTTP request. `private`: other routers do not show it."""

    id: str
    request_id: str
    tenant: str
    state: RequestState
    prefill: str
    decode: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    age_s: float
    attempt: int
    private: bool = False


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """Totals of this router. `num_tokens`: output tokens since its start."""

    num_open: int
    num_queued: int
    num_queued_tokens: int
    num_tokens: int
    draining: bool


class ClusterSource(Protocol):
    """The router's own state. Every call is cheap and returns values of this moment."""

    def workers(self) -> Sequence[KnownWorker]:
        """Workers of this router's model, by id."""
        ...

    def breakers(self) -> Mapping[tuple[Incarnation, Incarnation], str]:
        """States of the links (prefill, decode) whose circuit breaker is not closed."""
        ...

    def requests(self) -> Iterable[OpenRequest]:
        """The open sequences, oldest first."""
        ...

    def load(self) -> RouterLoad:
        """The router's totals."""
        ...

    def degraded(self) -> tuple[str, ...]:
        """Components that the router does without."""
        ...
