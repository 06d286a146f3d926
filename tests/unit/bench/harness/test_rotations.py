"""Interleaving of arms, steadiness, result files and probes."""

import contextlib
import io
import itertools
import json
import os
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from rich.console import Console

from bench.harness.probes import LoopbackProbe, MemcpyProbe, process_cpu_s
from bench.harness.rotations import (
    Block,
    Finding,
    Remark,
    ResultFile,
    ResultSeries,
    TimedSamples,
    make_finding,
    rotate,
    rotate_exclusive,
    save,
    table_of,
    write_atomically,
)
from bench.report import load_result


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


def test_a_rotation_with_drifting_probes_is_not_steady():
    found = make_finding("x", "", BLOCKS, ("base", "arm"), ratio)
    assert (found.num_rotations, found.num_steady) == (3, 2)
    assert found.overall.median == 2.0
    assert found.overall.high == 3.0
    assert found.steady is not None
    assert (found.steady.median, found.steady.low, found.steady.high) == (2.0, 2.0, 2.0)


def test_timed_samples_keep_both_clocks_and_show_disturbance():
    arms = {
        "calm": lambda: TimedSamples((1.0, 1.0, 5.0), (1.0, 1.0, 1.0)),
        "torn": lambda: TimedSamples((1.0, 1.1), (0.9, 1.0)),
    }
    blocks = rotate(arms, lambda _: 1.0, num_rotations=1, seed=0, console=Console(file=io.StringIO()))
    by_arm = {block.arm: block for block in blocks}
    assert by_arm["calm"].values == (1.0, 1.0, 5.0)
    assert by_arm["calm"].cpu_s == (1.0, 1.0, 1.0)
    assert by_arm["calm"].is_steady
    assert by_arm["torn"].has_steady_probe
    assert not by_arm["torn"].is_steady
    found = [
        make_finding("x", "", blocks, ("torn",), lambda group: group[0].cpu_s[0], keep=keep)
        for keep in (lambda block: block.is_steady, lambda block: block.has_steady_probe)
    ]
    assert [finding.num_steady for finding in found] == [0, 1]


def test_drift_of_another_arm_does_not_matter():
    assert make_finding("x", "", BLOCKS, ("base",), lambda group: group[0].values[0]).num_steady == 3


def test_a_finding_without_steady_rotations_shows_a_dash():
    found = make_finding("x", "us", BLOCKS[2:4], ("base", "arm"), ratio)
    assert (found.num_steady, found.steady) == (0, None)
    out = io.StringIO()
    Console(file=out, width=120).print(table_of([found]))
    assert "0/1" in out.getvalue()


def test_a_result_file_has_every_sample(tmp_path):
    path = tmp_path / "run.json"
    save(path, "name", BLOCKS, [make_finding("x", "", BLOCKS, ("base", "arm"), ratio)])
    result_file = json.loads(path.read_text())
    assert len(result_file["blocks"]) == 6
    assert result_file["blocks"][2] == {
        "rotation": 1,
        "arm": "arm",
        "probe_before": 100.0,
        "probe_after": 50.0,
        "values": [9.0],
        "cpu_s": [],
    }
    assert result_file["findings"][0]["overall"]["median"] == 2.0


def first_value(blocks: Sequence[Block]) -> list[Finding]:
    return [make_finding(blocks[0].arm, "", blocks, (blocks[0].arm,), lambda group: group[0].values[0])]


def test_an_interrupted_run_keeps_its_complete_rotations(tmp_path):
    path = tmp_path / "run.json"
    values = iter((1.0, 2.0))
    result_file = ResultFile(path, "name", 5, first_value, [Remark("machine", "a box")])

    def arm() -> list[float]:
        try:
            return [next(values)]
        except StopIteration:
            raise KeyboardInterrupt from None

    console = Console(file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        rotate({"arm": arm}, lambda _: 1.0, num_rotations=5, seed=0, console=console, on_rotation=result_file.write)
    kept = load_result(path)
    assert [block.values for block in kept.blocks] == [(1.0,), (2.0,)]
    assert kept.findings[0].overall.median == 1.5
    assert kept.remarks == (Remark("machine", "a box"),)
    assert kept.progress == "2 of 5 rotations"
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_a_series_of_experiments_shares_one_file(tmp_path):
    path = tmp_path / "run.json"
    series = ResultSeries(path, "name", 2, [])
    one, two = BLOCKS[:1], BLOCKS[1:2]
    series.on_rotation(first_value)(one)
    series.add(one, first_value)
    series.on_rotation(first_value)(two)
    kept = load_result(path)
    assert [block.arm for block in kept.blocks] == ["base", "arm"]
    assert [finding.name for finding in kept.findings] == ["base", "arm"]
    assert [finding.name for finding in series.findings] == ["base"]


def test_a_file_is_replaced_atomically(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_atomically(path, b"old")
    monkeypatch.setattr("os.replace", lambda new, old: pytest.fail(f"{path.read_bytes()!r}"))
    with pytest.raises(pytest.fail.Exception, match="old"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("make", [MemcpyProbe, LoopbackProbe])
def test_probes_read_a_speed(make):
    assert make(2 * 1024 * 1024)() > 1e6


def test_cpu_time_grows_with_work():
    before_s = process_cpu_s(os.getpid())
    sum(range(2_000_000))
    assert process_cpu_s(os.getpid()) > before_s


def test_arms_without_a_common_rotation_have_no_ratio():
    apart = [Block(0, "base", 1.0, 1.0, (1.0,)), Block(1, "arm", 1.0, 1.0, (2.0,))]
    assert make_finding("x", "", apart, ("arm",), lambda group: group[0].values[0]).num_rotations == 1
    with pytest.raises(ValueError, match="no rotation has all of arm, base"):
        make_finding("x", "", apart, ("arm", "base"), lambda group: group[0].values[0] / group[1].values[0])


def test_turns_do_not_overlap_and_a_failed_turn_adds_no_block():
    running: list[str] = []
    seen: list[int] = []
    failures: list[tuple[int, str, str]] = []

    @contextlib.contextmanager
    def turn(name: str, rotation: int):
        assert not running
        running.append(name)
        arms_run = itertools.count()

        def arm() -> list[float]:
            if (name, rotation) == ("b", 1) and next(arms_run) == 1:
                raise RuntimeError("broke")
            return [1.0]

        try:
            yield {f"{name}{number}": arm for number in range(3)}
        finally:
            running.remove(name)

    blocks = rotate_exclusive(
        {name: partial(turn, name) for name in "abc"},
        lambda _: 1.0,
        num_rotations=4,
        seed=0,
        console=Console(file=io.StringIO()),
        on_failure=lambda rotation, name, error: failures.append((rotation, name, str(error))),
        on_rotation=lambda blocks: seen.append(len(blocks)),
    )
    assert failures == [(1, "b", "broke")]
    assert seen == [9, 15, 24, 33]
    assert not [block for block in blocks if block.rotation == 1 and block.arm.startswith("b")]
    orders = {tuple(block.arm[0] for block in blocks if block.rotation == rotation)[::3] for rotation in (0, 2, 3)}
    assert len(orders) > 1
