"""Names of the metrics, and their endpoint."""

import errno
import subprocess
import sys
import urllib.request

import pytest

from baton.telemetry import metrics
from baton.telemetry.metrics_server import start_metrics_server
from baton.telemetry.series import session_series


def test_every_metric_has_a_name_help_and_a_constant_like_its_name():
    declared = metrics.declared()
    constants = vars(metrics) | vars(session_series)
    assert len(declared) > 30
    for metric in declared:
        family = next(iter(metric.describe()))
        assert family.name.startswith("baton_")
        assert family.documentation.endswith(".")
        constant = family.name.removeprefix("baton_").upper()
        suffix = "_TOTAL" if family.type == "counter" else ""
        assert constants[constant + suffix] is metric


def test_recomputed_tokens_start_at_zero():
    """In a new process: tests of this one may have recomputed some."""
    code = "from baton.telemetry import metrics; text, kind = metrics.render(); print(kind); print(text.decode())"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60.0, check=True
    ).stdout
    assert "\nbaton_tokens_recomputed_total 0.0\n" in shown
    assert shown.startswith("text/plain")


def test_the_endpoint_serves_until_closed():
    metrics.DEGRADED.labels("test").set(1)
    server = start_metrics_server("127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.port}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            assert b'baton_degraded{component="test"} 1.0' in response.read()
    finally:
        server.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=10)


def test_a_busy_port_is_named_in_the_error():
    server = start_metrics_server("127.0.0.1", 0)
    try:
        with pytest.raises(OSError, match=f"metrics port {server.port}") as caught:
            start_metrics_server("127.0.0.1", server.port)
        assert caught.value.errno == errno.EADDRINUSE
    finally:
        server.close()
