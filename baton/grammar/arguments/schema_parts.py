"""Parts of a JSON Schema for formats that cannot take it whole: references, alternatives, members of an object.

What a format cannot express is a `ConstraintFailed` that names the keyword and its path.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.domain.errors import ConstraintFailed

Json = Any

KEYWORDS = frozenset(
    "type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength pattern items "
    "prefixItems additionalItems unevaluatedItems maxItems minItems uniqueItems contains minContains maxContains "
    "maxProperties minProperties required properties patternProperties additionalProperties unevaluatedProperties "
    "dependentRequired dependentSchemas dependencies propertyNames allOf anyOf oneOf not if then else $ref "
    "$dynamicRef $recursiveRef".split()
)
"""Those that a value may break. All others are annotations here."""

MAX_REFERENCES = 32
"""From one schema to the next, before one refers to itself."""

MAX_ALTERNATIVES = 256
SECTIONS = ("$defs", "definitions")
"""Where schemas keep what they refer to."""

_OF_NAMES = frozenset({"properties", "patternProperties", "dependentSchemas", *SECTIONS})
_OF_VALUES = frozenset({"enum", "const", "default", "example", "examples"})
_ALTERNATIVES = ("anyOf", "oneOf")


@dataclass(frozen=True, slots=True)
class PropertySpec:
    """A property of an object. `path`: of its schema."""

    name: str
    schema: Json
    path: str
    is_required: bool


@dataclass(frozen=True, slots=True)
class ObjectSpec:
    """The properties that an object may have, in the order of the schema. `others`: the schema of those that are not
    declared; None for none.
    """

    declared: tuple[PropertySpec, ...]
    others: Json | None


def refuse_keywords(schema: Mapping[str, Json], kept: Collection[str], path: str) -> None:
    """Raises `ConstraintFailed` for a keyword that is not kept."""
    for keyword in schema:
        is_off = keyword == "uniqueItems" and schema[keyword] is False
        if keyword in KEYWORDS and keyword not in kept and not is_off:
            raise not_kept(keyword, path)


def not_kept(keyword: str, path: str) -> ConstraintFailed:
    """The error for a keyword that the format cannot keep."""
    return ConstraintFailed(f'"{keyword}" at {path or "/"} cannot be kept in calls of this format')


def members(schema: Json, root: Json, path: str) -> ObjectSpec:
    """The members of an object of `schema`. Raises `ConstraintFailed`.

    An object that declares properties has no others, unless its schema says so.
    """
    whole = resolved(schema, root, path)
    refuse_keywords(whole, ("type", "properties", "required", "additionalProperties"), path)
    if "object" not in types_of(whole, {"object"}):
        raise ConstraintFailed(f"the schema at {path or '/'} is not one of an object")
    properties = whole.get("properties")
    declared: Mapping[str, Json] = properties if isinstance(properties, dict) else {}
    required = whole.get("required") or ()
    if not isinstance(required, list | tuple) or not isinstance(properties, dict | None):
        raise ConstraintFailed(f"the schema at {path or '/'} has no list of required names, or no object of properties")
    for name in required:
        if not isinstance(name, str) or name not in declared:
            raise ConstraintFailed(f'"required" at {path or "/"} names {str(name)[:100]!r}, which is not declared')
    others = whole.get("additionalProperties", {} if properties is None else False)
    found = tuple(
        PropertySpec(name, part, f"{path}/properties/{name}", name in required) for name, part in declared.items()
    )
    return ObjectSpec(found, None if others is False else {} if others is True else others)


def resolved(schema: Json, root: Json, path: str) -> Mapping[str, Json]:
    """`schema` without references at its top, and without an `allOf` of one. Raises `ConstraintFailed`."""
    for _ in range(MAX_REFERENCES):
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise ConstraintFailed(f"the schema at {path or '/'} allows nothing, or is none")
        further = _target(schema, root, path)
        if further is None:
            return schema
        refuse_keywords(schema, ("$ref", "allOf"), path)
        schema = further
    raise ConstraintFailed(f'"$ref" at {path or "/"} refers to itself')


def _target(schema: Mapping[str, Json], root: Json, path: str) -> Json | None:
    """The schema that this one stands for; None if it stands for itself."""
    if isinstance(reference := schema.get("$ref"), str):
        return referenced(reference, root, path)
    parts = schema.get("allOf")
    return parts[0] if isinstance(parts, list) and len(parts) == 1 else None


def referenced(reference: str, root: Json, path: str) -> Json:
    """The schema at `#/...`. Raises `ConstraintFailed`."""
    found = root
    for key in reference.removeprefix("#").split("/")[1:] if reference.startswith("#") else ("",):
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    if found is None:
        raise ConstraintFailed(f'"$ref" at {path or "/"} names {reference[:100]!r}, which is not in the schema')
    return found


def references_in(schema: Json) -> Iterator[str]:
    """The references in a schema and its parts, not in values that it lists."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            for keyword, value in part.items():
                if keyword == "$ref" and isinstance(value, str):
                    yield value
                elif keyword in _OF_NAMES and isinstance(value, dict):
                    left += value.values()
                elif keyword not in _OF_VALUES:
                    left.append(value)


