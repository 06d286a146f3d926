"""The older form of tools, `functions` and `function_call`, read as tools (ADR 139).

`validation` and `tokenization` translate the fields before tools are read, `prompts` the messages. Errors name the
older fields. `chat` writes the answer in the older form.
"""

from __future__ import annotations

from typing import Any

from baton.services.router.openai.bounds import MAX_TOOLS
from baton.services.router.openai.fields import Fields, short_repr
from baton.services.router.openai.tools.reader import (
    CHOICE,
    NO_OBJECT,
    PARALLEL,
    TOOLS,
    is_definition,
    takes_object,
)

FUNCTIONS, FUNCTION_CALL = "functions", "function_call"
_NEWER = {FUNCTIONS: TOOLS, FUNCTION_CALL: CHOICE}


def with_functions(fields: Fields) -> Fields | None:
    """The fields with the older form as tools, of which one answer calls one; None if the request has none of it.

    Notes errors. `function_call` of "none" alone asks for nothing.
    """
    functions, choice = fields.values.get(FUNCTIONS), fields.values.get(FUNCTION_CALL)
    if functions is None and choice in (None, "none"):
        return None
    rest = {name: value for name, value in fields.values.items() if name not in (*_NEWER, *_NEWER.values(), PARALLEL)}
    for older in _NEWER:
        given = [newer for newer in _NEWER.values() if fields.values.get(newer) is not None]
        if fields.values.get(older) is not None and given:
            fields.add_error(older, f"cannot be combined with {given[0]}, its newer form")
            return Fields(rest, fields.errors)
    definitions = _definitions(fields)
    choice = _choice(fields)
    if definitions:
        fields.errors.rename({TOOLS: FUNCTIONS, CHOICE: FUNCTION_CALL})
        rest |= {TOOLS: definitions, CHOICE: choice, PARALLEL: False}
    elif choice not in (None, "none") and functions is None:
        fields.add_error(FUNCTION_CALL, "needs functions")
    return Fields(rest, fields.errors)


def _definitions(fields: Fields) -> list[dict[str, Any]]:
    value = fields.values.get(FUNCTIONS)
    if value is None:
        return []
    if not isinstance(value, list) or not 0 < len(value) <= MAX_TOOLS:
        fields.add_mismatch(FUNCTIONS, f"a list of 1 to {MAX_TOOLS} functions")
        return []
    tools = [{"type": "function", "function": function} for function in value]
    wrong = [index for index, tool in enumerate(tools) if not is_definition(tool)]
    for index in wrong:
        shape = '{"name": ..., "parameters": {...}}'
        fields.add_error(f"{FUNCTIONS}[{index}]", f"must be a function such as {shape}, not {short_repr(value[index])}")
    if wrong:
        return []
    others = [index for index, tool in enumerate(tools) if not takes_object(tool["function"])]
    for index in others:
        fields.add_error(f"{FUNCTIONS}[{index}].parameters", NO_OBJECT)
    return [] if others else tools


def _choice(fields: Fields) -> object:
    """What `tool_choice` would be; None for the default, and for what is wrong."""
    value = fields.values.get(FUNCTION_CALL)
    if value is None or value in ("none", "auto"):
        return value
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return {"type": "function", "function": {"name": value["name"]}}
    fields.add_mismatch(FUNCTION_CALL, 'none, auto or {"name": ...}')
    return None


class OlderCalls:
    """The messages of one chat, in their order. A function's answer belongs to the last call before it."""

    def __init__(self) -> None:
        self._id: str | None = None

    def translated(self, message: Fields, index: int, entry: dict[str, Any]) -> dict[str, Any]:
        """The message as one of tools. `index`: its place. Notes errors."""
        if entry.get("role") == "function":
            return self._answer(entry)
        if FUNCTION_CALL not in entry:
            self._note_calls(entry.get("tool_calls"))
            return entry
        call = entry[FUNCTION_CALL]
        rest = {name: value for name, value in entry.items() if name != FUNCTION_CALL}
        if call is None:
            return rest
        if entry.get("role") != "assistant":
            message.add_error(FUNCTION_CALL, "is of messages of the assistant only")
        elif entry.get("tool_calls") not in (None, []):
            message.add_error(FUNCTION_CALL, "cannot be combined with tool_calls, its newer form")
        elif not isinstance(call, dict) or not all(isinstance(call.get(key), str) for key in ("name", "arguments")):
            message.add_mismatch(FUNCTION_CALL, 'a call such as {"name": ..., "arguments": "..."}')
        else:
            self._id = f"call{index:05d}"  # nine letters and digits, as some templates demand
            rest["tool_calls"] = [{"id": self._id, "type": "function", "function": call}]
        return rest

    def _answer(self, entry: dict[str, Any]) -> dict[str, Any]:
        """A function's answer as one of a tool. Without a call before it, it names none."""
        answer = {**entry, "role": "tool", "content": "" if entry.get("content") is None else entry["content"]}
        if entry.get("tool_call_id") is None:
            answer.pop("tool_call_id", None)
            if self._id is not None:
                answer["tool_call_id"] = self._id
        return answer

    def _note_calls(self, calls: object) -> None:
        """Notes the last call of a message that has calls of the newer form."""
        if isinstance(calls, list) and calls and isinstance(calls[-1], dict) and isinstance(calls[-1].get("id"), str):
            self._id = calls[-1]["id"]
