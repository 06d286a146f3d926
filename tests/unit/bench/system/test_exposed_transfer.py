"""Exposed transfer time: parsing of metrics pages, and its share of TTFT."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench.harness.rotations import Block
from bench.harness.running_system import metrics_urls
from bench.system import exposed_transfer
from bench.system.exposed_transfer import ExposedTime, arm_of, findings_of, parse, read_exposed
from tests.redis_server import require_redis

PAGE = """
# TYPE baton_transfer_exposed_seconds histogram
baton_transfer_exposed_seconds_bucket{{le="+Inf",link="a->b",transport="{transport}"}} {count}
baton_transfer_exposed_seconds_count{{link="a->b",transport="{transport}"}} {count}
baton_transfer_exposed_seconds_sum{{link="a->b",transport="{transport}"}} {total}
# TYPE baton_transfer_bytes_total counter
baton_transfer_bytes_total{{link="a->b",transport="{transport}"}} 9
"""


def test_all_links_of_one_transport_are_summed():
    pages = [PAGE.format(transport=name, count=2, total=0.25) for name in ("nixl", "nixl", "stream")]
    assert read_exposed(pages, "nixl") == ExposedTime(0.5, 4)
    assert read_exposed(["", *pages], "stream") == ExposedTime(0.25, 2)
    assert read_exposed(pages, "other") == ExposedTime(0.0, 0)


def test_the_share_uses_the_ttft_of_the_same_requests():
    options = parse(["--transports", "stream", "--prompt-tokens", "512", "--requests", "2"])
    blocks = [Block(0, arm_of("stream", 512), 1.0, 1.0, (0.03, 1.0, 2.0))]
    figures = {finding.name: finding.overall.median for finding in findings_of(options, blocks)}
    assert figures["stream, 512 tokens: exposed / first token"] == pytest.approx(0.01)
    assert figures["stream, 512 tokens: exposed"] == pytest.approx(15.0)
    assert figures["stream, 512 tokens: first token"] == pytest.approx(1500.0)


def test_metrics_urls_come_from_the_output_of_baton_up():
    banner = (
        "Baton is up.\npage     http://h:1/\nAPI      http://h:1/v1\n"
        "metrics  http://h:1/metrics  router\nmetrics  http://h:2/metrics  decode-0\n\ncurl x"
    )
    assert metrics_urls(banner) == ("http://h:1/metrics", "http://h:2/metrics")


@pytest.mark.integration
def test_a_real_system_reports_exposed_time(tmp_path):
    require_redis()
    words = "--shape tiny --dtype float32 --transports stream --prompt-tokens 64 --rotations 1 --result"
    found = exposed_transfer.run(parse([*words.split(), str(tmp_path / "run.json")]), Console(file=io.StringIO()))
    first_token, exposed_ms, share = (finding.overall.median for finding in found)
    assert 0.0 <= exposed_ms < first_token, "0 where all pages had come before the seal"
    assert share == pytest.approx(exposed_ms / first_token)
    assert (tmp_path / "run.json").is_file()
