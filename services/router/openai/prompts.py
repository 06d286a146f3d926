"""Reads the messages of a chat and the prompts of a completion. Called by `validation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec

from baton.services.router.openai.bounds import (
    MAX_CONTENT_PARTS,
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_TEMPLATE_VARIABLE_BYTES,
    MAX_TEMPLATE_VARIABLES,
    MAX_TOOL_CALLS,
    ROLES,
    VERBOSITIES,
)
from baton.services.router.openai.field_table.nested import unknown_of_contents, unknown_of_messages
from baton.services.router.openai.fields import Fields, is_integer, short_repr
from baton.services.router.openai.images.parts import ImageParts
from baton.services.router.openai.reasoning.reader import read_effort
from baton.services.router.openai.tools.functions import OlderCalls
from baton.services.router.text.chat_template import Message, RenderOptions
from baton.services.router.text.text_model import TextModel

IMAGE = "image_url"
"""The type of an image part."""

REASONING_NAMES = ("reasoning_content", "reasoning")
"""Of an assistant's reasoning; the first one wins."""

NAMES_IN_MESSAGES = ("name", "tool_call_id")
"""Of who speaks, and of the call that a tool answers."""

PromptInput = str | tuple[int, ...]
"""Text, or token ids."""


def read_messages(fields: Fields, images: ImageParts) -> list[Message]:
    """The messages with `content` as one string, or as parts if it has images. Other fields are the template's."""
    value = fields.values.get("messages")
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        fields.add_mismatch("messages", f"a list of 1 to {MAX_MESSAGES} messages")
        return []
    messages, older = list[Message](), OlderCalls()
    for index, entry in enumerate(value):
        messages.append(_read_message(fields, index, entry, images, older))
    return messages


@dataclass(frozen=True, slots=True)
class ChatParams:
    """Messages, and how to render them. `unread`: their names, and variables, that the template does not read."""

    messages: list[Message]
    options: RenderOptions
    unread: tuple[str, ...] = ()

    @property
    def continued(self) -> str | None:
        """The text of the message that the answer continues; None for a new message."""
        return str(self.messages[-1]["content"]) if self.options.continue_final_message else None

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatParams:
        """The same chat of a model that may call `tools`."""
        return replace(self, options=replace(self.options, tools=tuple(tools)))


def read_chat(
    fields: Fields, scalars: Mapping[str, Any], text: TextModel, created_s: int, images: ImageParts
) -> ChatParams:
    """Reads the messages, their images, and the fields of the template. `created_s`: time of the call."""
    messages, continues = read_messages(fields, images), scalars.get("continue_final_message", False)
    if continues and scalars.get("add_generation_prompt"):
        fields.add_error("continue_final_message", "contradicts add_generation_prompt: true")
    if continues and messages and not _can_continue(messages[-1]):
        fields.add_error("continue_final_message", "needs a final message of the assistant, with content")
    variables = _read_variables(fields, text) if "chat_template_kwargs" in fields.values else {}
    names: dict[str, str] = {}
    for name, value in read_effort(fields, text).items():
        if variables.setdefault(name, value) != value:
            fields.add_error("reasoning_effort", f"contradicts chat_template_kwargs.{name}")
    verbosity = _read_verbosity(fields, text)
    if verbosity is not None and variables.setdefault("verbosity", verbosity) != verbosity:
        fields.add_error("verbosity", "contradicts chat_template_kwargs.verbosity")
    if "enable_thinking" in scalars:
        if variables.setdefault("enable_thinking", scalars["enable_thinking"]) != scalars["enable_thinking"]:
            fields.add_error("enable_thinking", "contradicts chat_template_kwargs.enable_thinking")
        names["enable_thinking"] = "enable_thinking"
    options = RenderOptions(
        created_s,
        scalars.get("add_generation_prompt", not continues),
        bool(continues),
        variables,
        documents=_read_documents(fields, text),
    )
    unread = unknown_of_messages(messages, text.mentions)
    unread += unknown_of_contents(fields.values.get("messages"), text.mentions)
    for name in variables:
        if not text.reads(name):
            unread.append(names.get(name, f"chat_template_kwargs.{name}"))
    return ChatParams(messages, options, tuple(unread))


def _can_continue(message: Message) -> bool:
    return message.get("role") == "assistant" and bool(message.get("content"))


