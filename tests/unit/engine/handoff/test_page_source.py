"""When an import should pay, and how long a prompt waits for it."""

from __future__ import annotations

import pytest

from baton.engine.handoff.page_source import LATE_FACTOR, MAX_WAIT_S, PAYS_SHARE, REST_S, ImportCostModel
from baton.settings.choices import PageSharingKind
from tests.unit.engine.handoff.cache_pair import SOURCE, page_source

PAGE_BYTES = 1000


def model(page_s: float, kind: PageSharingKind = PageSharingKind.CHEAPER) -> ImportCostModel:
    """Computing takes `page_s` a page; the link of `page_source` reads a page in a millisecond."""
    return ImportCostModel(kind, PAGE_BYTES, lambda num_pages, first: page_s * num_pages)


def test_an_import_that_takes_as_long_as_computing_does_not_begin():
    source = page_source(10)
    assert model(0.00124).wait_s(source, 10, 0, 0.0) is None
    assert model(0.1).wait_s(source, 10, 0, 0.0) == pytest.approx(PAYS_SHARE * 1.0), "no longer than it may pay"
    assert model(0.1).wait_s(source, 1, 0, 0.0) is None, "one page is not asked for"
    assert model(9.0).wait_s(source, 10, 0, 0.0) == MAX_WAIT_S


def test_without_a_prediction_it_is_taken_to_pay():
    assert model(0.0).wait_s(page_source(10), 10, 0, 0.0) == MAX_WAIT_S


def test_the_link_and_the_answers_are_measured():
    costs = model(0.01)
    source = page_source(10)
    assert costs.wait_s(source, 10, 0, 0.0) is not None
    for _ in range(20):
        costs.on_answer(SOURCE, 0.2)
    assert costs.wait_s(source, 10, 0, 0.0) is None, "slow answers"
    for _ in range(30):
        costs.on_answer(SOURCE, 0.001)
        costs.on_read(SOURCE, 1000, 0.02)
    assert costs.wait_s(source, 10, 0, 0.0) is None, "a slow link"
    assert LATE_FACTOR > 1


def test_a_source_rests_after_a_failure():
    costs = model(0.1)
    costs.wait_s(page_source(10), 10, 0, 0.0)
    costs.on_failure(SOURCE, 0.0)
    assert costs.wait_s(page_source(10), 10, 0, REST_S - 0.1) is None
    assert costs.wait_s(page_source(10), 10, 0, REST_S) is not None


@pytest.mark.parametrize(("kind", "waits"), [(PageSharingKind.OFF, False), (PageSharingKind.ALWAYS, True)])
def test_off_and_always_predict_nothing(kind: PageSharingKind, waits: bool):
    assert (model(0.00001, kind).wait_s(page_source(10), 10, 0, 0.0) is not None) == waits
