"""Shapes of fields that are lists or objects. `parameters` and `prompts` check them."""

from __future__ import annotations

from baton.services.router.openai import bounds
from baton.services.router.openai.bounds import Scalar, integer
from baton.services.router.openai.field_table.field import Schema, Shape

_STRING: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}


def scalar_schema(scalar: Scalar) -> Schema:
    """The JSON Schema of a scalar."""
    if scalar.types == bounds.FLAG.types:
        return {"type": "boolean"}
    if scalar.types == bounds.TEXT.types:
        return {"type": "string", "minLength": 1}
    low = "exclusiveMinimum" if scalar.exclusive_low else "minimum"
    kind = "integer" if scalar.types == (int,) else "number"
    schema = {"type": kind, low: scalar.low, "maximum": scalar.high}
    return {**schema, "not": {"const": 0}} if scalar.not_zero else schema


def _list(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "minItems": least, "maxItems": most, "items": items}


def _token(vocab_size: int) -> Schema:
    return scalar_schema(integer(0, vocab_size - 1))


def _message() -> Schema:
    """A message with content, or an assistant's message, which may have none."""
    part = {**_OBJECT, "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": _STRING}}
    content = {"anyOf": [_STRING, _list(part, 0, bounds.MAX_CONTENT_PARTS)]}
    calls = _list(_tool_call(), 0, bounds.MAX_TOOL_CALLS)
    refusal = {"required": ["type", "refusal"], "properties": {"type": {"const": "refusal"}, "refusal": _STRING}}
    said = {"anyOf": [_STRING, _list({**_OBJECT, "anyOf": [part, refusal]}, 0, bounds.MAX_CONTENT_PARTS)]}
    names = {name: or_null(_STRING) for name in ("name", "tool_call_id")}
    others = [role for role in bounds.ROLES if role != "assistant"]
    with_content = {
        "required": ["role", "content"],
        "properties": {
            **names,
            "role": {"enum": others},
            "content": content,
            "tool_calls": or_null(calls),
            **_no_call(),
        },
    }
    answer = {
        "required": ["role"],
        "properties": {
            **names,
            "role": {"const": "function"},
            "content": or_null(content),
            "tool_calls": or_null(calls),
        },
    }
    of_assistant = {
        **names,
        "role": {"const": "assistant"},
        "content": or_null(said),
        "refusal": or_null(_STRING),
    }
    with_calls = {"required": ["role"], "properties": {**of_assistant, "tool_calls": or_null(calls), **_no_call()}}
    older = {
        "required": ["role", "function_call"],
        "properties": {**of_assistant, "tool_calls": {"enum": [None, []]}, "function_call": _older_call()},
    }
    return {
        **_OBJECT,
        "anyOf": [with_content, with_calls, older, answer],
        "description": "The model's own template may ask for more.",
    }


def _no_call() -> dict[str, Schema]:
    return {"function_call": {"type": "null"}}


def _older_call() -> Schema:
    return {**_OBJECT, "required": ["name", "arguments"], "properties": {"name": _STRING, "arguments": _STRING}}


def _tool_call() -> Schema:
    arguments = {"anyOf": [_STRING, _OBJECT]}
    function = {**_OBJECT, "required": ["name", "arguments"], "properties": {"name": _STRING, "arguments": arguments}}
    return {**_OBJECT, "required": ["function"], "properties": {"function": function}}


def _prompt(vocab_size: int) -> Schema:
    tokens = {"type": "array", "minItems": 1, "items": _token(vocab_size)}
    return {"anyOf": [_STRING, tokens, _list(_STRING, 1, bounds.MAX_PROMPTS), _list(tokens, 1, bounds.MAX_PROMPTS)]}


def _stop() -> Schema:
    text = {"type": "string", "minLength": 1, "maxLength": bounds.MAX_STOP_CHARS}
    return {"anyOf": [text, _list(text, 0, bounds.MAX_STOP_STRINGS)]}


def _logit_bias() -> Schema:
    return {
        **_OBJECT,
        "maxProperties": bounds.MAX_LOGIT_BIASES,
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number"},
    }


