"""Reads `response_format` and `structured_outputs` into a constraint. Notes errors instead of raising them.

Other servers' names (`guided_json`, `regex`, `ebnf`, ...) are aliases of keys of `structured_outputs`; the field table
has put them there. Whether a grammar can be used is found by `checker`, after all fields were read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.domain.constraint import Constraint, GrammarPhase
from baton.domain.errors import ConstraintFailed
from baton.grammar import sources
from baton.grammar.tool_calls import structural_tag_grammar
from baton.services.router.openai.bounds import FLAG, TEXT
from baton.services.router.openai.field_table.nested import OBJECTS
from baton.services.router.openai.fields import Fields, short_repr
from baton.services.router.text.text_model import TextModel

RESPONSE_FORMAT, STRUCTURED_OUTPUTS = "response_format", "structured_outputs"
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Keys of `structured_outputs` that ask for a form; one of them."""

SCHEMA_TYPES = {"json_schema": "json_schema", "schema": "json_object"}
"""Where `response_format` has a schema: key -> the only type with it."""

MAX_STRUCTURES = 128
TAG_NAMES = frozenset({"type", "structures", "triggers"})
OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
MAX_SOURCE_CHARS = 256 * 1024
"""Of one text, before it is read; the compiler bounds the grammar."""


@dataclass(frozen=True, slots=True)
class RequestedConstraint:
    """A constraint, the field that asked for it, and its JSON Schema where it has one, to explain errors.

    `is_calls`: it holds calls of tools, and no form of the text.
    """

    value: Constraint
    param: str
    schema: object = None
    is_calls: bool = False


@dataclass(frozen=True, slots=True)
class _FormSpec:
    grammar: str
    param: str
    schema: object = None


def read_constraint(
    fields: Fields, text: TextModel, *, ignore_eos: bool, min_tokens: int
) -> RequestedConstraint | None:
    """The constraint of the request, None without one."""
    forms = [_read_response_format(fields, text), _read_structured_outputs(fields, text)]
    if None not in forms:
        fields.add_error(STRUCTURED_OUTPUTS, "cannot be combined with response_format: both ask for a form")
    form = forms[0] or forms[1]
    if form is None:
        return None
    value = Constraint(
        (GrammarPhase(form.grammar),), eos=text.eos_token_ids, ignore_eos=ignore_eos, min_tokens=min_tokens
    )
    return RequestedConstraint(value, form.param, form.schema)


def _read_response_format(fields: Fields, text: TextModel) -> _FormSpec | None:
    wanted = fields.mapping(RESPONSE_FORMAT)
    if wanted is None:
        return None
    kind = wanted.values.get("type")
    for name, needed in SCHEMA_TYPES.items():
        if wanted.values.get(name) is not None and kind != needed:
            wanted.add_error(name, f"needs type {needed}")
    match kind:
        case "text":
            pass
        case "json_object":
            return _read_json_object(wanted)
        case "json_schema":
            return _read_json_schema(wanted)
        case "structural_tag":
            tag = wanted.values
            return _noted(wanted, "structures", RESPONSE_FORMAT, lambda: _structural_tag(tag, text), None)
        case _:
            wanted.add_mismatch("type", "text, json_object, json_schema or structural_tag")
    return None


def _read_json_object(wanted: Fields) -> _FormSpec | None:
    """Any object, or JSON of `schema`, as llama-server has it."""
    schema = wanted.values.get("schema")
    if schema is None:
        return _FormSpec(sources.json_object_grammar(), RESPONSE_FORMAT)
    return _noted(wanted, "schema", RESPONSE_FORMAT, lambda: sources.json_schema_grammar(schema), schema)


def _read_json_schema(wanted: Fields) -> _FormSpec | None:
    """OpenAI's wrapper, `{"name", "schema", "strict"}`. The output keeps to the schema, strict or not."""
    wrapper = wanted.mapping("json_schema")
    if wrapper is None:
        if wanted.values.get("json_schema") is None:
            wanted.add_mismatch("json_schema", "an object with name and schema")
        return None
    wrapper.read({"name": TEXT, "description": TEXT, "strict": FLAG})
    schema = wrapper.values.get("schema")
    return _noted(wrapper, "schema", RESPONSE_FORMAT, lambda: sources.json_schema_grammar(schema), schema)


