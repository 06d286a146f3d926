"""CPU time a token: passes on a real router, and figures less what an idle router needs."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from bench.harness.rotations import Block
from bench.router import token_path
from tests.redis_server import require_redis


def block(arm: str, value: float) -> Block:
    return Block(0, arm, 1e9, 1e9, (value,))


def test_an_idle_router_is_taken_off_and_arms_give_ratios() -> None:
    blocks = [block("idle", 0.001), block("8", 42.5e-6), block("8 again", 82.5e-6)]  # 2.5 us a token at 8 x 50 tokens/s
    found = token_path.findings_of(blocks)
    assert [finding.name for finding in found] == ["CPU a token, 8 streams", "A/A, 8 streams"]
    assert [round(finding.overall.median, 6) for finding in found] == [40.0, 2.0]


def test_a_baseline_is_compared_in_the_same_rotation() -> None:
    blocks = [block("idle", 0.0), block("1", 40e-6), block("1 again", 40e-6)]
    blocks += [block("baseline idle", 0.001), block("baseline 1", 100e-6)]
    found = {finding.name: round(finding.overall.median, 6) for finding in token_path.findings_of(blocks)}
    assert found["baseline over this, 1 streams"] == 2.0
    assert found["CPU a token of the baseline, 1 streams"] == 80.0


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that cost more than two short answers may differ by, and an idle time in which something is due."""
    monkeypatch.setattr(token_path, "LONG_TOKENS", 66)
    monkeypatch.setattr(token_path, "IDLE_S", 0.5)


@pytest.mark.integration
def test_a_pass_gives_cpu_times_of_a_real_router(monkeypatch: pytest.MonkeyPatch) -> None:
    require_redis()
    shorten(monkeypatch)
    check_pass(token_path.run(1, (2,), Console(file=StringIO()), lambda blocks: None))


@pytest.mark.integration
def test_a_pass_without_workers_gives_cpu_times(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)
    check_pass(token_path.run(1, (2,), Console(file=StringIO()), lambda blocks: None, http_only=True))


def check_pass(blocks: list[Block]) -> None:
    assert {block.arm for block in blocks} == {"idle", "2", "2 again"}
    assert all(block.values[0] > 0.0 for block in blocks)
