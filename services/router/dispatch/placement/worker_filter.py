"""Workers that this router uses: of its model, with its tokenizer, with a valid signature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.domain.worker import WorkerRecord


@dataclass(frozen=True, slots=True)
class WorkerFilter:
    """The router uses workers with this model, this `text_digest` (empty: any) and a valid signature."""

    model: str
    trust: ClusterTrust = OPEN_CLUSTER
    text_digest: str = ""

    def serves(self, record: WorkerRecord) -> bool:
        """True for a worker with this model, tokenizer and template."""
        return record.model == self.model and self.text_digest in ("", record.text_digest)

    def strangers_note(self, records: Sequence[WorkerRecord]) -> str:
        """The reasons why some of `records` are of no use, as text behind others; "" without any."""
        strangers = sorted({record.model for record in records if record.model != self.model})
        note = f"; workers announced {', '.join(strangers)} instead of {self.model}" if strangers else ""
        texts = [record.id for record in records if record.model == self.model and not self.serves(record)]
        return note + (
            f"; {', '.join(texts)} have another tokenizer or chat template than this router" if texts else ""
        )
