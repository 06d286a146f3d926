"""The generated pages are what `make docs` would write now."""

import runpy
from enum import Enum
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GENERATOR = runpy.run_path(str(ROOT / "scripts" / "generate_docs.py"))
PAGES = GENERATOR["pages"]()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_generated_page_is_current(path):
    assert path.read_text(encoding="utf-8") == PAGES[path], "run: make docs"


def test_every_diagram_is_in_the_protocol_page():
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    assert {found[2] for found in GENERATOR["SECTION"].finditer(page)} == {"request", "export", "import"}


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
