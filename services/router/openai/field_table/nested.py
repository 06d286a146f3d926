"""The names inside the objects of a request, and the fields of messages, of their parts and of their tool calls.

What no one here knows is named in the response like an unknown field, with the names of its objects before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from baton.services.router.openai.bounds import STREAM_FLAGS

OBJECTS: Mapping[str, frozenset[str]] = {
    "stream_options": frozenset({*STREAM_FLAGS, "include_obfuscation"}),
    "response_format": frozenset({"type", "json_schema", "schema", "structures", "triggers"}),
    "response_format.json_schema": frozenset({"name", "description", "schema", "strict"}),
    "response_format.structures": frozenset({"begin", "schema", "end"}),
    "tool_choice": frozenset({"type", "function"}),
    "tool_choice.function": frozenset({"name"}),
    "function_call": frozenset({"name"}),
}
"""Path of an object, or of the objects of a list -> its names. Those that are not here refuse unknown names themselves.

`include_obfuscation` is harmless: it pads events against onlookers, and the text is the same.
"""

MESSAGE_FIELDS = frozenset(
    {
        "role", "content", "name", "refusal", "reasoning_content", "reasoning", "thinking", "tool_calls",
        "tool_call_id", "annotations",
    }
)  # fmt: skip
"""The fields of a message that a template may leave out: they say who speaks, or repeat what the content says."""


PARTS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type", "text"}),
    "refusal": frozenset({"type", "refusal"}),
    "image_url": frozenset({"type", "image_url"}),
}
"""Type of a part of a message's content -> its names. Parts of other types are refused."""

IMAGE_NAMES = frozenset({"url", "detail"})
CALL_NAMES = frozenset({"id", "type", "function", "index"})
FUNCTION_NAMES = frozenset({"name", "arguments"})
"""Of the objects inside parts and tool calls. `index` comes with clients that send back what was streamed."""


def unknown_inside(path: str, value: object) -> Iterator[str]:
    """The names in an object, and in those inside it, that are not in `OBJECTS`. null is the same as absent.

    A list stands for its objects: the same name in several of them is given once.
    """
    known = OBJECTS.get(path)
    if known is not None and isinstance(value, list):
        yield from dict.fromkeys(name for each in value for name in unknown_inside(path, each))
        return
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


def unknown_of_contents(messages: object, reads: Callable[[str], bool]) -> list[str]:
    """The names that nobody reads inside contents and tool calls of messages as a client sent them, each once.

    Of a part a template gets the text, or the place of an image, and nothing else. It gets tool calls whole. Wrong
    values are ignored: others refuse them. Empty ones ask for nothing.
    """
    names: set[str] = set()
    for message in _objects_of(messages):
        content = message.get("content")
        for part in _objects_of(content) if isinstance(content, list) else ():
            kind = part.get("type")
            if isinstance(kind, str) and kind in PARTS:
                names.update(_others(part, PARTS[kind], "messages.content"))
                names.update(_others(part.get("image_url"), IMAGE_NAMES, "messages.content.image_url"))
        for call in _objects_of(message["tool_calls"]) if "tool_calls" in message else ():
            names.update(_others(call, CALL_NAMES, "messages.tool_calls", reads))
            names.update(_others(call.get("function"), FUNCTION_NAMES, "messages.tool_calls.function", reads))
        if "function_call" in message:
            names.update(_others(message["function_call"], FUNCTION_NAMES, "messages.function_call", reads))
    return sorted(names)


def _objects_of(value: object) -> list[dict[str, object]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _others(
    value: object, known: frozenset[str], path: str, reads: Callable[[str], bool] | None = None
) -> Iterator[str]:
    """The names in an object, with its path, that are neither known nor read, and whose values are not empty."""
    if not isinstance(value, dict):
        return
    for name in value.keys() - known:
        if value[name] and not (reads is not None and reads(name)):
            yield f"{path}.{name}"