def alternatives(schema: Json, root: Json, path: str) -> list[tuple[Mapping[str, Json], str]]:
    """The schemas, with their paths, of which a value keeps to one; the schema itself if it has no `anyOf` or `oneOf`.

    Raises `ConstraintFailed`, also where keywords stand beside them.
    """
    found = list(itertools.islice(_alternatives(schema, root, path, 0), MAX_ALTERNATIVES + 1))
    if not 0 < len(found) <= MAX_ALTERNATIVES:
        raise ConstraintFailed(f"the schema at {path or '/'} has none or more than {MAX_ALTERNATIVES} alternatives")
    return found


def _alternatives(schema: Json, root: Json, path: str, depth: int) -> Iterator[tuple[Mapping[str, Json], str]]:
    whole = resolved(schema, root, path)
    keyword = next((each for each in _ALTERNATIVES if isinstance(whole.get(each), list)), None)
    if keyword is None:
        yield whole, path
        return
    refuse_keywords(whole, (keyword,), path)
    if not whole[keyword]:  # every branch ends in an alternative or an error, so counting those bounds the walk
        raise ConstraintFailed(f'"{keyword}" at {path[:100] or "/"} allows nothing')
    if depth > MAX_REFERENCES:
        raise ConstraintFailed(f'"{keyword}" at {path[:100]} refers to itself')
    for index, part in enumerate(whole[keyword]):
        yield from _alternatives(part, root, f"{path}/{keyword}/{index}", depth + 1)


def counts(schema: Mapping[str, Json], least: str, most: str, path: str) -> tuple[int, int | None]:
    """The values of two keywords, 0 and None without them. Raises `ConstraintFailed` for what bounds nothing."""
    low, high = schema.get(least, 0), schema.get(most)
    for keyword, value in ((least, low), (most, 0 if high is None else high)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConstraintFailed(f'"{keyword}" at {path or "/"} is no count')
    if high is not None and high < low:
        raise ConstraintFailed(f'"{most}" at {path or "/"} is below "{least}"')
    return low, high


def types_of(schema: Mapping[str, Json], unnamed: Collection[str]) -> set[str]:
    """The JSON types that a schema names; `unnamed` if it names none."""
    given = schema.get("type")
    named = [given] if isinstance(given, str) else given if isinstance(given, list) else unnamed
    return {name for name in named if isinstance(name, str)}


def values_of(schema: Mapping[str, Json]) -> list[Json] | None:
    """The values of `enum` or `const` that are of the schema's type; None if it lists none."""
    if "const" in schema:
        listed = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        listed = schema["enum"]
    else:
        return None
    types = types_of(schema, ())
    return [value for value in listed if not types or not types.isdisjoint(_types_of_value(value))]


def _types_of_value(value: Json) -> tuple[str, ...]:
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("integer", "number") if value.is_integer() else ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
    return ("object",)
