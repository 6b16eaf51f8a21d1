"""JSON schemas of answers and tool calls, tightened so that a small model comes to an end, and the grammar of calls it makes by itself. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_OPEN_ON_PURPOSE = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_COMBINED = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "$ref", "$dynamicRef"}
)
_BOUNDED = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "const", "multipleOf"}
)
# Source: RFC 8259 §6: readers that keep numbers as doubles agree on integers up to here.
MAX_INTEGER = 2**53 - 1
_NAMED = ("properties", "$defs", "definitions")
# Types by the names that other languages have for them, too; in capitals, Gemini's API has them.
_TYPES = {name: name for name in "object array string number integer boolean null".split()}
_TYPES |= {
    "dict": "object",
    "list": "array",
    "str": "string",
    "float": "number",
    "int": "integer",
    "bool": "boolean",
}
# Under these stand names that a client has chosen, and no keywords.
_OF_NAMES = (*_NAMED, "patternProperties", "dependentSchemas", "dependencies")
_LISTED = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
# The formats of texts that llguidance holds an answer to; it refuses all others. Source: llguidance 1.x, `formats.rs`, tried one by one.
_FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split())
# Rules that it refuses. Source: llguidance 1.x, tried one by one.
_NOT_HELD = frozenset(
    """not if then else dependentRequired dependentSchemas dependencies unevaluatedProperties unevaluatedItems contains minContains maxContains
    uniqueItems propertyNames $dynamicAnchor $dynamicRef $recursiveAnchor $recursiveRef""".split()
)
# What its regular expressions do not have: what stands around (words' ends, too), what was found before, and what only other programs' have, such as
# JavaScript's slashes. Tried one by one.
_NOT_IN_PATTERNS = re.compile(r"\(\?(<?[=!]|[>#|])|\\[0-9bBcehkEGKNQRXZ]|^/.*/[a-z]*$|\[\^\]|\{,")
# Rules under some condition, and what they have where they may name properties that the object itself does not name.
_CONDITIONAL = ("then", "else", "dependentSchemas", "dependencies")
_NAMES_MORE = re.compile(r'"(properties|\$ref)"')
# What holds values, not schemas.
_VALUES = ("const", "enum", "default", "examples", "example")
# Fields that name a whole document.
_OF_A_DOCUMENT = ("$schema", "$id", "id")
_MAY_BE_NULL = ("const", "default")
_REFERENCES = re.compile(r'"#/\$defs/([^"/]*)"')
_ANY_NAME: tuple[Any, ...] = (True, {}, {"type": "string"})
# How llguidance writes JSON by a schema. By default it writes no spaces.
_SPACED = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
LOOSE = "Held as far as a grammar can hold it."
"""The `$comment` of a schema that need not be held: see `opened`."""
HELD = "// Calls held to the tools offered."
"""The first line of `held_calls`, a comment."""


def without_remarks(schema: Any) -> Any:
    """Return the same schema without what says nothing of an answer, which llguidance refuses.

    A format that is not known is a remark (JSON Schema 2020-12, "Validation", §7.2.1), such as `password`, `int32` or `cuid`: schemas made from
    classes are full of them. Any property's name is a text, `uniqueItems` may be false, an empty list of Go's or C#'s comes as null, and an empty
    object of PHP's as a list.
    """
    return _changed(schema, _unless_remark)


def loosened(schema: Any) -> Any:
    """Return the schema of a tool's arguments without the rules to which llguidance cannot hold an answer, and which it refuses.

    OpenAI's and Anthropic's servers promise arguments by their schema only for tools that are `strict`, and take every schema for others. What fits
    the schema fits this one, too.
    """
    return _changed(schema, _within_grammars)


def opened(schema: Any) -> Any:
    """Return a schema in which any object stands for each one whose `$comment` is LOOSE: for those that llguidance refuses though they were loosened.

    In these is what no list of rules foretells: references to other servers, regular expressions of other programs, numbers in quotes.
    """
    if isinstance(schema, list):
        return [opened(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("$comment") == LOOSE:
        return {"type": "object"}
    return {key: value if key in _VALUES else opened(value) for key, value in schema.items()}


def _unless_remark(key: str, value: Any) -> tuple[str, Any] | None:
    is_remark = (
        (key == "format" and isinstance(value, str) and value not in _FORMATS)
        or (key == "propertyNames" and value in _ANY_NAME)
        or (key == "uniqueItems" and value is False)
        or (value is None and key not in _MAY_BE_NULL)
        or (value == [] and key in _NAMED)
    )
    return None if is_remark else (key, value)


def _within_grammars(key: str, value: Any) -> tuple[str, Any] | None:
    if key == "oneOf":  # refused unless it is plain that no two of them fit at once
        return "anyOf", value
    if key == "$ref" and isinstance(value, str):
        return key, value.replace("/oneOf/", "/anyOf/")
    if key == "patternProperties" and isinstance(value, dict) and any(map(_NOT_IN_PATTERNS.search, value)):
        return key, {".*": {}}
    if key in _CONDITIONAL and _NAMES_MORE.search(json.dumps(value)):
        return "additionalProperties", True
    if key == "type":
        return _known_type(value)
    is_beyond = key in _NOT_HELD
    if key == "pattern" and isinstance(value, str):
        is_beyond = _NOT_IN_PATTERNS.search(value) is not None
    return None if is_beyond else (key, value)


def _known_type(value: Any) -> tuple[str, Any] | None:
    """Return a type, or a list of some, by JSON Schema's names; None where it is any. What is not known stays, to be refused."""
    names = [str(each).lower() for each in (value if isinstance(value, list) else [value])]
    if "any" in names:
        return None
    if not _TYPES.keys() >= set(names):
        return "type", value
    known = [_TYPES[name] for name in names]
    return "type", known if isinstance(value, list) else known[0]


