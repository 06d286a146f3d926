"""What a worker tells the world about itself: the record it keeps alive in the registry."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.domain.ids import Incarnation, WorkerId


class WorkerRole(enum.Enum):
    """What a worker process does."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerStatus(enum.Enum):
    """Whether a worker takes new requests."""

    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A snapshot by the engine thread. `step_age_s`: how long the engine has been in its current step (0 idle)."""

    waiting_requests: int = 0
    waiting_tokens: int = 0
    running_rows: int = 0
    max_rows: int = 0
    available_pages: int = 0
    total_pages: int = 0
    step_age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """A decode worker's working link to one prefill worker; `num_probe_bytes` really moved at link-up."""

    prefill_id: WorkerId
    prefill_incarnation: Incarnation
    transport: str
    bandwidth_bytes_per_s: float
    num_probe_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One live worker process. `fingerprint` is its KV geometry's; workers that differ cannot be linked.

    `prefills`: a decode worker that computes prompts for itself, beside its rows, if it is asked to.
    `signature`: proof that it holds the cluster's secret, see `baton.domain.trust`; empty in an open cluster.
    """

    id: WorkerId
    role: WorkerRole
    incarnation: Incarnation
    address: str
    model: str
    fingerprint: str
    page_size: int
    max_model_len: int
    vocab_size: int
    status: WorkerStatus = WorkerStatus.READY
    load: WorkerLoad = WorkerLoad()
    links: tuple[LinkRecord, ...] = ()
    signature: str = ""
    prefills: bool = False
