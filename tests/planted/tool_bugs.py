"""Planted bugs in tool calls; a part of the table in `bugs`."""

from __future__ import annotations

from tests.planted.runner import PlantedBug

TOOLS = "tool calls are whole"
HERMES, HERMES_TESTS = "services/router/text/parsers/hermes.py", "tests/unit/router/text/test_hermes.py"

TOOL_BUGS = (
    PlantedBug(
        TOOLS,
        "half a marker is shown",
        HERMES,
        "cut = len(self._held) - _num_held(self._held)",
        "cut = len(self._held)",
        HERMES_TESTS,
    ),
    PlantedBug(TOOLS, "an undeclared name is a call", HERMES, "valid and name in self._names", "valid", HERMES_TESTS),
    PlantedBug(
        TOOLS,
        "a brace in a string ends a call",
        HERMES,
        "                self._in_string = True",
        "                self._in_string = False",
        HERMES_TESTS,
    ),
    PlantedBug(
        TOOLS,
        "the opening of a block that is no call is lost",
        HERMES,
        "            return opening",
        '            return ""',
        HERMES_TESTS,
    ),
    PlantedBug(
        TOOLS,
        "unread calls are dropped",
        "services/router/streaming/unread_buffer.py",
        "(_HAS_CALLS if event.calls else 0)",
        "0",
        "tests/unit/router/streaming/test_unread_buffer.py",
    ),
)
