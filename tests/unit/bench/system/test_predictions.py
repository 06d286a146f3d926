"""Predictions are read from the line that a user sees, and compared with what was served while eight ran at once."""

import pytest

from baton.services.cli.bench.results.records import Delivery, RequestRow
from baton.services.cli.calibration import deployment
from baton.services.cli.calibration.calibrate import TimedSteps
from baton.services.cli.calibration.prediction import Deployment, DeploymentPrediction
from bench.harness.rotations import Block
from bench.system.predictions import (
    COLOCATED,
    NUM_AT_ONCE,
    SPLIT,
    ToldPrediction,
    findings_of,
    flags_of,
    read_note,
    steady_values,
)

SPLIT_TOLD = ToldPrediction(SPLIT, 0.5, 40.0, 0)
COLOCATED_TOLD = ToldPrediction(COLOCATED, 0.4, 60.0, 16)


def test_the_line_of_baton_up_is_read():
    """The line is made by the product's own function, so a change of its words is seen here."""
    chosen = DeploymentPrediction(Deployment.COLOCATED, 0.00123, 0.0612, 16)
    other = DeploymentPrediction(Deployment.SPLIT, 12345.0, 0.042)
    note = deployment._note(chosen, other, TimedSteps(None, 27.6, 0.0), is_new=True)
    assert read_note(note) == [
        ToldPrediction(COLOCATED, 0.00123, 61.2, 16),
        ToldPrediction(SPLIT, 12300.0, 42.0, 0),
    ]


def test_a_line_without_predictions_is_refused():
    with pytest.raises(RuntimeError, match="do not fit"):
        read_note("deployment: split; not measured: 3 engines of 9 GiB do not fit in 8 GiB")


def test_a_colocated_system_gets_the_predicted_chunks():
    assert flags_of(SPLIT_TOLD)[:2] == ("--deployment", SPLIT)
    flags = flags_of(COLOCATED_TOLD)
    assert flags[flags.index("--decode-token-budget") + 1] == str(16 + NUM_AT_ONCE)
    assert flags[flags.index("--deployment") + 1] == COLOCATED


def row(sent_s: float, seconds: float) -> RequestRow:
    """Two tokens, one at half of the time."""
    deliveries = (Delivery(seconds / 2, 1), Delivery(seconds, 1))
    return RequestRow(0, 0.0, 0.0, sent_s, seconds, 2, 512, 2, deliveries, None, None)


def test_only_the_time_with_eight_at_once_counts():
    """Requests of 1 s, then of 2 s, then stragglers of 10 s that run alone."""
    first = [row(0.0, 1.0)] * NUM_AT_ONCE
    second = [row(1.0, 2.0)] * NUM_AT_ONCE
    last = [row(3.0, 10.0)] * NUM_AT_ONCE
    rate, *gaps = steady_values([*first, *second, *last])
    assert rate == pytest.approx(NUM_AT_ONCE / 2.0)
    assert gaps == pytest.approx([1.0] * NUM_AT_ONCE)


def test_too_few_or_failed_requests_are_no_measurement():
    with pytest.raises(ValueError, match="more than 16"):
        steady_values([row(0.0, 1.0)] * 16)
    failed = RequestRow(0, 0.0, 0.0, 0.0, 1.0, 2, 512, 0, (), None, "cut off")
    with pytest.raises(RuntimeError, match="1 of 17 requests failed: cut off"):
        steady_values([*[row(0.0, 1.0)] * 16, failed])


def test_measured_and_predicted_figures_stand_side_by_side():
    blocks = [
        Block(0, SPLIT, 1.0, 1.0, (0.6, 0.03, 0.05)),
        Block(0, COLOCATED, 1.0, 1.0, (0.3, 0.06, 0.06)),
    ]
    found = {each.name: each.overall.median for each in findings_of([SPLIT_TOLD, COLOCATED_TOLD], blocks)}
    assert found["split: requests/s, predicted"] == 0.5
    assert found["split: requests/s, measured / predicted"] == pytest.approx(1.2)
    assert found["split: mean gap, measured"] == pytest.approx(40.0)
    assert found["colocated: mean gap, measured / predicted"] == pytest.approx(1.0)
    assert found["chosen (split) / other (colocated): requests/s, predicted"] == pytest.approx(1.25)
    assert found["chosen (split) / other (colocated): requests/s, measured"] == pytest.approx(2.0)
