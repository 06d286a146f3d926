"""A ceiling is the fastest candidate, and every candidate does all of the work."""

import time

import pytest
import torch

from bench.harness.ceilings import GemmProbe, ReadProbe, find_ceiling

NUM_BYTES = 2 * 1024 * 1024


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_the_fastest_candidate_is_the_ceiling():
    found = find_ceiling({"slow": lambda: spin(0.02), "fast": lambda: None, "mean": lambda: spin(0.01)}, 1000.0)
    assert found.name == "fast"
    assert found.speeds[0] == ("fast", found.speed)
    assert dict(found.speeds)["slow"] <= 1000.0 / 0.02


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match="nothing"):
        find_ceiling({}, 1.0)


def last(result: object) -> float:
    """A candidate's result as a number that depends on the last bytes read."""
    if result is None:
        return 0.0
    return float(torch.as_tensor(result).flatten()[-1])


def test_every_read_candidate_reads_to_the_end():
    probe = ReadProbe(NUM_BYTES)
    before = {name: last(way()) for name, way in probe._candidates.items()}
    probe._memory[-4:] = torch.tensor([1, 1, 1, 0x3F], dtype=torch.uint8)
    # The vectors are zeros: ones let the products show what they have read.
    after = {name: last(way()) for name, way in probe._candidates.items() if "rows" not in name}
    assert all(before[name] != value for name, value in after.items())
    assert set(after) == {"torch.sum", "memchr"}
    assert probe() > 0.0


def test_every_dtype_has_a_product_ceiling():
    probe = GemmProbe((4, 8, 16))
    assert set(probe.by_dtype) == {"float32", "bfloat16"}
    assert probe.by_dtype[probe.dtype].speed == max(best.speed for best in probe.by_dtype.values())
    assert {"torch.mm", "linear", "numpy.dot"} <= {name for name, _ in probe.by_dtype["float32"].speeds}
    assert probe() > 0.0
