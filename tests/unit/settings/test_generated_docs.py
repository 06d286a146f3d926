"""The generated pages match the output of `make docs`."""

import runpy
from enum import Enum
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GENERATOR = runpy.run_path(str(ROOT / "scripts" / "generate_docs.py"))
PAGES = GENERATOR["pages"]()
EXACT = [path for path in PAGES if path.name != "architecture.md"]
SIZE_TOLERANCE = 0.2


@pytest.mark.parametrize("path", EXACT, ids=lambda path: path.name)
def test_a_generated_page_is_current(path):
    assert path.read_text(encoding="utf-8") == PAGES[path], "run: make docs"


def test_the_reading_list_shows_true_sizes():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = {row[2]: int(row[0].split("|")[-2]) for row in GENERATOR["SIZE_ROW"].finditer(page)}
    assert len(shown) > 20
    true = {path: GENERATOR["num_lines"](ROOT / path) for path in shown}
    wrong = {
        path: (shown[path], size) for path, size in true.items() if abs(shown[path] - size) > SIZE_TOLERANCE * size + 10
    }
    assert wrong == {}, "run: make docs"


def test_sizes_are_written_in_tens():
    page = "| 1 | `Makefile` | 0 | targets |\n"
    lines = GENERATOR["num_lines"](ROOT / "Makefile")
    assert GENERATOR["architecture"](page) == f"| 1 | `Makefile` | {round(lines, -1)} | targets |\n"


def test_every_diagram_is_in_the_protocol_page():
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    assert {found[2] for found in GENERATOR["SECTION"].finditer(page)} == {"request", "roles", "export", "import"}


def test_a_diagram_joins_events_between_the_same_states():
    class State(Enum):
        A = "a"
        B = "b"

    class Event(Enum):
        X = "x"
        Y = "y"

    table = {(State.A, Event.X): State.B, (State.A, Event.Y): State.B}
    lines = GENERATOR["diagram"](table, State.A, frozenset({State.B})).splitlines()
    assert lines[2:-1] == ["    [*] --> a", "    a --> b: x, y", "    b --> [*]"]


def test_a_page_with_an_unknown_section_is_refused():
    with pytest.raises(KeyError):
        GENERATOR["protocol"]("<!-- generated: nothing -->\n<!-- end -->")
