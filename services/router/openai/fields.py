"""Reads JSON objects of a request and collects all errors instead of stopping at the first.

Used by `parameters`, `prompts` and `validation`. A field that is absent or null has its default; a wrong one is noted
and counts as absent. Nothing is coerced: "1" is not a number, true is not an integer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, TypeGuard

import msgspec

from baton.domain.errors import InvalidRequest
from baton.services.router.openai.bounds import Scalar

MAX_ERRORS = 10
MAX_INPUT_CHARS = 200
MAX_DEPTH = 64
"""Limit of nesting. A template may recurse as deep, and Python limits recursion."""

_TOO_DEEP = f"the body's JSON is nested too deeply: more than {MAX_DEPTH} levels"
_decoder = msgspec.json.Decoder()


def parse_object(body: bytes) -> dict[str, object]:
    """Parses a JSON object. Raises `InvalidRequest` if it is malformed, nested too deeply, or not an object."""
    try:
        value = _decoder.decode(body)
    except RecursionError:
        raise InvalidRequest(_TOO_DEEP) from None
    except ValueError as error:  # msgspec errors, bad UTF-8, huge numbers
        raise InvalidRequest(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {short_repr(value)}")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and not _is_shallow(value):
        raise InvalidRequest(_TOO_DEEP)
    return value


def _is_shallow(value: object) -> bool:
    """True if `value` has at most `MAX_DEPTH` levels; walks level by level."""
    level = [value]
    for _ in range(MAX_DEPTH):
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [each for part in parts for each in part if isinstance(each, dict | list)]
        if not level:
            return True
    return False


class FieldErrors:
    """The errors of one request, at most `MAX_ERRORS`; the first one names the `param`."""

    def __init__(self) -> None:
        self._messages: list[str] = []
        self._param: str | None = None
        self._num_more = 0
        self._names: dict[str, str] = {}

    def rename(self, names: Mapping[str, str]) -> None:
        """From here on errors of these fields, and of what is in them, have the names that the client has sent."""
        self._names.update(names)

    def name_of(self, param: str) -> str:
        """The name of a field, or of a place in one, as the client has sent it."""
        for name in sorted(self._names, key=len, reverse=True):  # the innermost that was renamed
            if param == name or (param.startswith(name) and param[len(name)] in ".["):
                return self._names[name] + param[len(name) :]
        return param

    def add_error(self, param: str, message: str) -> None:
        """Adds an error of field `param`."""
        param = self.name_of(param)
        if self._param is None:
            self._param = param
        if len(self._messages) < MAX_ERRORS:
            self._messages.append(f"{param}: {message}")
        else:
            self._num_more += 1

    def raise_if_any(self) -> None:
        """Raises `InvalidRequest` with all errors."""
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
        """The valid values of the fields in `scalars`; notes the invalid ones, in the order of `scalars`."""
        found, invalid = {}, set[str]()
        for name, value in self.values.items():  # a body has few of the fields that there are
            scalar = scalars.get(name)
            if scalar is None or value is None:
                continue
            if value in scalar:
                found[name] = value
            else:
                invalid.add(name)
        if invalid:
            for name in [name for name in scalars if name in invalid]:
                self.add_mismatch(name, str(scalars[name]))
        return found

    def add_error(self, name: str, message: str) -> None:
        """Adds an error of the field."""
        self.errors.add_error(self._path + name, message)

    def path_of(self, name: str) -> str:
        """The place of the field in the body."""
        return self._path + name

    def inside(self, name: str, values: Mapping[str, object]) -> Fields:
        """The fields of an object in the field `name`, such as `content[2]`."""
        return Fields(values, self.errors, f"{self._path}{name}.")

    def add_mismatch(self, name: str, expectation: str) -> None:
        """Adds the error that the field is not as expected."""
        self.add_error(name, f"must be {expectation}, not {short_repr(self.values.get(name))}")

    def mapping(self, name: str) -> Fields | None:
        """A JSON object; None if absent or invalid."""
        value = self.values.get(name)
        if isinstance(value, dict):
            return Fields(value, self.errors, f"{self._path}{name}.")
        if value is not None:
            self.add_mismatch(name, "an object")
        return None


def short_repr(value: object) -> str:
    """A value for an error message, at most `MAX_INPUT_CHARS` characters."""
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_INPUT_CHARS else text[: MAX_INPUT_CHARS - 1] + "…"


def is_integer(value: object) -> TypeGuard[int]:
    """True for an integer; JSON true is not one."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """True for an integer or a fraction; JSON true is neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short_repr() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = MAX_INPUT_CHARS
    return short


_SHORT = _short_repr()
