"""Reads a JSON object field by field, collecting what is wrong instead of stopping at the first mistake.

`parameters` and `validation` use it. A field that is absent or null has its default; a wrong one is noted and reads as
its default, so that one answer can name several problems. Nothing is coerced: "1" is no number, true is no integer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TypeGuard

from baton.domain.errors import InvalidRequest
from services.router.api.bounds import Integers, Numbers

MAX_PROBLEMS = 10
MAX_INPUT_CHARS = 200


class Problems:
    """What is wrong with a request, bounded; the first one names the `param`."""

    def __init__(self) -> None:
        self._messages: list[str] = []
        self._param: str | None = None
        self._num_more = 0

    def note(self, param: str, message: str) -> None:
        """Adds a problem of field `param`."""
        if self._param is None:
            self._param = param
        if len(self._messages) < MAX_PROBLEMS:
            self._messages.append(f"{param}: {message}")
        else:
            self._num_more += 1

    def raise_if_any(self) -> None:
        """Raises `InvalidRequest` with all that was noted."""
        if self._messages:
            more = f"; and {self._num_more} more" if self._num_more else ""
            raise InvalidRequest("; ".join(self._messages) + more, param=self._param)


class Fields:
    """One JSON object being read. `at` is its place in the body, e.g. `messages[2].`."""

    def __init__(self, values: Mapping[str, object], problems: Problems, at: str = "") -> None:
        self._values = values
        self._at = at
        self.problems = problems

    def raw(self, name: str) -> object:
        """The value as it came; None when absent or null."""
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether it is there and not null."""
        return self._values.get(name) is not None

    def note(self, name: str, message: str) -> None:
        """Adds a problem of the field."""
        self.problems.note(self._at + name, message)

    def expected(self, name: str, expectation: str) -> None:
        """Adds the problem that the field is something else."""
        self.note(name, f"must be {expectation}, not {shown(self._values.get(name))}")

    def number(self, name: str, default: float, numbers: Numbers) -> float:
        """One of `numbers`."""
        value = self._values.get(name)
        if value is None:
            return default
        if is_number(value) and value in numbers:
            return float(value)
        self.expected(name, str(numbers))
        return default

    def integer(self, name: str, integers: Integers) -> int | None:
        """One of `integers`; None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if is_integer(value) and value in integers:
            return value
        self.expected(name, str(integers))
        return None

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        self.expected(name, "a boolean")
        return default

    def string(self, name: str) -> str | None:
        """A string that is not empty; None when absent."""
        value = self._values.get(name)
        if value is None or (isinstance(value, str) and value):
            return value
        self.expected(name, "a non-empty string")
        return None

    def mapping(self, name: str) -> Fields | None:
        """A JSON object; None when absent."""
        value = self._values.get(name)
        if isinstance(value, dict):
            return Fields(value, self.problems, f"{self._at}{name}.")
        if value is not None:
            self.expected(name, "an object")
        return None


def shown(value: object) -> str:
    """A value as an error message shows it: never more than `MAX_INPUT_CHARS`."""
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_INPUT_CHARS else text[: MAX_INPUT_CHARS - 1] + "…"


def is_integer(value: object) -> TypeGuard[int]:
    """An integer; in JSON, true is not one."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """An integer or a fraction; in JSON, true is neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short_repr() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = MAX_INPUT_CHARS
    return short


_SHORT = _short_repr()
