"""Renders chat messages into one prompt string with the model's template.

`TextModel` owns the only instance. A template is foreign code, so its environment is sandboxed and immutable. It offers
the helpers that templates on the Hugging Face hub expect. Knows no token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.domain.errors import InvalidRequest

Message = Mapping[str, object]
"""One message for a template: plain JSON values, `content` a string, or a list of parts if it has images, or absent."""

MAX_ERROR_CHARS = 200
_WORD = re.compile(r"\w+")

END_OF_FINAL_MESSAGE = "\ue000the end of the final message\ue001"
"""Follows the message that is continued while it is rendered; the prompt is cut there. Private characters."""

RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
    | {"strftime_now", "raise_exception"}
)
"""Variables that clients cannot set; nor can they set special tokens."""

# Exceptions of a template that expects other messages. All of them are the caller's mistake.
_RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """All that a prompt depends on beside messages and template. The same options give the same prompt at any time.

    `created_s`: Unix time of the call; a template that asks for the date gets this one, in UTC. `variables`: of the
    client. `continue_final_message`: the prompt ends within the last message. `tools`: that the model may call.
    `documents`: to answer from.
    """

    created_s: int = 0
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, object] = field(default_factory=dict)
    tools: Sequence[Mapping[str, object]] = ()
    documents: Sequence[Mapping[str, object]] = ()


_PROBE_TEXT = "\ue000a message\ue001"
_PROBE: Message = {"role": "user", "content": _PROBE_TEXT}


class _GenerationBlocks(Extension):
    """Accepts `{% generation %}...{% endgeneration %}` (marks an answer for training) as plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. Thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles `source`. Raises `jinja2.TemplateSyntaxError`. `special_tokens`: e.g. `bos_token` -> `<s>`."""
        environment = _environment()
        self.source = source
        self._template = environment.from_string(source)
        self._template.globals = dict(self._template.globals)  # a chain of mappings, copied for every prompt
        self._special_tokens = dict(special_tokens)
        self._read = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        self._words = frozenset(_WORD.findall(source))
        self._wants_parts = False
        self._wants_parts = not self._shows(_PROBE) and self._shows(_as_parts(_PROBE))

    def may_set(self, name: str) -> bool:
        """True if clients may set this variable."""
        return name not in RESERVED_VARIABLES and name not in self._special_tokens

    def reads(self, name: str) -> bool:
        """True if the template reads this variable."""
        return name in self._read

    def mentions(self, name: str) -> bool:
        """True if the template has this word: it may read a field of messages with this name."""
        return name in self._words

    def render(self, messages: Sequence[Message], options: RenderOptions) -> str:
        """Returns the prompt. Raises `InvalidRequest` when the template fails, or changes a message to continue."""
        if not options.continue_final_message:
            return self._render(messages, options)
        *earlier, last = messages
        marked = {**last, "content": f"{last['content']}{END_OF_FINAL_MESSAGE}"}
        text, mark, _ = self._render([*earlier, marked], options).rpartition(END_OF_FINAL_MESSAGE)
        if not mark:
            raise InvalidRequest("the chat template does not keep the final message as it is", param="messages")
        return text

    def _shows(self, message: Message) -> bool:
        """True if the text of a user's message comes into the prompt, and nothing of its JSON."""
        try:
            text = self._render([message], RenderOptions())
        except InvalidRequest:
            return False
        return _PROBE_TEXT in text and "'text'" not in text

    def _render(self, messages: Sequence[Message], options: RenderOptions) -> str:
        created = datetime.fromtimestamp(options.created_s, UTC)
        try:
            return self._template.render(
                {
                    **options.variables,
                    "messages": list(map(_as_parts, messages)) if self._wants_parts else list(messages),
                    "tools": list(options.tools) or None,
                    "documents": list(options.documents) or None,
                    "add_generation_prompt": options.add_generation_prompt,
                    "strftime_now": created.strftime,
                    **self._special_tokens,
                }
            )
        except _RENDER_ERRORS as error:
            reason = str(error)[:MAX_ERROR_CHARS]
            raise InvalidRequest(f"the chat template refuses these messages: {reason}", param="messages") from error


def _as_parts(message: Message) -> Message:
    """The message with its text as a part: some templates of models with images read nothing else."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encodes JSON. Jinja's own filter escapes HTML, which models are not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
