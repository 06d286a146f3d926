"""Renders chat messages into one prompt string with the model's template.

`TextModel` owns the only instance. A template is foreign code, so its environment is sandboxed and immutable. It offers
the helpers that templates on the Hugging Face hub expect. Knows no token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.domain.errors import InvalidRequest

Message = Mapping[str, object]
"""One message for a template: plain JSON values, `content` a string or absent."""

MAX_ERROR_CHARS = 200

# Exceptions of a template that expects other messages. All of them are the caller's mistake.
_RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


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
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """Returns the prompt up to the assistant's turn. Raises `InvalidRequest` when the template fails."""
        try:
            return self._template.render(
                messages=list(messages), tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except _RENDER_ERRORS as error:
            reason = str(error)[:MAX_ERROR_CHARS]
            raise InvalidRequest(f"the chat template refuses these messages: {reason}", param="messages") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
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


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
