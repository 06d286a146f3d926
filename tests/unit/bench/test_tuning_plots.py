"""The figures of docs/tuning.md show the numbers of the results that the page cites."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.tuning_plots import FIGURES, TuningFigure, draw, number, read_rows

DOCS = Path(__file__).resolve().parents[3] / "docs"
RESULTS = DOCS / "results"


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_committed_figure_has_every_number_of_its_table(figure: TuningFigure):
    panels = figure.panels(read_rows((RESULTS / figure.source).read_text()))
    shown = re.findall(r">([^<>]+)</text>", (RESULTS / f"{figure.name}.svg").read_text())
    for panel in panels:
        assert panel.title in shown
        for series, cells in panel.values.items():
            assert len(cells) == len(panel.groups), series
            assert {f"{number(cell):g}" for cell in cells} <= set(shown), (panel.title, series)


def test_the_guide_shows_and_cites_every_figure():
    guide = (DOCS / "tuning.md").read_text()
    for figure in FIGURES:
        assert f"(results/{figure.name}.svg)" in guide
        assert f"(results/{figure.source})" in guide


def test_a_figure_drawn_again_is_the_same_file(tmp_path: Path):
    pytest.importorskip("matplotlib")
    panels = FIGURES[0].panels(read_rows((RESULTS / FIGURES[0].source).read_text()))
    for name in ("a.svg", "b.svg"):
        draw(panels, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    ("cell", "value"), [("92,072", 92072), ("**8.4%**", 8.4), ("1.44e+03 [1.02e+03, 1.71e+03]", 1440), ("0.00", 0)]
)
def test_numbers_of_cells(cell: str, value: float):
    assert number(cell) == value


def test_a_cell_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="no number"):
        number("-")
