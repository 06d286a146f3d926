"""Encode workers whose embeddings prefill cannot use are named once, with what differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import EMBEDDINGS, WorkerRecord, WorkerRole
from baton.services.router.dispatch.media.encoder_mismatch import MismatchLog, find_mismatches, mismatch_note

PREFILL = WorkerRecord(
    id=WorkerId("prefill-0"), role=WorkerRole.PREFILL, incarnation=Incarnation(1), address="a:1", model="m",
    fingerprint="f", page_size=16, max_model_len=64, vocab_size=32, capabilities=(EMBEDDINGS,), processor="p" * 32,
    vision="v" * 32,
)  # fmt: skip
ENCODE = replace(PREFILL, id=WorkerId("encode-0"), role=WorkerRole.ENCODE, incarnation=Incarnation(2), capabilities=())
TEXT = replace(PREFILL, id=WorkerId("prefill-1"), incarnation=Incarnation(3), capabilities=(), vision="", processor="")


def test_workers_that_fit_are_not_named():
    assert mismatch_note([PREFILL, ENCODE, TEXT]) == ""
    assert find_mismatches([TEXT, replace(ENCODE, vision="w" * 32)]) == []  # nobody pulls


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"vision": "w" * 32}, "weights, number format or libraries"),
        ({"vision": "w" * 32, "processor": "q" * 32}, "image processor"),
    ],
)
def test_what_differs_is_named(changes: dict[str, str], what: str):
    note = mismatch_note([replace(ENCODE, **changes), PREFILL, TEXT])  # type: ignore[arg-type]
    assert note == f"; encode-0 makes embeddings wwwwwwww, prefill-0 take vvvvvvvv: other {what}"


def test_each_mismatch_is_logged_once():
    records = [PREFILL, replace(ENCODE, vision="w" * 32)]
    mismatches = MismatchLog(lambda: records)
    with capture_logs() as lines:
        mismatches.report()
        mismatches.report()
        records[1] = replace(records[1], incarnation=Incarnation(9))
        mismatches.report()
        records[1] = replace(ENCODE, incarnation=Incarnation(10))
        mismatches.report()
    assert [(line["event"], line["worker"]) for line in lines] == [("encode_worker_mismatch", "encode-0")] * 2