def _read_variables(fields: Fields, text: TextModel) -> dict[str, object]:
    given = fields.mapping("chat_template_kwargs")
    if given is None:
        return {}
    if len(given.values) > MAX_TEMPLATE_VARIABLES:
        fields.add_error("chat_template_kwargs", f"must have at most {MAX_TEMPLATE_VARIABLES} entries")
    elif len(msgspec.json.encode(given.values)) > MAX_TEMPLATE_VARIABLE_BYTES:
        fields.add_error("chat_template_kwargs", f"must have at most {MAX_TEMPLATE_VARIABLE_BYTES} bytes")
    else:
        for name in given.values:
            if not text.may_set(name):
                fields.add_error("chat_template_kwargs", f"cannot set {short_repr(name)}")
        return dict(given.values)
    return {}


def _read_verbosity(fields: Fields, text: TextModel) -> str | None:
    """What the template gets; None where it reads none and nothing is asked for."""
    value = fields.values.get("verbosity")
    if value is None:
        return None
    if value not in VERBOSITIES:
        fields.add_mismatch("verbosity", f"one of {', '.join(VERBOSITIES)}")
    elif text.reads("verbosity"):
        return str(value)
    elif value != "medium":
        fields.add_error("verbosity", "is not supported by this model: its chat template does not read it")
    return None


def _read_documents(fields: Fields, text: TextModel) -> list[Mapping[str, Any]]:
    """The documents; refused where the template would leave them out."""
    value = fields.values.get("documents")
    if value is None or value == []:
        return []
    if not isinstance(value, list) or len(value) > MAX_DOCUMENTS or not all(isinstance(each, dict) for each in value):
        fields.add_mismatch("documents", f"a list of at most {MAX_DOCUMENTS} objects")
        return []
    if not text.reads("documents"):
        fields.add_error("documents", "are not supported by this model: its chat template does not read them")
    return value


def _read_message(fields: Fields, index: int, entry: object, images: ImageParts, older: OlderCalls) -> Message:
    if not isinstance(entry, dict):
        fields.add_error(f"messages[{index}]", f"must be an object, not {short_repr(entry)}")
        return {}
    message = Fields(entry, fields.errors, f"messages[{index}].")
    if entry.get("role") not in ROLES:
        message.add_mismatch("role", f"one of {', '.join(ROLES)}")
    for name in NAMES_IN_MESSAGES:
        if name in entry and not isinstance(entry[name], str | None):
            message.add_mismatch(name, "a string")
    translated = older.translated(message, index, entry)
    has_none = "tool_calls" in translated and translated["tool_calls"] in (None, [])
    if translated is not entry or has_none:  # templates ask whether the name is there
        entry = {name: value for name, value in translated.items() if name != "tool_calls" or not has_none}
        message = Fields(entry, fields.errors, f"messages[{index}].")
    if entry.get("tool_calls") is not None:
        _check_tool_calls(message)
        entry = {**entry, "tool_calls": _with_objects(entry["tool_calls"])}
    if entry.get("role") == "assistant":
        entry = _with_reasoning(message, entry)
    if isinstance(entry.get("content"), str):
        images.check_text(message, "content", entry["content"])
        return entry
    if images.served and has_images(entry.get("content")):
        return {**entry, "content": _read_parts(message, index, images)}
    content = _read_content(message, images)
    images.check_text(message, "content", content)
    return {**entry, "content": content}


def has_images(content: object) -> bool:
    """True for the content of a message with images."""
    return isinstance(content, list) and any(isinstance(part, dict) and part.get("type") == IMAGE for part in content)


def _read_parts(message: Fields, index: int, images: ImageParts) -> list[dict[str, str]]:
    """The parts of a message with images, as chat templates have them."""
    content, parts = cast("list[object]", message.values["content"]), []
    if len(content) > MAX_CONTENT_PARTS:
        message.add_error("content", f"must have at most {MAX_CONTENT_PARTS} parts")
        return []
    for at, part in enumerate(content):
        name = f"content[{at}]"
        if isinstance(part, dict) and part.get("type") == IMAGE:
            images.read(message.inside(name, part), message.values.get("role"), (index, at))
            parts.append({"type": "image"})
        elif isinstance(text := _text_of(part, ("text",)), str):
            images.check_text(message, name, text)
            parts.append({"type": "text", "text": text})
        else:
            message.add_error(name, f"must be a part of type text or {IMAGE}, not {short_repr(part)}")
    return parts


