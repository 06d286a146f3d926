"""The prefix experiment: arithmetic of its arms, bookkeeping, and a run on a real system."""

import io
import statistics

import pytest
from rich.console import Console

from bench.harness.model_shapes import SHAPES
from bench.harness.rotations import Block
from bench.system import prefix_cache
from bench.system.prefix_cache import FRESH, PrefixPlan, cached_arm, findings_of, ideal_arm
from bench.system.prefix_overhead import bookkeeping_s
from tests.redis_server import require_redis

PLAN = PrefixPlan(prompt_tokens=1024, shares=(50, 95, 100), page_size=16, num_requests=1)


def test_whole_pages_are_cached_and_never_the_last_token():
    assert [PLAN.cached_tokens(share) for share in (0, 50, 95, 100)] == [0, 512, 960, 1008]


def test_speed_ups_compare_with_fresh_and_ideal_prompts():
    times_s = {FRESH: 1.0, "0 % cached, salted": 1.1, "bookkeeping": 0.005}
    for share, time_s in ((50, 0.6), (95, 0.1), (100, 0.05)):
        times_s |= {cached_arm(share): time_s, ideal_arm(share): 0.9 * time_s}
    blocks = [Block(0, arm, 1.0, 1.0, (time_s,)) for arm, time_s in times_s.items()]
    found = {finding.name: finding.overall.median for finding in findings_of(PLAN, None, blocks)}
    assert found["50 % cached: speed-up"] == pytest.approx(1.0 / 0.6)
    assert found["95 % cached: speed-up / ideal"] == pytest.approx(0.9)
    assert found["no hit: salted / fresh"] == pytest.approx(1.1)
    assert found["no hit: bookkeeping / first token"] == pytest.approx(0.005)


def test_the_attainable_adds_the_attention_to_the_prefix():
    shape = SHAPES["tiny"]
    plan = PrefixPlan(prompt_tokens=1024, shares=(75,), page_size=16, num_requests=1)
    times_s = {FRESH: 1.0, "0 % cached, salted": 1.0, "bookkeeping": 0.005}
    share_of_prefix = shape.prefix_flops(768, 256) / shape.prefill_flops(1024)
    times_s |= {cached_arm(75): 0.4, ideal_arm(75): 0.4 - share_of_prefix}
    blocks = [Block(0, arm, 1.0, 1.0, (time_s,)) for arm, time_s in times_s.items()]
    found = {finding.name: finding.overall.median for finding in findings_of(plan, shape, blocks)}
    assert 0.05 < share_of_prefix < 0.25
    assert found["75 % cached: speed-up / ideal"] < 0.9
    assert found["75 % cached: speed-up / attainable"] == pytest.approx(1.0)


def test_bookkeeping_grows_with_the_prompt():
    short, long = (statistics.median(bookkeeping_s(num_tokens, 16, 15)) for num_tokens in (64, 4096))
    assert long > 4 * short


@pytest.mark.integration
def test_a_real_system_hits_shared_prefixes():
    require_redis()
    words = "--dtype float32 --prompt-tokens 64 --shares 50 --requests 1 --rotations 1"
    options = prefix_cache.parse(words.split())
    kept: list[int] = []
    blocks = prefix_cache.run(options, Console(file=io.StringIO()), lambda blocks: kept.append(len(blocks)))
    assert kept == [len(blocks)]
    assert {block.arm for block in blocks} == {
        FRESH, "0 % cached, salted", "bookkeeping", "50 % cached", "50 % cached, ideal",
    }  # fmt: skip
    assert all(value > 0.0 for block in blocks for value in block.values)
    assert len(findings_of(options.plan, None, blocks)) == 6
