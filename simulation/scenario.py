"""A scenario: clients, faults and network noise of a run, fixed beforehand. Values only.

`scenario_generator` makes them. A scenario without one of its clients or faults is a scenario too, so `shrink` can make
failures small.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from baton.domain.errors import DeadlineExceeded, Draining, NoWorkers, Overloaded
from baton.domain.ids import RequestId
from baton.kv.eviction import EvictionPolicy
from baton.kv.growth import GrowthPolicy
from baton.services.prefill.policy import PrefillPolicy
from baton.settings.tiers import TierWrite
from simulation.scheduling_plan import DEFAULT_SCHEDULING, SchedulingPlan

BEGIN_S, END_S = 1.5, 5.5
"""Times between which clients arrive and faults begin."""

MAX_PARTITION_S = 6.0
"""Longest freeze or cut; a third of them outlast their connections (`network`)."""

FAULTS_END_S = END_S + MAX_PARTITION_S + 0.1
"""Time at which every fault is over and the network works."""

VOCAB_SIZE = 3
END_TOKEN = VOCAB_SIZE - 1
"""Ends a constrained answer; in others it is a token like any other."""

MAX_CHOICES = 2

VERSIONS = (0, 1)
"""Versions of the model: workers begin with the first, and have the second after an upgrade. Their tokens always
differ, so a token shows its version."""

NO_ROUTER = "no_router"
"""Outcome of a client that finds no router."""

STORE = "store"
"""Name of the state store's process."""


class SimFaultKind(enum.Enum):
    """Kinds of faults of a process or, with a peer, of a link."""

    KILL = "kill"  # and restarted after `duration_s`; the store comes back empty
    WIPE = "wipe"  # the store loses all data and lives on
    ROLL_BACK = "roll back"  # after `duration_s` the store has the data of the begin again
    ROT = "rot"  # within `duration_s`, bytes of settled pages or embeddings of a worker flip once
    FREEZE = "freeze"  # SIGSTOP, then SIGCONT
    HANG = "hang"  # the engine hangs in a step, the process lives
    DRAIN = "drain"  # SIGTERM; restarted `duration_s` after it has left
    UPGRADE = "upgrade"  # as DRAIN, and what is started then has the next version of the model
    BUDGETS = "budgets"  # a worker's budgets change, and change back after `duration_s`
    CUT = "cut"  # cuts both directions
    CUT_ONE_WAY = "one-way cut"  # cuts messages from the target to the peer
    SLOW = "slow"  # slows messages


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """One fault; `peer`: the other end of a link."""

    kind: SimFaultKind
    at_s: float
    duration_s: float
    target: str
    peer: str | None = None

    def __str__(self) -> str:
        ends = self.target if self.peer is None else f"{self.target}|{self.peer}"
        return f"{self.kind.value} {ends} at {self.at_s:.3f} s for {self.duration_s:.3f} s"


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """An image before the prompt's token `at`. `number` names its file, which takes `num_rows` tokens."""

    at: int
    number: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """One call with `num_choices` choices that end with `max_tokens` or after the first `stop_token` (a stop string).

    `router`: its first router. `patience_s`: time after which it loses its connection. `returns`: resumes after any
    lost connection; otherwise that is the end. `regex`: the text matches it, and ends with `END_TOKEN`. `allowed`: the
    only tokens of the answer. `prompt_logprobs`: scores of the prompt, in the first event of each choice. `images`: in
    the order of their places. `tenant`: whose key it has.
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
    regex: str = ""
    allowed: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    images: tuple[ImagePlan, ...] = ()
    priority: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Noise:
    """Probabilities a message (`loss`: its connection breaks; `duplicate`: a call arrives twice) or a read.

    `embedding_corruption`: of a part of an embedding.
    """

    mean_delay_s: float = 0.002
    slow: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    read_failure: float = 0.0
    read_corruption: float = 0.0
    read_lateness: float = 0.0
    embedding_corruption: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """All inputs of a run. `digests` off: V1 or V2 validate commits, and no read is corrupted.

    The first `num_local_prefill` decode workers prefill for themselves too, perhaps without any prefill worker.
    `gives_pages`: all workers give cached pages, and prefill workers import them.
    `drafts`: decode workers have a drafter. `draft_trees`: it proposes trees, too. `equal_steps`: prefill steps take
    equal time.
    `host_write`: what prefill workers copy into their host tiers; None: they have none.
    `sessions`: routers and workers talk in sessions. `link_sessions`: workers with each other. `scheduling`: the rest.
    `session_ports`: workers have ports of sessions, which some links cannot reach for a while.
    `images`: the model is served with images. `num_encoders`: encode workers. `towers`: prefill workers encode, too.
    `media_bytes`: bound of each worker's store of images. `fits`: workers announce step-time fits, wrong ones too.
    `num_window_slots`: of each prefill worker for pages' window parts; None: pages have none.
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
    eviction: EvictionPolicy = EvictionPolicy.LRU
    growth: GrowthPolicy = GrowthPolicy.NONE
    prefill_policy: PrefillPolicy = PrefillPolicy.FCFS
    max_overtakes: int = 64
    gives_pages: bool = False
    drafts: bool = False
    draft_trees: bool = False
    equal_steps: bool = False
    host_write: TierWrite | None = None
    sessions: bool = False
    link_sessions: bool = False
    session_ports: bool = False
    images: bool = False
    num_encoders: int = 0
    towers: bool = True
    media_bytes: int = 0
    fits: bool = False
    num_window_slots: int | None = None
    scheduling: SchedulingPlan = DEFAULT_SCHEDULING

    @property
    def num_decode_window_slots(self) -> int | None:
        """Of each decode worker: enough for a few rows, or requests would wait for one another longer than leases."""
        return None if self.num_window_slots is None else max(10, self.num_window_slots)

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
    def encoders(self) -> tuple[str, ...]:
        return tuple(f"encode-{n}" for n in range(self.num_encoders))

    @property
    def local_prefill_workers(self) -> tuple[str, ...]:
        return self.decodes[: self.num_local_prefill]

    @property
    def only_drains(self) -> bool:
        """True if processes only drain and budgets only change: no request may fail."""
        harmless = (SimFaultKind.DRAIN, SimFaultKind.BUDGETS)
        return self.noise == Noise() and all(fault.kind in harmless for fault in self.faults)

    def allowed_refusals(self, client: ClientPlan) -> frozenset[str]:
        """Codes of refusals that are valid although all processes leave cleanly: all processes of a role may have been
        away, or without a budget, at the same time. Decode workers compute no prompts with images."""
        leaving = {fault.target for fault in self.faults}
        codes = {Overloaded.code}
        no_pair = leaving.issuperset(self.prefills) or leaving.issuperset(self.decodes)
        if no_pair and (client.images or leaving.issuperset(self.local_prefill_workers)):
            codes.add(NoWorkers.code)
        if leaving.issuperset(self.routers):
            codes |= {Draining.code, NO_ROUTER}
        return frozenset(codes)

    @property
    def capacity_failures(self) -> frozenset[str]:
        """Codes with which a request may fail without any fault: this many clients overload these tiny pools. Without
        host memory a row without a page is sent back, again and again."""
        return frozenset({DeadlineExceeded.code})

    def without_faults(self) -> Scenario:
        """The same clients without faults and noise."""
        return replace(self, noise=Noise(), faults=())
