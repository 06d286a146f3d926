"""Planted bugs in tool calls; a part of the table in `bugs`."""

from __future__ import annotations

from tests.planted.runner import PlantedBug

TOOLS = "tool calls are whole"
REASONING = "reasoning and answer are told apart"
BLOCKS, HERMES_TESTS = "services/router/text/parsers/blocks.py", "tests/unit/router/text/test_hermes.py"
JSON_SPANS, JSON_CALLS = "services/router/text/parsers/json_spans.py", "services/router/text/parsers/json_calls.py"

TOOL_BUGS = (
    PlantedBug(
        TOOLS,
        "half a marker is shown",
        BLOCKS,
        "cut = len(self._held) - self._num_held(self._held)",
        "cut = len(self._held)",
        HERMES_TESTS,
    ),
    PlantedBug(
        TOOLS,
        "an undeclared name is a call",
        JSON_CALLS,
        "if call is not None and call[0] in self._names else BlockState.REJECTED",
        "if call is not None else BlockState.REJECTED",
        HERMES_TESTS,
    ),
    PlantedBug(
        TOOLS,
        "a brace in a string ends a call",
        JSON_SPANS,
        "                self._in_string = True",
        "                self._in_string = False",
        HERMES_TESTS,
    ),
    PlantedBug(
        TOOLS,
        "the opening of a block that is no call is lost",
        BLOCKS,
        "            return self._opening",
        '            return ""',
        HERMES_TESTS,
    ),
    PlantedBug(
        TOOLS,
        "a call that may still be none is shown while it is written",
        BLOCKS,
        "            and is_token",
        "            and True",
        "tests/unit/router/text/test_streamed_calls.py",
    ),
    PlantedBug(
        REASONING,
        "an end quoted as text ends a thought",
        "services/router/text/parsers/reasoning.py",
        'self._closing = "" if format.closing in tokens else format.closing',
        "self._closing = format.closing",
        "tests/unit/router/text/test_reasoning.py",
    ),
    PlantedBug(
        REASONING,
        "half an end marker is shown",
        "services/router/text/parsers/reasoning.py",
        "cut = len(self._held) - held_length(self._held, self._closing)",
        "cut = len(self._held)",
        "tests/unit/router/text/test_reasoning.py",
    ),
    PlantedBug(
        REASONING,
        "unread reasoning is dropped",
        "services/router/streaming/unread_buffer.py",
        "is_parsed = bool(event.calls or event.reasoning)",
        "is_parsed = bool(event.calls)",
        "tests/unit/router/streaming/test_unread_buffer.py",
    ),
    PlantedBug(
        REASONING,
        "reasoning is not counted",
        "services/router/streaming/token_stream.py",
        "self._num_reasoning_tokens += event.is_reasoning",
        "self._num_reasoning_tokens += 0",
        "tests/service/http/test_reasoning.py",
    ),
    PlantedBug(
        REASONING,
        "a form begins before the reasoning has ended",
        "services/router/openai/reasoning/phases.py",
        "phases=(*phases, *answer.phases)",
        "phases=answer.phases",
        "tests/unit/router/openai/test_reasoning_phases.py",
    ),
    PlantedBug(
        TOOLS,
        "a list with an undeclared name is cut",
        JSON_CALLS,
        "FoundCalls(end, known) if known and len(known) == len(calls) else",
        "FoundCalls(end, known) if known else",
        "tests/unit/router/text/test_tool_formats.py",
    ),
    PlantedBug(
        TOOLS,
        "a closing tag in a value ends it",
        "services/router/text/parsers/written_calls.py",
        "if not may_be_inside and rest.startswith((syntax.opening, syntax.end)):",
        "if True:",
        "tests/unit/router/text/test_tool_formats.py",
    ),
    PlantedBug(
        TOOLS,
        "unread calls are dropped",
        "services/router/streaming/unread_buffer.py",
        "(_IS_PARSED if is_parsed else 0)",
        "0",
        "tests/unit/router/streaming/test_unread_buffer.py",
    ),
)
