"""Pairs of a prefill and a decode worker, as the registry shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.domain.ids import Incarnation
from baton.domain.timing.prompt_cost import CostBasis, basis_of
from baton.domain.worker import IMAGE, NO_KERNELS, LinkRecord, WorkerRecord, WorkerRole, WorkerStatus


@dataclass(frozen=True, slots=True)
class Pair:
    """Two linked workers, or one that prefills for itself and is both."""

    prefill: WorkerRecord
    decode: WorkerRecord

    @property
    def local(self) -> bool:
        """True when decode computes the prompt itself."""
        return self.prefill.incarnation == self.decode.incarnation

    @property
    def workers(self) -> tuple[WorkerRecord, ...]:
        """The workers, without repetition."""
        return (self.decode,) if self.local else (self.prefill, self.decode)

    def worker(self, role: WorkerRole) -> WorkerRecord:
        """The worker in this role."""
        return self.prefill if role is WorkerRole.PREFILL else self.decode

    @property
    def incarnations(self) -> tuple[Incarnation, Incarnation]:
        return self.prefill.incarnation, self.decode.incarnation

    @property
    def cost_basis(self) -> CostBasis:
        """What the cost of its prompts goes by."""
        return basis_of(self.prefill)

    def encodes(self, processor: str) -> bool:
        """True when prefill encodes images with this processor and decode continues such prompts. All do for "".

        A decode worker computes no prompt with images itself.
        """
        if not processor:
            return True
        is_served = all(IMAGE in worker.modalities for worker in self.workers)
        return not self.local and is_served and self.prefill.processor == processor

    def has(self, needs: frozenset[str]) -> bool:
        """True when both workers have these capabilities."""
        return all(needs.issubset(worker.capabilities) for worker in self.workers) if needs else True

    def matches(self, fingerprint: str, grammars: str = "") -> bool:
        """True when both workers have this fingerprint and grammar library. Every pair matches ""."""
        if not fingerprint and not grammars:
            return True
        return all(
            fingerprint in ("", worker.fingerprint) and grammars in ("", worker.grammars) for worker in self.workers
        )


def linked_pairs(records: Iterable[WorkerRecord]) -> list[Pair]:
    """Lists the pairs with a working link, by worker ids, then the workers that prefill for themselves.

    Budgets decide what a worker takes, not its role.
    """
    workers = sorted(records, key=lambda record: record.id)
    decodes = [worker for worker in workers if worker.budgets.takes_rows]
    split = [
        Pair(prefill, decode)
        for prefill in workers
        if prefill.budgets.takes_prompts
        for decode in decodes
        if any(_is_link_to(link, prefill) for link in decode.links)
    ]
    return split + [Pair(decode, decode) for decode in decodes if decode.budgets.takes_prompts]


class LinkedPairs:
    """The linked pairs of the records that were asked for last: they change with announcements, not with requests."""

    def __init__(self) -> None:
        self._records: tuple[WorkerRecord, ...] = ()
        self._pairs: list[Pair] = []

    def of(self, records: Iterable[WorkerRecord]) -> list[Pair]:
        """See `linked_pairs`. Do not change the list."""
        asked = tuple(records)
        if asked != self._records:
            self._pairs = linked_pairs(asked)
        self._records = asked  # also equal ones that were read anew: records are compared by identity first
        return self._pairs


def placeable(record: WorkerRecord, max_step_age_s: float) -> bool:
    """True for a worker that is ready and not stuck in one step."""
    return record.status is WorkerStatus.READY and record.load.step_age_s <= max_step_age_s


def kernels_note(records: Iterable[WorkerRecord]) -> str:
    """The kernels that workers run, and the workers that run none; "" if none has told."""
    named = {record.id: record.kernels for record in records}
    levels = ", ".join(sorted({level for level in named.values() if level not in ("", NO_KERNELS)}))
    without = ", ".join(sorted(id for id, level in named.items() if level == NO_KERNELS))
    slow = f"; no native kernels on {without}: torch computes there, several times slower" if without else ""
    return (f"; kernels: {levels}" if levels else "") + slow


def capacity_tokens(pair: Pair) -> int:
    """Most tokens of one request, prompt and output, that both workers of a pair can hold."""
    prefill, decode = pair.prefill, pair.decode
    num_prefill = min(prefill.max_model_len, prefill.load.total_pages * prefill.page_size)
    return min(num_prefill, decode.max_model_len, decode.load.total_pages * decode.page_size)


def _is_link_to(link: LinkRecord, prefill: WorkerRecord) -> bool:
    return (
        link.prefill_id == prefill.id and link.prefill_incarnation == prefill.incarnation and link.num_probe_bytes > 0
    )
