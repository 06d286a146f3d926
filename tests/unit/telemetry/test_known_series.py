"""Counters with known labels are at 0 before their first event."""

import subprocess
import sys

SHOW = "from baton.telemetry import known_series, metrics; known_series.start_series('1', '{role}', 'm');"
SHOW += "print(metrics.render()[0].decode())"


def shown(role: str) -> str:
    """The metrics of a fresh process of this role: a process has one registry."""
    return subprocess.run(
        [sys.executable, "-c", SHOW.format(role=role)], check=True, capture_output=True, text=True
    ).stdout


def test_a_routers_counters_start_at_zero():
    text = shown("router")
    for series in (
        'baton_requests_total{code="stop",outcome="finished"} 0.0',
        'baton_requests_total{code="worker_lost",outcome="failed"} 0.0',
        'baton_admission_total{decision="refused",reason="overloaded",tenant=""} 0.0',
        'baton_retries_total{outcome="retried",phase="decoding",reason="worker_lost"} 0.0',
        'baton_takeovers_total{cause="orphan"} 0.0',
    ):
        assert series in text
    assert "baton_commit_total{" not in text


def test_a_workers_counters_start_at_zero():
    text = shown("decode")
    assert 'baton_preemptions_total{reason="pages"} 0.0' in text
    assert 'baton_send_backs_total{reason="no_memory"} 0.0' in text
    assert 'baton_commit_total{result="v3"} 0.0' in text
    assert 'baton_generated_tokens_total{role="decode"} 0.0' in text
    assert "baton_requests_total{" not in text
    assert "baton_commit_total{" not in shown("prefill")
