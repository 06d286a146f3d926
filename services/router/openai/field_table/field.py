"""One row of the table of request fields. Pure values."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.services.router.openai.bounds import Scalar

Schema = dict[str, Any]
"""A JSON Schema 2020-12, as in OpenAPI 3.1."""


class FieldEndpoint(enum.Enum):
    """The endpoints that generate. Values are their paths."""

    __hash__ = object.__hash__  # members are single objects; enum's own is a Python call

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


BOTH = frozenset(FieldEndpoint)
CHAT = frozenset({FieldEndpoint.CHAT})
COMPLETION = frozenset({FieldEndpoint.COMPLETION})


class FieldKind(enum.Enum):
    """What happens to a value. HONOURED: it has its effect. ALIAS: it is read as the field `target`.

    REFUSED: a 400 names the field, unless the value is neutral. HARMLESS: its type is checked, and it has no effect.
    """

    HONOURED = "honoured"
    ALIAS = "alias"
    REFUSED = "refused"
    HARMLESS = "harmless"


class FieldOrigin(enum.Enum):
    """The interface that a name comes from."""

    OPENAI = "OpenAI"
    VLLM = "vLLM"
    SGLANG = "SGLang"
    LLAMA_SERVER = "llama-server"
    BATON = "Baton"


@dataclass(frozen=True, slots=True)
class Shape:
    """Accepted values that are no scalar: words for people, and a JSON Schema, given the size of the vocabulary.

    `accepts` None: another module checks the values.
    """

    text: str
    schema: Callable[[int], Schema]
    accepts: Callable[[object], bool] | None = None

    def __contains__(self, value: object) -> bool:
        return self.accepts is None or self.accepts(value)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class RequestField:
    """One name at its endpoints.

    `default` is the value of an absent field, and null is the same as absent; `default_note` says it where it is no
    constant. `neutral` are the accepted values of a REFUSED field: they ask for nothing.
    """

    name: str
    endpoints: frozenset[FieldEndpoint]
    kind: FieldKind
    origin: FieldOrigin
    meaning: str
    shape: Scalar | Shape | None = None
    default: object = None
    default_note: str = ""
    neutral: tuple[object, ...] = ()
    target: str = ""
    required: bool = False

    def is_neutral(self, value: object) -> bool:
        """True if a REFUSED field may have this value. JSON true is not 1."""
        return any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in self.neutral
        )
