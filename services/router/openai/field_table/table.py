"""All rows by endpoint, and the check of a body's names. Called by `validation` before any value is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from baton.services.router.openai.bounds import Scalar
from baton.services.router.openai.field_table.field import BOTH, FieldEndpoint, FieldKind, RequestField
from baton.services.router.openai.field_table.harmless import HARMLESS
from baton.services.router.openai.field_table.honoured import HONOURED
from baton.services.router.openai.field_table.nested import OBJECTS, unknown_inside
from baton.services.router.openai.field_table.refused import REFUSED
from baton.services.router.openai.fields import FieldErrors, Fields

ALL_FIELDS = HONOURED + REFUSED + HARMLESS

_HONOURED, _REFUSED, _HARMLESS = FieldKind.HONOURED, FieldKind.REFUSED, FieldKind.HARMLESS

NOTHING: tuple[object, ...] = ("", [], {})
"""Values that ask for nothing where a field has no effect, beside its default and those in `OFF`."""

OFF: Mapping[str, tuple[object, ...]] = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "return_prompt_token_ids": (False,),
    "parallel_tool_calls": (False,),
    "add_generation_prompt": (False,),
    "enable_thinking": (False,),
    "chat_template_kwargs": ({"enable_thinking": False}, {"thinking": False}),
    "reasoning": ({"enabled": False}, {"effort": "none"}),
    "separate_reasoning": (False,),
    "stream_reasoning": (False,),
}


def _by_name(endpoint: FieldEndpoint) -> Mapping[str, RequestField]:
    rows = [field for field in ALL_FIELDS if endpoint in field.endpoints]
    table = {field.name: field for field in rows}
    if len(table) < len(rows):
        raise ValueError(f"a field of {endpoint.value} has two rows")
    others = [field for field in ALL_FIELDS if field.name not in table]
    return table | {field.name: _elsewhere(field, endpoint) for field in others}


def _elsewhere(field: RequestField, endpoint: FieldEndpoint) -> RequestField:
    """The row at `endpoint` of a field that only the other one has: what it asks for would be ignored here.

    What is harmless there is harmless here.
    """
    if field.kind is FieldKind.HARMLESS:
        return replace(field, endpoints=BOTH)
    nothing = [value for value in (*NOTHING, *OFF.get(field.name, ())) if value not in field.neutral]
    neutral = (*field.neutral, *nothing, *(() if field.default is None else (field.default,)))
    (path,) = (other.value for other in field.endpoints)
    meaning = field.meaning if field.kind is FieldKind.REFUSED else f"is not a field of {endpoint.value}, but of {path}"
    return RequestField(field.name, frozenset({endpoint}), FieldKind.REFUSED, field.origin, meaning, neutral=neutral)


FIELDS: Mapping[FieldEndpoint, Mapping[str, RequestField]] = {
    endpoint: _by_name(endpoint) for endpoint in FieldEndpoint
}
"""endpoint -> name -> row."""

SCALARS: Mapping[FieldEndpoint, Mapping[str, Scalar]] = {
    endpoint: {
        field.name: field.shape
        for field in table.values()
        if field.kind is FieldKind.HONOURED and isinstance(field.shape, Scalar) and field.name != "model"
    }
    for endpoint, table in FIELDS.items()
}
"""The honoured scalars of each endpoint. `validation` judges the model first."""


@dataclass(frozen=True, slots=True)
class CheckedFields:
    """The fields of a body that are left to read, with aliases under the names of their targets, and unknown names."""

    fields: Fields
    unknown: tuple[str, ...]


def check_fields(body: Mapping[str, object], endpoint: FieldEndpoint, errors: FieldErrors) -> CheckedFields:
    """Notes refused fields, harmless ones of the wrong type, and aliases that contradict their targets."""
    given, table, unknown = Fields(body, errors), FIELDS[endpoint], []
    aliases: dict[str, object] = {}
    for name, value in body.items():
        field = table.get(name)
        if field is None:
            unknown.append(name)
        elif value is None or field.kind is _HONOURED:
            if name in OBJECTS:
                unknown.extend(unknown_inside(name, value))
        elif field.kind is _REFUSED:
            if not field.is_neutral(value):
                given.add_error(name, field.meaning)
        elif field.kind is _HARMLESS:
            if field.shape is not None and value not in field.shape:
                given.add_mismatch(name, str(field.shape))
        elif not field.is_neutral(value):
            _read_alias(given, field, value, aliases)
    return CheckedFields(Fields({**body, **aliases}, errors) if aliases else given, tuple(unknown))


def _read_alias(given: Fields, field: RequestField, value: object, aliases: dict[str, object]) -> None:
    """Puts the value under the name of its target, unless the body has that too; then both must be equal.

    A target `name.key` is a key of an object. Later errors of the value have the name that was sent.
    """
    name, _, key = field.target.partition(".")
    target = aliases.get(name, given.values.get(name))
    whole = target if isinstance(target, dict) else {}
    if key and whole is not target and target is not None:
        return  # no object: its reader refuses it
    if key:
        target = whole.get(key)
    if field.shape is not None and value not in field.shape:
        given.add_mismatch(field.name, str(field.shape))
    elif target is None:
        aliases[name] = {**whole, key: value} if key else value
        given.errors.rename({field.target: field.name, **({} if whole else {name: field.name})})
    elif target != value:
        sent = given.errors.name_of(field.target)
        given.add_error(field.name, f"contradicts {sent}, of which it is another name")