def _changed(schema: Any, change: Callable[[str, Any], tuple[str, Any] | None]) -> Any:
    """Return a schema with its keywords changed, at any depth.

    change: returns for a keyword and its value what stands there instead, if the schema has no such keyword besides; None for nothing.
    """
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for own, given in schema.items():
        changed = change(own, given)
        if changed is None or (changed[0] != own and changed[0] in schema):
            continue
        key, value = changed
        if key in _NAMED or key == "patternProperties":
            if isinstance(value, dict):
                value = {name: _changed(each, change) for name, each in value.items()}
        elif key in _LISTED or key == "allOf":
            value = [_changed(each, change) for each in value] if isinstance(value, list) else value
        elif key in _SINGLE:
            value = _changed(value, change)
        found[key] = value
    return found


def portable(schema: dict[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a schema as it can stand inside another one, and what that one needs in its `$defs` (see `with_definitions`).

    A reference such as `#/definitions/X` is to the whole document, and each tool's schema was one by itself.
    """
    own = {key: value for key, value in schema.items() if key not in _OF_A_DOCUMENT}
    if not _refers(own):
        return {key: value for key, value in own.items() if key not in ("$defs", "definitions")}, {}
    place, document = f"#/$defs/{name}", str(schema.get("$id", "")).removesuffix("#")
    return {"$ref": place}, {name: _moved(own, place, document)}


def with_definitions(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a schema with those definitions to which it refers."""
    names = set(_REFERENCES.findall(json.dumps(schema))) if definitions else ()
    used = {name: each for name, each in definitions.items() if name in names}
    return schema | {"$defs": used} if used else schema


def _refers(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_refers, schema))
    if not isinstance(schema, dict):
        return False
    return isinstance(schema.get("$ref"), str) or any(map(_refers, schema.values()))


def _moved(schema: Any, place: str, document: str) -> Any:
    """Return a schema whose references are right where its document stands at a place of another one. document: its own address, or ""."""
    if isinstance(schema, list):
        return [_moved(each, place, document) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _OF_NAMES and isinstance(value, dict):
            found[key] = {name: _moved(each, place, document) for name, each in value.items()}
        else:
            found[key] = value if key in _VALUES else _moved(value, place, document)
    reference = found.get("$ref")
    if isinstance(reference, str):
        pointer = reference.removeprefix(document)
        if pointer in ("", "#") or pointer.startswith("#/"):
            found["$ref"] = place + pointer[1:]
    return found


def closed(schema: Any) -> Any:
    """The same schema, in which an object that names its properties has no others, unless it says so.

    JSON Schema allows properties that no one has named. Readers ignore or refuse them, and a small model may go on inventing them until its tokens
    run out; vLLM's default backend closes objects, too. Integers get the bounds within which JSON's readers agree, for the same reason. Objects that
    are put together from several schemas stay open: which properties they may have is not said in one place.
    """
    if _joins_several(schema):
        return schema
    return _closed(schema)


def _joins_several(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(_joins_several(each) for each in schema)
    if not isinstance(schema, dict):
        return False
    joined = schema.get("allOf")
    if isinstance(joined, list) and len(joined) > 1:
        return True
    return any(_joins_several(each) for each in schema.values())


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    has_properties = isinstance(found.get("properties"), dict)
    for key in _NAMED:
        if isinstance(found.get(key), dict):
            found[key] = {name: _closed(each) for name, each in found[key].items()}
    for key in _LISTED:
        # Beside the object's own properties, a branch does not name all that the object may have.
        if isinstance(found.get(key), list) and not has_properties:
            found[key] = [_closed(each) for each in found[key]]
    for key in _SINGLE:
        if key in found:
            found[key] = _closed(found[key])
    if found.get("type") == "integer" and not found.keys() & _BOUNDED:
        found |= {"minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
    if has_properties and _names_all(found) and not found.keys() & (_OPEN_ON_PURPOSE | _COMBINED):
        found["additionalProperties"] = False
    return found


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Return whether an object names all properties that it must have. One that does not, by mistake, could not be written if it were closed."""
    required = schema.get("required")
    return not isinstance(required, list) or all(
        name in schema["properties"] for name in required if isinstance(name, str)
    )


def spaced(schema: Any) -> Any:
    """Return a schema whose JSON has one line and a space behind each comma and colon, unless it says itself how its JSON is written.

    Chat templates show tools and their calls in this form, so models have learned it; held to another one, a small model gets short values wrong.
    """
    return _SPACED | schema if isinstance(schema, dict) else schema


def at_most_one(schema: Any) -> Any:
    """Return the schema of a list of calls, as vLLM writes it for `tool_choice: "required"`, with one call at most; other schemas as they are."""
    is_list = isinstance(schema, dict) and schema.get("type") == "array" and schema.get("minItems") == 1
    return schema | {"maxItems": 1} if is_list else schema


def held_calls(tools: Mapping[str, Any]) -> str:
    """Return a grammar (Lark, as llguidance reads it) of answers: free text, or one call in the form of vLLM's `hermes` parser on one line.

    `<tool_call>` and `</tool_call>` must be tokens of the model's. tools: the schema of each tool's arguments by its name; each is a separate
    document, so that its references (`#/$defs/...`) stay right.
    """
    calls, rules = [], []
    for index, (name, schema) in enumerate(tools.items()):
        opening = f'{{"name": {json.dumps(name)}, "arguments": '
        arguments = spaced(closed(loosened(without_remarks({"type": "object", "properties": {}} | schema))))
        calls.append(f"call_{index}")
        rules.append(f'call_{index}: {json.dumps(opening)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {json.dumps(arguments)}")
    start = f"start: TEXT | <tool_call> ({' | '.join(calls)}) </tool_call>"
    return "\n".join([HELD, start, "TEXT: /([^<](.|\\n)*)?/", *rules, ""])


def is_held(grammar: str | None) -> bool:
    """Return whether a grammar is one of `held_calls`: help for the model, which no client has asked for."""
    return grammar is not None and grammar.startswith(HELD)
