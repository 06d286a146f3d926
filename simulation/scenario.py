"""What happens in a run, fixed beforehand: clients, faults and how bad the network is. Values only;
`scenario_generator` makes them.

A scenario with a client or a fault taken out is a scenario too, which is how `shrink` makes failures small.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from baton.domain.errors import DeadlineExceeded, Draining, NoWorkers, Overloaded
from baton.domain.ids import RequestId

BEGIN_S, END_S = 1.5, 5.5
"""Clients arrive between these; faults begin between these."""

MAX_PARTITION_S = 6.0
"""Longest that a process is frozen, or two are cut off: a third of these outlast their connections (`network`)."""

FAULTS_END_S = END_S + MAX_PARTITION_S + 0.1
"""By now every fault is over, and the network works again."""

VOCAB_SIZE = 3
MAX_CHOICES = 2

VERSIONS = (0, 1)
"""Of the model: workers begin with the first, and after an upgrade have the second. No two say the same after anything,
so a token tells whose it is."""

NO_ROUTER = "no_router"
"""What a client says that finds no router to ask."""

STORE = "store"
"""The name of the process that keeps the state store."""


class SimFaultKind(enum.Enum):
    """What is done to a process or, where a fault has a peer, between two."""

    KILL = "kill"  # and restarted after `duration_s`; the store comes back empty
    FREEZE = "freeze"  # SIGSTOP, then SIGCONT
    HANG = "hang"  # the engine hangs in a step, the rest lives
    DRAIN = "drain"  # SIGTERM; restarted `duration_s` after it has left
    UPGRADE = "upgrade"  # as DRAIN, and what is started then has the next version of the model
    CUT = "cut"  # no message gets through
    CUT_ONE_WAY = "one-way cut"  # what the target sends does not reach the peer
    SLOW = "slow"  # messages take long


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """One fault; `peer` is the other end of what is between two."""

    kind: SimFaultKind
    at_s: float
    duration_s: float
    target: str
    peer: str | None = None

    def __str__(self) -> str:
        ends = self.target if self.peer is None else f"{self.target}|{self.peer}"
        return f"{self.kind.value} {ends} at {self.at_s:.3f} s for {self.duration_s:.3f} s"


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """One call, of `num_choices` answers that end with `max_tokens` or after the first `stop_token` (a stop string).

    `router`: whom it asks first. `patience_s`: loses its connection so long after arriving. `returns`: comes back for
    the rest of its answer, whyever the connection was lost; if not, that is the end.
    """

    name: RequestId
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    router: str = "router-0"
    num_choices: int = 1
    stop_token: int | None = None
    patience_s: float | None = None
    returns: bool = False


@dataclass(frozen=True, slots=True)
class Noise:
    """Probabilities a message (`loss`: its connection breaks; `duplicate`: a call arrives twice) or a read."""

    mean_delay_s: float = 0.002
    slow: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    read_failure: float = 0.0
    read_corruption: float = 0.0
    read_lateness: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything a run depends on. `digests` off: commits are validated by V1 or V2, and no read is corrupted.

    The first `num_local_prefill` decode workers prefill for themselves too, which may be all there is to prefill.
    """

    seed: int
    num_routers: int
    num_prefills: int
    num_decodes: int
    digests: bool
    num_host_pages: int
    mean_step_s: float
    deadline_s: float
    noise: Noise
    clients: tuple[ClientPlan, ...]
    faults: tuple[FaultPlan, ...]
    num_local_prefill: int = 0

    @property
    def routers(self) -> tuple[str, ...]:
        return tuple(f"router-{n}" for n in range(self.num_routers))

    @property
    def prefills(self) -> tuple[str, ...]:
        return tuple(f"prefill-{n}" for n in range(self.num_prefills))

    @property
    def decodes(self) -> tuple[str, ...]:
        return tuple(f"decode-{n}" for n in range(self.num_decodes))

    @property
    def local_prefill_workers(self) -> tuple[str, ...]:
        return self.decodes[: self.num_local_prefill]

    @property
    def only_drains(self) -> bool:
        """Nothing happens but that processes are told to leave: nobody may fail."""
        return self.noise == Noise() and all(fault.kind is SimFaultKind.DRAIN for fault in self.faults)

    @property
    def allowed_refusals(self) -> frozenset[str]:
        """Codes with which a request may be refused although all who leave do so cleanly: whoever of a kind could have
        taken it may have been away at the same time."""
        leaving = {fault.target for fault in self.faults}
        codes = {Overloaded.code}
        no_pair = leaving.issuperset(self.prefills) or leaving.issuperset(self.decodes)
        if no_pair and leaving.issuperset(self.local_prefill_workers):
            codes.add(NoWorkers.code)
        if leaving.issuperset(self.routers):
            codes |= {Draining.code, NO_ROUTER}
        return frozenset(codes)

    @property
    def capacity_failures(self) -> frozenset[str]:
        """Codes with which a request may fail although nothing goes wrong: this many clients are too much for these
        workers, whose pools are tiny. Without host memory a row that finds no page is sent back, again and again."""
        return frozenset({DeadlineExceeded.code})

    def without_faults(self) -> Scenario:
        """The same clients in a perfect world."""
        return replace(self, noise=Noise(), faults=())
