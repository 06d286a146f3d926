"""The measurement of movers moves every page, and does not take what is damaged for a result."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.transfer.file_tier.slot_file import SlotFile
from bench.engine.tiers.file_movers import WORK, MeasuredMover, table
from tests.unit.transfer.rigs import needs_nixl


@needs_nixl
def test_there_is_a_row_for_each_mover_and_work(tmp_path: Path):
    rows = table(tmp_path, 4096, 20, 2)[2:]
    assert [row.split("|")[2].strip() for row in rows] == [*WORK] * (len(rows) // len(WORK))
    assert [row.split()[1] for row in rows[:4]] == ["preadv"] * 3 + ["nixl"], "one engine is allowed everywhere"
    assert not list(tmp_path.iterdir())


def test_a_damaged_page_is_an_error(tmp_path: Path):
    bench = MeasuredMover(SlotFile, tmp_path / "pages", 4096, 5)
    bench.write()
    bench.read()
    with (tmp_path / "pages" / "seg-0000").open("r+b") as file:
        file.write(bytes(100))
    with pytest.raises(OSError, match="as it was written"):
        bench.read()
    bench.close()


def test_pages_of_other_slots_are_an_error(tmp_path: Path):
    bench = MeasuredMover(SlotFile, tmp_path / "pages", 4096, 5)
    bench.write()
    with (tmp_path / "pages" / "seg-0000").open("r+b") as file:
        first, second = file.read(4096), file.read(4096)
        file.seek(0)
        file.write(second + first)
    with pytest.raises(OSError, match="as it was written"):
        bench.read()
    bench.close()
