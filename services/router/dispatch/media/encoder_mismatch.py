"""Names encode workers whose embeddings prefill workers cannot use: other weights, image processor or libraries.

No answer is wrong then: prefill encodes for itself, or has no images without a tower. But nobody would know why an
encode worker idles. Used by `workers` and by `baton doctor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from baton.domain.ids import Incarnation
from baton.domain.worker import EMBEDDINGS, WorkerRecord, WorkerRole
from baton.services.router.dispatch.media.encoder_choice import makes_embeddings
from baton.telemetry.logs import get_logger

SHOWN_CHARS = 8
"""Of a digest."""

log = get_logger(__name__)

Mismatch = tuple[WorkerRecord, tuple[WorkerRecord, ...]]
"""An encode worker, and the prefill workers that pull embeddings and cannot use its."""


def find_mismatches(records: Iterable[WorkerRecord]) -> list[Mismatch]:
    """The encode workers that some prefill workers cannot use, by id."""
    known = sorted(records, key=lambda one: one.id)
    prefills = [one for one in known if one.role is WorkerRole.PREFILL and EMBEDDINGS in one.capabilities]
    found = []
    for encoder in known:
        if encoder.role is WorkerRole.ENCODE:
            others = tuple(prefill for prefill in prefills if not makes_embeddings(encoder, prefill))
            found += [(encoder, others)] if others else []
    return found


def describe_mismatch(mismatch: Mismatch) -> str:
    """What differs, in words: the image processor's files, or else weights, number format or libraries."""
    encoder, prefills = mismatch
    names = ", ".join(prefill.id for prefill in prefills)
    processors = {prefill.processor for prefill in prefills}
    what = "image processor" if encoder.processor not in processors else "weights, number format or libraries"
    theirs = "/".join(sorted({prefill.vision[:SHOWN_CHARS] for prefill in prefills}))
    return f"{encoder.id} makes embeddings {encoder.vision[:SHOWN_CHARS]}, {names} take {theirs}: other {what}"


def mismatch_note(records: Iterable[WorkerRecord]) -> str:
    """Text behind other text of a readiness; "" where all fit."""
    return "".join(f"; {describe_mismatch(mismatch)}" for mismatch in find_mismatches(records))


class MismatchLog:
    """Logs each mismatch of worker processes once. `records`: gives those that are served."""

    def __init__(self, records: Callable[[], Sequence[WorkerRecord]]) -> None:
        self._records = records
        self._logged: set[tuple[Incarnation, ...]] = set()

    def report(self) -> None:
        """One reading of the registry."""
        current: set[tuple[Incarnation, ...]] = set()
        for mismatch in find_mismatches(self._records()):
            encoder, prefills = mismatch
            key = (encoder.incarnation, *(prefill.incarnation for prefill in prefills))
            current.add(key)
            if key not in self._logged:
                log.warning("encode_worker_mismatch", worker=encoder.id, why=describe_mismatch(mismatch))
        self._logged = current
