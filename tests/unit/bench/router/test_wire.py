"""CPU time of a token between two processes: figures of the blocks, and a small pass in both ways."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from bench.harness.rotations import Block
from bench.router import wire


def test_a_rotation_gives_both_ends_and_their_ratios() -> None:
    blocks = [Block(0, "calls 8", 1e9, 1e9, (60e-6, 90e-6)), Block(0, "session 8", 1e9, 1e9, (20e-6, 45e-6))]
    found = {finding.name: round(finding.overall.median, 6) for finding in wire.findings_of(blocks)}
    assert found == {
        "router, a message a token, 8 streams": 60.0,
        "router, a message a step, 8 streams": 20.0,
        "router, ratio, 8 streams": 3.0,
        "decode, a message a token, 8 streams": 90.0,
        "decode, a message a step, 8 streams": 45.0,
        "decode, ratio, 8 streams": 2.0,
    }


@pytest.mark.integration
def test_a_pass_reads_every_token_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LONG_TOKENS", 12)
    blocks = wire.run(1, (2,), 0.002, Console(file=StringIO()), lambda blocks: None)
    assert {block.arm for block in blocks} == {"calls 2", "session 2"}
    assert all(len(block.values) == 2 for block in blocks)
