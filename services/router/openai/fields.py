"""Reads JSON objects of a request, and collects every error instead of stopping at the first.

`parameters`, `prompts` and `validation` use it. A field that is absent or null has its default; a wrong one is noted
and counts as absent. Nothing is coerced: "1" is no number, true is no integer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, TypeGuard

import msgspec

from baton.domain.errors import InvalidRequest
from services.router.openai.bounds import Scalar

MAX_ERRORS = 10
MAX_INPUT_CHARS = 200
MAX_DEPTH = 64
"""Objects and lists within each other. A template may walk them with as many calls, and Python allows not many more."""

_TOO_DEEP = f"the body's JSON is nested too deeply: more than {MAX_DEPTH} levels"
_decoder = msgspec.json.Decoder()


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object in `body`. Raises `InvalidRequest`: malformed, nested too deeply, or no object."""
    try:
        value = _decoder.decode(body)
    except RecursionError:
        raise InvalidRequest(_TOO_DEEP) from None
    except ValueError as error:  # msgspec's own errors, bad UTF-8, numbers without end
        raise InvalidRequest(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {short_repr(value)}")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and not _is_shallow(value):
        raise InvalidRequest(_TOO_DEEP)
    return value


def _is_shallow(value: object) -> bool:
    """Whether `value` has at most `MAX_DEPTH` levels, walked level by level."""
    level = [value]
    for _ in range(MAX_DEPTH):
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [each for part in parts for each in part if isinstance(each, dict | list)]
        if not level:
            return True
    return False


class FieldErrors:
    """What is wrong with a request, bounded; the first one names the `param`."""

    def __init__(self) -> None:
        self._messages: list[str] = []
        self._param: str | None = None
        self._num_more = 0

    def add_error(self, param: str, message: str) -> None:
        """Adds a problem of field `param`."""
        if self._param is None:
            self._param = param
        if len(self._messages) < MAX_ERRORS:
            self._messages.append(f"{param}: {message}")
        else:
            self._num_more += 1

    def raise_if_any(self) -> None:
        """Raises `InvalidRequest` with all that was noted."""
        if self._messages:
            more = f"; and {self._num_more} more" if self._num_more else ""
            raise InvalidRequest("; ".join(self._messages) + more, param=self._param)


class Fields:
    """One JSON object of a request. `path` is its place in the body, e.g. `messages[2].`."""

    def __init__(self, values: Mapping[str, object], errors: FieldErrors, path: str = "") -> None:
        self.values = values
        self.errors = errors
        self._path = path

    def read(self, scalars: Mapping[str, Scalar]) -> dict[str, Any]:
        """Values of the fields in `scalars` that are there and right; a wrong one is noted."""
        found = {}
        for name, scalar in scalars.items():
            value = self.values.get(name)
            if value is None:
                continue
            if value in scalar:
                found[name] = value
            else:
                self.add_mismatch(name, str(scalar))
        return found

    def add_error(self, name: str, message: str) -> None:
        """Notes an error of the field."""
        self.errors.add_error(self._path + name, message)

    def add_mismatch(self, name: str, expectation: str) -> None:
        """Notes that the field is something else than expected."""
        self.add_error(name, f"must be {expectation}, not {short_repr(self.values.get(name))}")

    def mapping(self, name: str) -> Fields | None:
        """A JSON object; None when absent or wrong."""
        value = self.values.get(name)
        if isinstance(value, dict):
            return Fields(value, self.errors, f"{self._path}{name}.")
        if value is not None:
            self.add_mismatch(name, "an object")
        return None


def short_repr(value: object) -> str:
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
