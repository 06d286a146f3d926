"""The names inside the objects of a request, and the fields of messages.

What no one here knows is named in the response like an unknown field, with the names of its objects before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from baton.services.router.openai.bounds import STREAM_FLAGS

OBJECTS: Mapping[str, frozenset[str]] = {
    "stream_options": frozenset({*STREAM_FLAGS, "include_obfuscation"}),
    "response_format": frozenset({"type", "json_schema", "schema", "structures", "triggers"}),
    "response_format.json_schema": frozenset({"name", "description", "schema", "strict"}),
    "tool_choice": frozenset({"type", "function"}),
    "tool_choice.function": frozenset({"name"}),
}
"""Path of an object -> its names. The objects that are not here refuse unknown names themselves.

`include_obfuscation` is harmless: it pads events against onlookers, and the text is the same.
"""

MESSAGE_FIELDS = frozenset(
    {
        "role", "content", "name", "refusal", "reasoning_content", "reasoning", "thinking", "tool_calls",
        "tool_call_id", "annotations",
    }
)  # fmt: skip
"""The fields of a message that a template may leave out: they say who speaks, or repeat what the content says."""


def unknown_inside(path: str, value: object) -> Iterator[str]:
    """The names in an object, and in those inside it, that are not in `OBJECTS`. null is the same as absent."""
    known = OBJECTS.get(path)
    if known is None or not isinstance(value, dict):
        return
    for name, inner in value.items():
        if inner is None:
            continue
        if name in known:
            yield from unknown_inside(f"{path}.{name}", inner)
        else:
            yield f"{path}.{name}"


def unknown_of_messages(messages: Iterable[Mapping[str, object]], reads: Callable[[str], bool]) -> list[str]:
    """The fields of messages that neither Baton nor the template reads, each once. Empty values ask for nothing."""
    names: dict[str, None] = {}
    for message in messages:
        for name in message.keys() - MESSAGE_FIELDS:
            if message[name] and not reads(name):
                names[f"messages.{name}"] = None
    return sorted(names)