def _read_structured_outputs(fields: Fields, text: TextModel) -> _FormSpec | None:
    wanted = fields.mapping(STRUCTURED_OUTPUTS)
    if wanted is None:
        return None
    flags = dict.fromkeys(OPTIONS[1:], FLAG)
    options = wanted.read({"whitespace_pattern": TEXT, **flags, "json_object": FLAG, "disable_fallback": FLAG})
    known = {*KINDS, *OPTIONS, "disable_fallback"}
    for name in wanted.values.keys() - known:
        if wanted.values[name] is not None:
            wanted.add_error(name, "is not supported")
    kinds = [kind for kind in KINDS if wanted.values.get(kind) not in (None, False)]
    sent = [fields.errors.name_of(f"{STRUCTURED_OUTPUTS}.{kind}") for kind in kinds]
    if len(kinds) > 1:
        wanted.add_error(kinds[1], f"cannot be combined with {sent[0]}: both ask for a form")
        return None
    if not kinds:
        _refuse_no_form(fields)
        return None
    kind = kinds[0]
    param = STRUCTURED_OUTPUTS if sent[0].startswith(STRUCTURED_OUTPUTS) else sent[0]
    value = wanted.values[kind]
    schema = _schema(value) if kind == "json" else {"type": "object"} if kind == "json_object" else None
    return _noted(wanted, kind, param, lambda: _grammar(kind, value, schema, options, text), schema)


def _refuse_no_form(fields: Fields) -> None:
    """Notes that `structured_outputs`, or an option of it under another name, asks for no form."""
    if fields.errors.name_of(STRUCTURED_OUTPUTS) == STRUCTURED_OUTPUTS:
        fields.add_mismatch(STRUCTURED_OUTPUTS, f"an object with one of {', '.join(KINDS)}")
    else:
        fields.add_error(STRUCTURED_OUTPUTS, "needs a form beside it, such as a schema")


def _grammar(kind: str, value: object, schema: object, options: Mapping[str, Any], text: TextModel) -> str:
    """Raises `ConstraintFailed` for a value of the wrong type."""
    if kind in ("json", "json_object"):
        return sources.json_schema_grammar(
            schema,
            whitespace_pattern=options.get("whitespace_pattern"),
            any_whitespace=not options.get("disable_any_whitespace", False),
            additional_properties=not options.get("disable_additional_properties", False),
        )
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise ConstraintFailed("a choice is a list of texts")
        return sources.choice_grammar(value)
    if kind == "structural_tag":
        tag = _json_of(value)
        _refuse_unknown(tag)
        return _structural_tag(tag, text)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_SOURCE_CHARS:
        raise ConstraintFailed(f"a {kind} is a text of 1 to {MAX_SOURCE_CHARS} characters")
    return sources.regex_grammar(value) if kind == "regex" else sources.grammar_text(value)


def _structural_tag(tag: object, text: TextModel) -> str:
    """The form of vLLM and SGLang: structures with begin, schema and end, and triggers. Raises `ConstraintFailed`."""
    given = tag if isinstance(tag, dict) else {}
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not 0 < len(structures) <= MAX_STRUCTURES:
        raise ConstraintFailed(f"a structural tag has 1 to {MAX_STRUCTURES} structures, and triggers")
    if not isinstance(triggers, list) or not all(isinstance(each, str) and each for each in triggers):
        raise ConstraintFailed("triggers is a list of texts")
    if not all(isinstance(each, dict) for each in structures):
        raise ConstraintFailed("structures is a list of objects")
    texts = [str(each.get(key, "")) for each in structures for key in ("begin", "end")]
    return structural_tag_grammar(structures, triggers, text.added_tokens_in("\n".join(texts)))


def _refuse_unknown(tag: object) -> None:
    """Raises `ConstraintFailed` for names inside of a structural tag that have no meaning; null is no value."""
    given = tag if isinstance(tag, dict) else {}
    structures = given.get("structures")
    objects = [(given, TAG_NAMES, "")]
    for each in structures if isinstance(structures, list) else ():
        objects.append((each if isinstance(each, dict) else {}, OBJECTS["response_format.structures"], "structures."))
    for values, known, path in objects:
        for name in values.keys() - known:
            if values[name] is not None:
                raise ConstraintFailed(f"{path}{short_repr(name)[1:-1]} is not supported")


def _json_of(value: object) -> object:
    """The value, parsed if it is a text. Raises `ConstraintFailed`."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise ConstraintFailed("is no JSON text") from None


def _schema(value: object) -> object:
    """The schema, which some clients send as text. What is no JSON is left as it is, and refused later."""
    if isinstance(value, str) and len(value) <= MAX_SOURCE_CHARS:
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _noted(fields: Fields, name: str, param: str, make: Callable[[], str], schema: object) -> _FormSpec | None:
    try:
        return _FormSpec(make(), param, schema)
    except ConstraintFailed as error:
        fields.add_error(name, str(error))
    except RecursionError:
        fields.add_error(name, "is nested too deeply")
    return None
