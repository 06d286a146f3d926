"""Checks of the registered workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import EMBEDDINGS, NO_TOWER, LinkRecord, WorkerBudgets, WorkerRecord, WorkerRole
from baton.services.cli.doctor.results import CheckStatus, DoctorResult
from baton.services.cli.doctor.workers import worker_results

OK, WARN, FAIL = CheckStatus
PREFILL = WorkerRecord(
    id=WorkerId("prefill-0"),
    role=WorkerRole.PREFILL,
    incarnation=Incarnation(1),
    address="127.0.0.1:50051",
    model="m",
    fingerprint="f",
    page_size=16,
    max_model_len=64,
    vocab_size=32,
    text_digest="t",
)
LINK = LinkRecord(PREFILL.id, PREFILL.incarnation, "nixl/ucx (cma)", 2.0 * 1024**3, 1 << 20)
DECODE = replace(PREFILL, id=WorkerId("decode-0"), role=WorkerRole.DECODE, incarnation=Incarnation(2), links=(LINK,))


def results(*workers: WorkerRecord, unsigned=(), text_digest=None) -> dict[str, DoctorResult]:
    return {result.name: result for result in worker_results(workers, unsigned, text_digest)}


def test_a_good_pair_passes_and_shows_its_transport():
    found = results(PREFILL, DECODE, text_digest="t")
    assert {result.status for result in found.values()} == {OK}
    assert found["links of decode-0"].found == "prefill-0 by nixl/ucx (cma), 2.0 GiB/s"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model": "n"}, "same model"),
        ({"page_size": 32}, "same page size"),
        ({"vocab_size": 64}, "same vocabulary"),
        ({"text_digest": "u"}, "same tokenizer and template"),
        ({"fingerprint": "g"}, "same fingerprint"),
        ({"links": ()}, "links of decode-0"),
    ],
)
def test_a_worker_that_differs_is_named(changes, name):
    found = results(PREFILL, replace(DECODE, **changes))
    assert {result.name for result in found.values() if result.status is FAIL} == {name}
    assert "decode-0" in found[name].found + found[name].name
    assert found[name].fix


def test_other_text_files_here_are_found():
    assert results(PREFILL, DECODE, text_digest="x")["this model's tokenizer"].status is FAIL


def test_a_missing_role_fails():
    assert results(PREFILL)["workers"].status is FAIL
    alone = replace(DECODE, links=())
    assert results(alone)["workers"].status is FAIL
    assert results(replace(alone, budgets=WorkerBudgets(64, 8)))["workers"].status is OK
    assert results()["workers"].status is WARN


def test_workers_with_another_secret_are_named():
    (first, *_) = worker_results([DECODE], [PREFILL], None)
    assert first.status is FAIL
    assert "prefill-0" in first.found
    assert "--cluster-secret-file" in first.fix


SEEING = replace(PREFILL, capabilities=(EMBEDDINGS,), vision="v" * 32, processor="p" * 32)
ENCODE = replace(
    SEEING, id=WorkerId("encode-0"), role=WorkerRole.ENCODE, incarnation=Incarnation(7), page_size=0, capabilities=()
)


def test_encode_workers_that_fit_pass():
    found = results(SEEING, DECODE, ENCODE)
    assert {result.status for result in found.values()} == {OK}
    assert "encode-0" in found["same embeddings"].found


def test_an_encode_worker_of_other_embeddings_is_named():
    found = results(SEEING, DECODE, replace(ENCODE, vision="w" * 32))["same embeddings"]
    assert found.status is FAIL
    assert "encode-0" in found.found
    assert "prefill-0" in found.found


def test_an_encode_worker_that_nobody_uses_is_a_warning():
    assert results(PREFILL, DECODE, ENCODE)["same embeddings"].status is WARN


def test_prefill_workers_without_a_tower_need_an_encode_worker():
    found = results(replace(SEEING, capabilities=(EMBEDDINGS, NO_TOWER)), DECODE)
    assert found["encode workers"].status is FAIL
    assert "prefill-0" in found["encode workers"].found