def _with_reasoning(message: Fields, entry: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message with its reasoning under both names: templates read one of them."""
    given = [name for name in REASONING_NAMES if entry.get(name) is not None]
    for name in given:
        if not isinstance(entry[name], str):
            message.add_mismatch(name, "a string")
            return entry
    if not given:
        return entry
    entry = {**entry, **dict.fromkeys(REASONING_NAMES, entry[given[0]])}
    if entry.get("tool_calls") and not entry.get("content"):  # gpt-oss refuses both
        entry.setdefault("thinking", entry[given[0]])
    return entry


def _with_objects(calls: object) -> object:
    """Tool calls whose arguments are objects, where they are text of one: templates print them as JSON."""
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        return calls
    return [{**call, "function": {**call["function"], "arguments": _parsed(call)}} for call in calls]


def _parsed(call: dict[str, Any]) -> object:
    arguments = call["function"]["arguments"]
    try:
        parsed = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _check_tool_calls(message: Fields) -> None:
    """Tool calls are passed on unchanged, but a template may rely on their shape."""
    calls = message.values.get("tool_calls")
    if not isinstance(calls, list) or len(calls) > MAX_TOOL_CALLS or not all(_is_call(call) for call in calls):
        shape = '{"function": {"name": ..., "arguments": ...}}'
        message.add_mismatch("tool_calls", f"a list of at most {MAX_TOOL_CALLS} calls such as {shape}")


def _is_call(value: object) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("arguments"), str | dict)


def _read_content(message: Fields, images: ImageParts) -> str | None:
    """Joins text parts with line breaks. Only an assistant's message may have no content.

    Its text then is its `refusal`; None if it only calls tools.
    """
    content, is_assistant = message.values.get("content"), message.values.get("role") == "assistant"
    if content is None and is_assistant:
        refusal = message.values.get("refusal")
        if refusal is not None and not isinstance(refusal, str):
            message.add_mismatch("refusal", "a string")
            return None
        return refusal or (None if message.values.get("tool_calls") is not None else "")
    if not isinstance(content, list) or len(content) > MAX_CONTENT_PARTS:
        message.add_mismatch("content", f"a string or a list of at most {MAX_CONTENT_PARTS} text parts")
        return None
    kinds = ("text", "refusal") if is_assistant else ("text",)
    texts = [_text_of(part, kinds) for part in content]
    parts = [text for text in texts if isinstance(text, str)]
    if len(parts) < len(texts):
        kinds_read = "text and image_url parts" if images.served else '{"type": "text", "text": ...} parts'
        reason = f" (its images are not served: {images.reason})" if images.reason else ""
        message.add_mismatch("content", f"made of {kinds_read}; this model reads nothing else{reason}")
    return "\n".join(parts)


def _text_of(part: object, kinds: tuple[str, ...]) -> object:
    """The text of a part of one of these kinds, which is also the name of its text; None for any other part."""
    kind = part.get("type") if isinstance(part, dict) else None
    return part.get(kind) if isinstance(part, dict) and isinstance(kind, str) and kind in kinds else None


def read_prompts(fields: Fields, vocab_size: int) -> list[PromptInput]:
    """One or several prompts; a list of integers is one prompt of token ids."""
    value = fields.values.get("prompt")
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and is_integer(value[0]):
        value = [value]
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PROMPTS:
        fields.add_mismatch("prompt", f"a string, token ids, or a list of 1 to {MAX_PROMPTS} of either")
        return []
    if all(isinstance(prompt, str) for prompt in value):
        return list(value)
    if all(isinstance(prompt, list) for prompt in value):
        return [read_tokens(fields, prompt, vocab_size) for prompt in value]
    fields.add_mismatch("prompt", "all strings or all lists of token ids")
    return []


def read_tokens(fields: Fields, prompt: list[object], vocab_size: int, name: str = "prompt") -> tuple[int, ...]:
    """A list of token ids in the field `name`."""
    if not set(map(type, prompt)) <= {int}:  # no Python call a token: prompts may be long
        wrong = next(token for token in prompt if not is_integer(token))
        fields.add_error(name, f"a token id must be an integer, not {short_repr(wrong)}")
        return ()
    tokens: tuple[Any, ...] = tuple(prompt)  # integers, each
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        outside = next(token for token in tokens if not 0 <= token < vocab_size)
        fields.add_error(name, f"token id {short_repr(outside)} is out of the vocabulary [0, {vocab_size})")
    return tokens
