"""State of a conversation, and the commands that change it. Pure: no terminal, no network.

Owned by `baton.services.cli.chat.command`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

OWN_FIELDS = frozenset({"messages", "prompt", "model", "stream", "stream_options", "n"})
"""Request fields that a conversation sets itself."""

Content = str | list[dict[str, Any]]
"""Of a message: text, or parts if there are images."""

HELP = """\
/image FILE      show an image (PNG, JPEG, WebP) with the next question; again for more of them
/system TEXT     set the system prompt; without TEXT remove it
/model NAME      change the model; /models lists them
/set NAME VALUE  set a request field, such as /set temperature 0.2; without VALUE remove it
/params          show system prompt, model and fields
/retry           ask the last question again
/undo            forget the last question and its answer
/reset           forget the whole conversation
/raw             show server-sent events as they come, or text again
/save FILE       write the conversation as JSON
/exit            leave (also Ctrl-D). Ctrl-C stops an answer"""


class ChatHistory:
    """System prompt, messages and request fields of one conversation."""

    def __init__(self, model: str, system: str | None, fields: Mapping[str, Any]) -> None:
        self.model = model
        self.system = system
        self.fields = dict(fields)
        self.messages: list[dict[str, Any]] = []
        self.images: list[dict[str, Any]] = []
        self.raw = False

    def attach(self, image: dict[str, Any]) -> None:
        """Shows an image, a part of a message, with the next question."""
        self.images.append(image)

    def ask(self, content: Content) -> None:
        """Appends the user's message. Text takes the attached images with it."""
        if isinstance(content, str) and self.images:
            content = [*self.images, {"type": "text", "text": content}]
            self.images = []
        self.messages.append({"role": "user", "content": content})

    def answer(self, content: str, tool_calls: list[dict[str, Any]]) -> None:
        """Appends the assistant's message, complete or not. One without content is forgotten with its question."""
        if not content and not tool_calls:
            self.undo()
            return
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        self.messages.append(message | ({"tool_calls": tool_calls} if tool_calls else {}))

    def undo(self) -> Content | None:
        """Forgets the last question and what follows it. Returns the question; None if there is none."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                content: Content = message["content"]
                return content
        return None

    @property
    def is_text(self) -> bool:
        """True if the last message has no image."""
        return isinstance(self.messages[-1]["content"], str)

    def body(self) -> dict[str, Any]:
        """The body of the next request."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return {**self.fields, "model": self.model, "messages": [*system, *self.messages], **options}

    def completion_body(self) -> dict[str, Any]:
        """The same for a model without a chat template: it continues the last message."""
        body = self.body()
        return {**{name: value for name, value in body.items() if name != "messages"}, "prompt": self._last_text()}

    def _last_text(self) -> str:
        return str(self.messages[-1]["content"])

    def as_json(self) -> str:
        """The conversation as a request body would have it, for `/save`."""
        body = self.body()
        return json.dumps({name: body[name] for name in body if name not in ("stream", "stream_options")}, indent=2)


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """What a command asks of the terminal. `retry`: ask this again. `save`: write the conversation there.

    `image`: attach this file.
    """

    text: str = ""
    leave: bool = False
    retry: Content | None = None
    save: str | None = None
    image: str | None = None
    list_models: bool = False


@dataclass(slots=True)
class ChatCommands:
    """The commands of one conversation."""

    history: ChatHistory
    _by_name: dict[str, Callable[[str], CommandOutcome]] = field(init=False)

    def __post_init__(self) -> None:
        self._by_name = {
            "help": lambda _: CommandOutcome(HELP),
            "exit": lambda _: CommandOutcome(leave=True),
            "quit": lambda _: CommandOutcome(leave=True),
            "image": lambda file: CommandOutcome(image=file) if file else CommandOutcome("/image needs a file's name"),
            "models": lambda _: CommandOutcome(list_models=True),
            "system": self._system,
            "model": self._model,
            "set": self._set,
            "params": self._params,
            "retry": self._retry,
            "undo": self._undo,
            "reset": self._reset,
            "raw": self._raw,
            "save": lambda file: CommandOutcome(save=file) if file else CommandOutcome("/save needs a file's name"),
        }

    @property
    def names(self) -> list[str]:
        """All commands with their slash, for completion."""
        return [f"/{name}" for name in self._by_name]

    def run(self, line: str) -> CommandOutcome:
        """Runs a line such as `/set temperature 0.2`. An unknown command says so and changes nothing."""
        name, _, rest = line.removeprefix("/").partition(" ")
        command = self._by_name.get(name)
        if command is None:
            return CommandOutcome(f"there is no /{name}; /help lists the commands")
        return command(rest.strip())

    def _system(self, text: str) -> CommandOutcome:
        self.history.system = text or None
        return CommandOutcome("system prompt set" if text else "system prompt removed")

    def _model(self, name: str) -> CommandOutcome:
        if not name:
            return CommandOutcome(f"model {self.history.model}; /models lists them")
        self.history.model = name
        return CommandOutcome(f"model {name}")

    def _set(self, text: str) -> CommandOutcome:
        name, _, value = text.partition(" ")
        if not name:
            return CommandOutcome("/set needs a name, such as /set temperature 0.2")
        try:
            set_field(self.history.fields, name, value.strip())
        except ValueError as error:
            return CommandOutcome(str(error))
        return CommandOutcome(f"{name} {json.dumps(self.history.fields[name])}" if value else f"{name} removed")

    def _params(self, _: str) -> CommandOutcome:
        history = self.history
        lines = [f"model {history.model}", f"system {history.system or '(none)'}"]
        return CommandOutcome("\n".join(lines + [f"{name} {json.dumps(v)}" for name, v in history.fields.items()]))

    def _retry(self, _: str) -> CommandOutcome:
        asked = self.history.undo()
        return CommandOutcome("there is nothing to ask again") if asked is None else CommandOutcome(retry=asked)

    def _undo(self, _: str) -> CommandOutcome:
        return CommandOutcome("nothing to forget" if self.history.undo() is None else "forgotten")

    def _reset(self, _: str) -> CommandOutcome:
        self.history.messages.clear()
        self.history.images.clear()
        return CommandOutcome("the conversation starts anew")

    def _raw(self, _: str) -> CommandOutcome:
        self.history.raw = not self.history.raw
        return CommandOutcome("events as they come" if self.history.raw else "text")


def set_field(fields: dict[str, Any], name: str, value: str) -> None:
    """Sets a request field to a JSON value, or to the text if it is none; "" removes it.

    Raises `ValueError` for a field that the conversation sets itself. The router refuses those that it does not know.
    """
    if name in OWN_FIELDS:
        raise ValueError(f"{name} is set by the conversation itself; see /help")
    if not value:
        fields.pop(name, None)
        return
    try:
        fields[name] = json.loads(value)
    except ValueError:
        fields[name] = value
