"""Worker records for the tests of the cluster view."""

from __future__ import annotations

from typing import Any

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import Activity, LinkRecord, WorkerLoad, WorkerRecord, WorkerRole
from baton.services.router.cluster.source import KnownWorker


def record(id: str, incarnation: int = 1, **fields: Any) -> WorkerRecord:
    role = WorkerRole.PREFILL if id.startswith("prefill") else WorkerRole.DECODE
    whole = {"address": "h:1", "model": "m", "fingerprint": "f", "page_size": 16, "max_model_len": 64, "vocab_size": 9}
    return WorkerRecord(id=WorkerId(id), role=role, incarnation=Incarnation(incarnation), **{**whole, **fields})


def known(record: WorkerRecord, absence: str = "") -> KnownWorker:
    return KnownWorker(record, absence)


def link(prefill: WorkerRecord, path: str = "cma", moved: int = 0, pull_us: int = 0) -> LinkRecord:
    return LinkRecord(prefill.id, prefill.incarnation, "nixl", 2 * (1 << 30), 4096, path, moved, pull_us)


def worked(num_tokens: int, num_prompt: int = 0, num_cached: int = 0) -> WorkerLoad:
    return WorkerLoad(activity=Activity(num_tokens, num_prompt, num_cached))