def _stream_options() -> Schema:
    return {**_OBJECT, "properties": {name: or_null({"type": "boolean"}) for name in bounds.STREAM_FLAGS}}


def _function() -> Schema:
    return {
        **_OBJECT,
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
            "description": or_null(_STRING),
            "parameters": or_null(_OBJECT),
            "strict": or_null({"type": "boolean"}),
        },
    }


def _tools() -> Schema:
    properties = {"type": {"const": "function"}, "function": _function()}
    return _list({**_OBJECT, "required": ["type", "function"], "properties": properties}, 1, bounds.MAX_TOOLS)


def _named() -> Schema:
    return {**_OBJECT, "required": ["name"], "properties": {"name": _STRING}}


def _tool_choice() -> Schema:
    named = {
        **_OBJECT,
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": _named()},
    }
    return {"anyOf": [{"enum": ["none", "auto", "required"]}, named]}


def _response_format() -> Schema:
    named = {"name": _STRING, "description": _STRING, "strict": {"type": "boolean"}, "schema": _OBJECT}
    wrapper = {**_OBJECT, "required": ["schema"], "properties": {name: or_null(each) for name, each in named.items()}}
    plain = {"required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}}
    of_schema = {
        "required": ["type", "json_schema"],
        "properties": {"type": {"const": "json_schema"}, "json_schema": wrapper},
    }
    tag = {"required": ["type"], "properties": {"type": {"const": "structural_tag"}}}
    of_tag = {"allOf": [tag, _structural_tag()]}
    return {
        **_OBJECT,
        "anyOf": [plain, of_schema, of_tag],
        "description": "json_object may have a schema. Not every keyword of JSON Schema can be kept.",
    }


def _structural_tag() -> Schema:
    text = {"type": "string", "minLength": 1}
    structure = {**_OBJECT, "required": ["begin"], "properties": {"begin": text, "schema": _OBJECT, "end": _STRING}}
    properties = {"structures": _list(structure, 1, bounds.MAX_TOOLS), "triggers": _list(text, 1, bounds.MAX_TOOLS)}
    return {**_OBJECT, "required": ["structures", "triggers"], "properties": properties}


def _structured_outputs() -> Schema:
    text, flag = {"type": "string", "minLength": 1}, {"type": "boolean"}
    kinds = {
        "json": {"anyOf": [_OBJECT, text]},
        "json_object": {"const": True},
        "regex": text,
        "choice": {"type": "array", "minItems": 1, "items": text},
        "grammar": text,
        "structural_tag": {"anyOf": [_structural_tag(), text]},
    }
    options = {
        "whitespace_pattern": text,
        "disable_any_whitespace": flag,
        "disable_additional_properties": flag,
        "disable_fallback": flag,
    }
    return {
        **_OBJECT,
        "properties": {**kinds, **options},
        "oneOf": [{"required": [kind]} for kind in kinds],
        "description": "Not every keyword of JSON Schema, and no look-around, can be kept.",
    }


def _reasoning() -> Schema:
    effort: Schema = {"enum": list(bounds.EFFORTS)}
    return {**_OBJECT, "properties": {"effort": or_null(effort), "enabled": or_null({"type": "boolean"})}}


def or_null(schema: Schema) -> Schema:
    """The schema of a value that may be null, which is the same as absent."""
    return {"anyOf": [schema, {"type": "null"}]}


MESSAGES = Shape(
    f"a list of 1 to {bounds.MAX_MESSAGES} messages", lambda vocab: _list(_message(), 1, bounds.MAX_MESSAGES)
)
PROMPT = Shape(f"a string, token ids, or a list of 1 to {bounds.MAX_PROMPTS} of either", _prompt)
STOP = Shape(
    f"a string or a list of at most {bounds.MAX_STOP_STRINGS} strings of 1 to {bounds.MAX_STOP_CHARS} characters",
    lambda vocab: _stop(),
)
STOP_TOKEN_IDS = Shape(
    f"a list of at most {bounds.MAX_STOP_TOKEN_IDS} token ids",
    lambda vocab: _list(_token(vocab), 0, bounds.MAX_STOP_TOKEN_IDS),
)
ALLOWED_TOKEN_IDS = Shape(
    f"a list of 1 to {bounds.MAX_ALLOWED_TOKEN_IDS} token ids",
    lambda vocab: _list(_token(vocab), 1, bounds.MAX_ALLOWED_TOKEN_IDS),
)
LOGPROB_TOKEN_IDS = Shape(
    f"a list of 1 to {bounds.MAX_LOGPROB_TOKEN_IDS} token ids",
    lambda vocab: _list(_token(vocab), 1, bounds.MAX_LOGPROB_TOKEN_IDS),
)
BAD_WORDS = Shape(
    f"a list of at most {bounds.MAX_BAD_WORDS} strings of 1 to {bounds.MAX_BAD_WORD_CHARS} characters",
    lambda vocab: _list(
        {"type": "string", "minLength": 1, "maxLength": bounds.MAX_BAD_WORD_CHARS}, 0, bounds.MAX_BAD_WORDS
    ),
)
TRUNCATION_SIDE = Shape("left or right", lambda vocab: {"enum": ["left", "right"]}, lambda v: v in ("left", "right"))
LOGIT_BIAS = Shape(
    f"an object of at most {bounds.MAX_LOGIT_BIASES} entries, token id to bias", lambda vocab: _logit_bias()
)
STREAM_OPTIONS = Shape(f"an object of the flags {' and '.join(bounds.STREAM_FLAGS)}", lambda vocab: _stream_options())
RESPONSE_FORMAT = Shape(
    'an object, {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}',
    lambda vocab: _response_format(),
)
STRUCTURED_OUTPUTS = Shape(
    "an object with one of json, json_object, regex, choice, grammar, structural_tag, and options",
    lambda vocab: _structured_outputs(),
)
TOOLS = Shape(f"a list of 1 to {bounds.MAX_TOOLS} functions", lambda vocab: _tools())
FUNCTIONS = Shape(f"a list of 1 to {bounds.MAX_TOOLS} functions", lambda vocab: _list(_function(), 1, bounds.MAX_TOOLS))
FUNCTION_CHOICE = Shape(
    "none, auto, or the name of one", lambda vocab: {"anyOf": [{"enum": ["none", "auto"]}, _named()]}
)
TOOL_CHOICE = Shape("none, auto, required, or the name of one", lambda vocab: _tool_choice())
EFFORT = Shape("one of " + ", ".join(bounds.EFFORTS), lambda vocab: {"enum": list(bounds.EFFORTS)})
REASONING_FORMAT = Shape(
    "one of " + ", ".join(bounds.REASONING_FORMATS), lambda vocab: {"enum": list(bounds.REASONING_FORMATS)}
)
VERBOSITY = Shape("one of " + ", ".join(bounds.VERBOSITIES), lambda vocab: {"enum": list(bounds.VERBOSITIES)})
REASONING = Shape("an object of effort and enabled", lambda vocab: _reasoning())
JSON_SCHEMA = Shape(
    "a JSON Schema, as an object or as text",
    lambda vocab: {"anyOf": [_OBJECT, _STRING]},
    lambda value: isinstance(value, dict | str) and value != "",
)

TEMPLATE_VARIABLES = Shape(
    f"an object of at most {bounds.MAX_TEMPLATE_VARIABLES} entries and {bounds.MAX_TEMPLATE_VARIABLE_BYTES} bytes",
    lambda vocab: {**_OBJECT, "maxProperties": bounds.MAX_TEMPLATE_VARIABLES},
)

DOCUMENTS = Shape(
    f"a list of at most {bounds.MAX_DOCUMENTS} objects",
    lambda vocab: {"type": "array", "items": _OBJECT, "maxItems": bounds.MAX_DOCUMENTS},
)

STRING = Shape("a string", lambda vocab: _STRING, lambda value: isinstance(value, str))
OBJECT = Shape("an object", lambda vocab: _OBJECT, lambda value: isinstance(value, dict))
NUMBER = Shape(
    "a number",
    lambda vocab: {"type": "number"},
    lambda value: isinstance(value, int | float) and not isinstance(value, bool),
)
STRINGS = Shape(
    "a list of strings",
    lambda vocab: {"type": "array", "items": _STRING},
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)
