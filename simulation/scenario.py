"""What happens in a run, drawn from its seed beforehand: clients, faults and how bad the network is. Values only.

A scenario with a client or a fault taken out is a scenario too, which is how `shrink` makes failures small.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from random import Random

from baton.domain.ids import RequestId

BEGIN_S, END_S = 1.5, 5.5
"""Clients arrive between these; faults begin between these."""

CALM_S = 8.6
"""By now every fault is over, and the network works again."""

VOCAB_SIZE = 3


class FaultKind(enum.Enum):
    """What is done to a process or, for `CUT`, between two."""

    KILL = "kill"  # and restarted after `duration_s`
    FREEZE = "freeze"  # SIGSTOP, then SIGCONT
    STICK = "stick"  # the engine hangs in a step, the rest lives
    CUT = "cut"  # no message gets through


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """One fault; `peer` is the other end of a cut."""

    kind: FaultKind
    at_s: float
    duration_s: float
    target: str
    peer: str | None = None

    def __str__(self) -> str:
        ends = self.target if self.peer is None else f"{self.target}|{self.peer}"
        return f"{self.kind.value} {ends} at {self.at_s:.3f} s for {self.duration_s:.3f} s"


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """One request. `patience_s`: hangs up so long after arriving."""

    name: RequestId
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    deadline_s: float
    patience_s: float | None = None


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
    """Everything a run depends on. `digests` off: commits are validated by V1 alone, and no read is corrupted."""

    seed: int
    num_prefills: int
    num_decodes: int
    digests: bool
    num_host_pages: int
    noise: Noise
    clients: tuple[ClientPlan, ...]
    faults: tuple[FaultPlan, ...]

    def without_faults(self) -> Scenario:
        """The same clients in a perfect world."""
        return replace(self, noise=Noise(), faults=())


def scenario_of(seed: int) -> Scenario:
    """The scenario that a seed stands for. Every tenth is undisturbed."""
    rng = Random(f"scenario {seed}")
    num_prefills, num_decodes = rng.randint(1, 3), rng.randint(1, 3)
    digests = rng.random() < 0.5
    prefills = [f"prefill-{n}" for n in range(num_prefills)]
    decodes = [f"decode-{n}" for n in range(num_decodes)]
    clients = _clients(rng, rng.randint(4, 9))
    scenario = Scenario(
        seed, num_prefills, num_decodes, digests, rng.choice([0, 8]), _noise(rng, digests), clients,
        tuple(_fault(rng, prefills, decodes) for _ in range(rng.randint(1, 5))),
    )  # fmt: skip
    return scenario.without_faults() if seed % 10 == 0 else scenario


def _clients(rng: Random, num_clients: int) -> tuple[ClientPlan, ...]:
    shared = _tokens(rng, 8)
    at_once = rng.random() < 0.5
    return tuple(
        ClientPlan(
            name=RequestId(f"r{n}"),
            at_s=rng.uniform(BEGIN_S, BEGIN_S + 0.2 if at_once else END_S),
            prompt=(*shared[: rng.choice([0, 2, 4, 8])], *_tokens(rng, rng.randint(1, 4))),
            max_tokens=rng.choice([1, 2, 4, 8, 12]),
            seed=rng.randrange(4),
            deadline_s=rng.choice([2.0, 8.0, 8.0, 8.0]),
            patience_s=rng.expovariate(5.0) if rng.random() < 0.25 else None,
        )
        for n in range(num_clients)
    )


def _tokens(rng: Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def _noise(rng: Random, digests: bool) -> Noise:
    def sometimes(most: float) -> float:
        return rng.choice([0.0, 0.0, rng.uniform(0.0, most)])

    return Noise(
        mean_delay_s=rng.choice([0.0005, 0.003, 0.02]),
        slow=sometimes(0.1),
        loss=sometimes(0.02),
        duplicate=sometimes(0.3),
        read_failure=sometimes(0.1),
        read_corruption=sometimes(0.2) if digests else 0.0,
        read_lateness=sometimes(0.2),
    )


def _fault(rng: Random, prefills: list[str], decodes: list[str]) -> FaultPlan:
    workers = [*prefills, *decodes]
    kind = rng.choice([FaultKind.KILL, FaultKind.KILL, FaultKind.CUT, FaultKind.FREEZE, FaultKind.STICK])
    at_s, duration_s = rng.uniform(BEGIN_S, END_S), rng.uniform(0.05, 3.0)
    if kind is FaultKind.CUT:
        pairs = [(p, d) for p in prefills for d in decodes]
        pairs += [("router-0", worker) for worker in workers] + [(who, "book") for who in ("router-0", *workers)]
        target, peer = rng.choice(pairs)
        return FaultPlan(kind, at_s, duration_s, target, peer)
    router_too = kind in (FaultKind.KILL, FaultKind.FREEZE) and rng.random() < 0.1
    return FaultPlan(kind, at_s, duration_s, "router-0" if router_too else rng.choice(workers))
