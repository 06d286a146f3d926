"""Gives embeddings to linked prefill workers over NIXL: a copy in registered memory while their pull is open.

Called by `server`, in its event loop. A caller that is slow to read finds other bytes: it compares them with digests
that were made with the embedding, and with tags in a cluster with a secret.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.domain.trust import ClusterTrust
from baton.engine.media.exported_embedding import ExportedEmbedding
from baton.kv.page_tags import PURPOSE, PoolTagger
from baton.rpc.gen import handoff_pb2
from baton.transfer.nixl import TRANSPORT, NixlSource
from baton.worker.media.embedding_pages import PAGE_BYTES, EmbeddingPages, page_identities


@dataclass(frozen=True, slots=True)
class OpenedEmbedding:
    """Pages with the bytes of an embedding, and a tag for each; no tags in an open cluster."""

    pages: list[PageId]
    tags: list[bytes]


class EmbeddingExports:
    """`fingerprint`: of the embeddings."""

    def __init__(self, worker_id: WorkerId, incarnation: Incarnation, fingerprint: str, trust: ClusterTrust) -> None:
        """Raises `ImportError` without NIXL and `LinkBroken` if UCX cannot start."""
        self._pages = EmbeddingPages()
        memory, key = self._pages.memory, trust.key(PURPOSE)
        self._fingerprint = fingerprint
        self._source = NixlSource(worker_id, incarnation, memory, trust)
        self._tagger = None if key is None else PoolTagger(memory, key, incarnation)
        self.info = handoff_pb2.SourceInfo(
            worker_id=worker_id,
            incarnation=incarnation,
            transport=TRANSPORT,
            metadata=self._source.metadata(),
            base_address=memory.address,
            num_pages=memory.num_pages,
            page_bytes=PAGE_BYTES,
        )

    def open(self, identity: bytes, rows: ExportedEmbedding) -> OpenedEmbedding | None:
        """Copies an embedding for one pull. None without room for it."""
        pages = self._pages.take(len(rows.data))
        if pages is None:
            return None
        self._pages.fill(pages, rows.data)
        tags: list[bytes] = []
        if self._tagger is not None:
            tags = self._tagger.tags(pages, page_identities(identity, self._fingerprint, len(pages)))
        return OpenedEmbedding(pages, tags)

    def close(self, opened: OpenedEmbedding) -> None:
        """Ends a pull: its pages are free."""
        self._pages.release(opened.pages)

    def stop(self) -> None:
        """Ends all reads. Idempotent."""
        self._source.close()
