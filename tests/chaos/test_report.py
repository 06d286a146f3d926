"""Tables of results, and their place in a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos.checks.resource_monitor import ResourceGrowth
from chaos.faults import ClusterFault, is_applicable
from chaos.matrix import Cell, CellResult, all_cells
from chaos.phases import RequestPhase
from chaos.report import markdown_table, soak_markdown, write_into
from chaos.soak import SoakReport
from chaos.testbed.process import ProcessResources


def result(phase: RequestPhase, fault: ClusterFault, *problems: str, num_dropped: int = 0) -> CellResult:
    return CellResult(Cell(phase, fault), problems, 3, 1, num_dropped, 1.25, 2.0, 5.0)


def test_a_failed_cell_is_not_counted_as_passed() -> None:
    results = [
        result(RequestPhase.DECODING, ClusterFault.PARTITION_WORKERS),
        result(RequestPhase.DECODING, ClusterFault.PARTITION_WORKERS, "a gap"),
        result(RequestPhase.QUEUED, ClusterFault.KILL_ROUTER),
    ]
    lines = markdown_table(results).splitlines()
    assert lines[0] == "| fault | queued | decoding |", "only phases that ran"
    assert lines[-1] == "| decode \\| prefill | - | 1/2, 1.2 s |"


def test_calls_that_were_sent_again_are_told() -> None:
    lines = markdown_table([result(RequestPhase.DECODING, ClusterFault.KILL_ROUTER, num_dropped=2)]).splitlines()
    assert "1/1, 1.2 s, 2 sent again" in lines[-1]


def test_only_text_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- measured: one -->\nold\n<!-- end -->\nb\n<!-- measured: two -->\nkept\n<!-- end -->\n")
    write_into(page, "one", "new")
    expected = "a\n<!-- measured: one -->\nnew\n<!-- end -->\nb\n<!-- measured: two -->\nkept\n<!-- end -->\n"
    assert page.read_text() == expected
    with pytest.raises(ValueError, match="has no"):
        write_into(page, "three", "x")


def test_bits_flip_only_where_pages_are_pending() -> None:
    cells = all_cells("stream")
    assert {cell.fault for cell in cells} == set(ClusterFault)
    assert {cell.phase for cell in cells} == set(RequestPhase)
    assert not is_applicable(RequestPhase.DECODING, ClusterFault.FLIP_ONCE, "stream")
    flips = [cell.phase for cell in all_cells("nixl") if cell.fault is ClusterFault.FLIP_ONCE]
    assert flips == [RequestPhase.PULLING]  # embeddings come by the stream in the matrix


def test_faults_of_encode_workers_hit_phases_with_images_only() -> None:
    of_images = {str(cell) for cell in all_cells("stream") if cell.phase.has_image}
    assert of_images == {str(cell) for cell in all_cells("nixl") if cell.phase.has_image}
    assert "pulling x kill -9 prefill" in of_images
    assert "encoding x kill -9 prefill" not in of_images, "nobody knows which one will pull"
    assert {"pulling x a bit flips", "pulling x prefill | encode", "pulling x slow prefill - encode"} <= of_images
    faults = {ClusterFault.KILL_ENCODE, ClusterFault.STOP_ENCODE, ClusterFault.PARTITION_ENCODE}
    assert all(cell.phase.has_image for cell in all_cells("stream") if cell.fault in faults)
    assert len(of_images) == 16


def test_resource_growth_is_reported() -> None:
    first, last = ProcessResources(100 * 2**20, 20, 9), ProcessResources(103 * 2**20, 21, 9)
    report = SoakReport(seed=1, growths=[ResourceGrowth("decode-0", 9, 2.5 * 2**20, 0.5, 0.0, first, last)])
    assert soak_markdown(report).splitlines()[-1] == (
        "| decode-0 | 100.0 -> 103.0 | +2.5 | 20 -> 21 | +0.5 | 9 -> 9 | +0.0 |"
    )
    report.load.problem("a gap")
    report.load.ends["done"] += 3
    report.faults["Redis full"] += 1
    written = json.loads(report.as_json())
    assert written["growths"][0]["last"]["num_fds"] == 21
    assert written["load"]["num_problems"] == 1
    assert written["load"]["ends"] == {"done": 3}
    assert written["faults"] == {"Redis full": 1}
