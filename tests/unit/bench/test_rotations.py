"""Interleaving and what is kept of it; and that the probes measure something."""

import io
import json
import os
from collections.abc import Callable

import pytest
from rich.console import Console

from bench.probes import LoopbackProbe, MemcpyProbe, process_cpu_s
from bench.rotations import Block, Timed, find, rotate, save, table_of


def block(rotation: int, arm: str, value: float, before: float = 100.0, after: float = 100.0) -> Block:
    return Block(rotation, arm, before, after, (value,))


BLOCKS = [
    block(0, "base", 1.0),
    block(0, "arm", 2.0),
    block(1, "arm", 9.0, after=50.0),
    block(1, "base", 3.0),
    block(2, "base", 4.0),
    block(2, "arm", 8.0),
]


def ratio(group: tuple[Block, ...]) -> float:
    base, arm = group
    return arm.values[0] / base.values[0]


def test_every_rotation_runs_every_arm_once_between_two_probes():
    ran: list[str] = []

    def arm(name: str) -> Callable[[], list[float]]:
        def measure() -> list[float]:
            ran.append(name)
            return [float(len(ran))]

        return measure

    arms = {name: arm(name) for name in "abc"}
    readings = iter(range(100))
    blocks = rotate(arms, lambda _: float(next(readings)), num_rotations=8, seed=1, console=Console(file=io.StringIO()))
    assert [b.arm for b in blocks] == ran
    rounds = [tuple(ran[at : at + 3]) for at in range(0, 24, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 1
    assert [(b.probe_before, b.probe_after) for b in blocks] == [(2.0 * n, 2.0 * n + 1.0) for n in range(24)]
    assert [b.rotation for b in blocks] == [n // 3 for n in range(24)]


def test_a_rotation_in_which_the_machine_changed_is_told_apart():
    found = find("x", "", BLOCKS, ("base", "arm"), ratio)
    assert (found.num_rotations, found.num_kept) == (3, 2)
    assert found.over_all.median == 2.0
    assert found.over_all.high == 3.0
    assert found.over_kept is not None
    assert (found.over_kept.median, found.over_kept.low, found.over_kept.high) == (2.0, 2.0, 2.0)


def test_an_arm_that_is_timed_keeps_both_clocks_and_tells_when_it_was_disturbed():
    arms = {"calm": lambda: Timed((1.0, 1.0, 5.0), (1.0, 1.0, 1.0)), "torn": lambda: Timed((1.0, 1.1), (0.9, 1.0))}
    blocks = rotate(arms, lambda _: 1.0, num_rotations=1, seed=0, console=Console(file=io.StringIO()))
    by_arm = {block.arm: block for block in blocks}
    assert by_arm["calm"].values == (1.0, 1.0, 5.0)
    assert by_arm["calm"].cpu_s == (1.0, 1.0, 1.0)
    assert by_arm["calm"].is_steady
    assert by_arm["torn"].has_steady_probe
    assert not by_arm["torn"].is_steady
    found = [
        find("x", "", blocks, ("torn",), lambda group: group[0].cpu_s[0], keep=keep)
        for keep in (lambda block: block.is_steady, lambda block: block.has_steady_probe)
    ]
    assert [finding.num_kept for finding in found] == [0, 1]


def test_the_change_of_another_arm_does_not_matter():
    assert find("x", "", BLOCKS, ("base",), lambda group: group[0].values[0]).num_kept == 3


def test_nothing_kept_is_said():
    found = find("x", "us", BLOCKS[2:4], ("base", "arm"), ratio)
    assert (found.num_kept, found.over_kept) == (0, None)
    out = io.StringIO()
    Console(file=out, width=120).print(table_of([found]))
    assert "0/1" in out.getvalue()


def test_a_record_has_every_sample(tmp_path):
    path = tmp_path / "run.json"
    save(path, "name", BLOCKS, [find("x", "", BLOCKS, ("base", "arm"), ratio)])
    record = json.loads(path.read_text())
    assert len(record["blocks"]) == 6
    assert record["blocks"][2] == {
        "rotation": 1,
        "arm": "arm",
        "probe_before": 100.0,
        "probe_after": 50.0,
        "values": [9.0],
        "cpu_s": [],
    }
    assert record["findings"][0]["over_all"]["median"] == 2.0


@pytest.mark.parametrize("make", [MemcpyProbe, LoopbackProbe])
def test_probes_read_a_speed(make):
    assert make(2 * 1024 * 1024)() > 1e6


def test_cpu_time_grows_with_work():
    before_s = process_cpu_s(os.getpid())
    sum(range(2_000_000))
    assert process_cpu_s(os.getpid()) > before_s
