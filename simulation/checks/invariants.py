"""Invariants of the simulated processes. Checked after every event; the first violation ends the run.

I1, I5, I6: `check_pages`, `check_idle`. I2: the fake runner, which reads back every position before it computes. I3,
I4: `EmissionCheck` in every worker, `client.SimClient` at the end of the line. I7: `virtual_clock.Deadlock`. I8, I9:
`run`. I10 (one model makes all tokens of a sequence): `answer`, and `checked_store` for journals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.domain.ids import AttemptId, PageId, RequestId
from baton.kv.pages import Owner, PagePool
from baton.kv.prefix_cache import PrefixCache

BACKGROUND = frozenset(
    {
        "background",
        "workers",
        "store-writer",
        "store-ownership",
        "worker-session",
        "link-session",
        "session-connection",
        "session-writer",
        "/baton.v1.Handoff/Renew None",
        "link-renew",
    }
)
"""Names of tasks that run as long as their process, and of the question that links repeat at rest."""


class Violation(Exception):
    """A broken invariant. `rule` names it; `request_id`: the request concerned, if any."""

    def __init__(self, rule: str, message: str, request_id: RequestId | None = None) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule
        self.request_id = request_id


def check_pages(cache: PrefixCache, in_flight: Sequence[PageId] = ()) -> None:
    """Checks that page tables agree (raises `Broken`), and that pages being read into belong to an import."""
    cache.pool.check()
    cache.check()
    if len(set(in_flight)) != len(in_flight):
        raise Violation("I1", f"two reads into one page: {sorted(in_flight)}")
    for page in in_flight:
        owner = cache.pool.owner(page)
        if owner not in (Owner.RESERVED, Owner.DRAINING):
            raise Violation("I1", f"page {page} is {owner.name} while a read into it is in flight")


def check_idle(name: str, pool: PagePool, left: dict[str, int]) -> None:
    """Checks that nothing is left behind. `left`: further counts that must be 0, by name."""
    if pool.num_free + pool.num_cached != pool.num_usable:
        raise Violation("I5", f"{name} is idle and holds {pool.counts()}")
    if (windows := pool.windows) is not None and (windows.num_held or windows.num_unreserved != windows.num_usable):
        raise Violation("I5", f"{name} is idle and holds window slots {windows.counts()}")
    leftovers = {what: count for what, count in left.items() if count}
    if leftovers:
        raise Violation("I5", f"{name} is idle and has left: {leftovers}")


def check_no_tasks(name: str, tasks: Iterable[str]) -> None:
    """Checks that only permanent tasks run."""
    left = sorted(task for task in tasks if task not in BACKGROUND and not task.startswith("Task-"))
    if left:
        raise Violation("I7", f"{name} is idle and still waits in {left}")


@dataclass(slots=True)
class EmissionCheck:
    """Tokens of one worker: never under an attempt older than one it has seen (I3), without a gap (I4)."""

    source: str
    newest: dict[RequestId, AttemptId] = field(default_factory=dict)
    next_index: dict[AttemptId, int] = field(default_factory=dict)

    def on_attempt(self, id: AttemptId) -> None:
        """Records that the worker got this attempt."""
        newest = self.newest.get(id.request_id, id)
        self.newest[id.request_id] = max(id, newest, key=lambda one: one.order)

    def on_token(self, id: AttemptId, index: int) -> None:
        """Records that the worker emitted the token of this output index."""
        newest = self.newest.get(id.request_id, id)
        if id.order < newest.order:
            raise Violation("I3", f"{self.source} emits under {id} and has seen {newest}", id.request_id)
        expected = self.next_index.get(id, index)
        if index != expected:
            raise Violation("I4", f"{self.source} emits index {index} of {id}, {expected} comes next", id.request_id)
        self.next_index[id] = index + 1
