"""The faults of a body in plain words: a sentence for each field, from the errors of a pydantic model. Pure.

Where a field may have one of several forms, pydantic reports what is wrong by each of them, also by those that nobody meant: a user's message whose
content is a number has 22 errors. The form that fits best is taken: whose tag (`role`, say) fits, then with the fewest fields that do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Error = Mapping[str, Any]
"""Of `pydantic.ValidationError.errors()`: its `loc`, `type` and `msg` are read."""

MOST_SENTENCES: Final = 3
MOST_NAME_CHARS: Final = 100  # of a field's name, which the client may have made up
MOST_ERRORS: Final = 2000  # looked at: 20 ms. A call may have as many messages, each with 22 errors
_SHOULD_BE: Final = "Input should be "
_TAGS: Final = frozenset({"literal_error", "enum", "union_tag_invalid"})
# What JSON calls the types that these kinds of errors ask for.
_JSON_TYPES: Final = (
    {"string_type": "a string", "none_required": "null"}
    | dict.fromkeys(("list_type", "iterable_type", "tuple_type", "set_type"), "a list")
    | dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object")
    | dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "an integer")
    | dict.fromkeys(("float_type", "float_parsing", "finite_number"), "a number")
    | dict.fromkeys(("bool_type", "bool_parsing"), "true or false")
)
# How pydantic names such forms where they are alternatives.
_TYPE_NAMES: Final = frozenset(
    {"str", "int", "float", "bool", "bytes", "dict", "list", "tuple", "set", "none"}
)


def explain(errors: Sequence[Error]) -> tuple[str, str | None]:
    """Return a text for the client that sent the body, and the first field that it names, as in `messages[0].content`; None for the body itself.

    Nothing of the body is quoted, but for the names of its fields.
    """
    by_field: dict[str, list[Error]] = {}
    for error in _best([(error["loc"], error) for error in errors[:MOST_ERRORS]]):
        by_field.setdefault(_field(error["loc"]), []).append(error)
    sentences = [_sentence(field, found) for field, found in by_field.items()]
    if len(sentences) > MOST_SENTENCES:
        sentences[MOST_SENTENCES:] = ["Others do not fit, either."]
    return " ".join(sentences), next(iter(by_field), None) or None


def _best(errors: Sequence[tuple[Sequence[Any], Error]]) -> list[Error]:
    """Return the errors to report. errors: each with the rest of its place."""
    chosen = [error for rest, error in errors if not rest]
    fields: dict[Any, list[tuple[Sequence[Any], Error]]] = {}
    forms: dict[Any, list[tuple[Sequence[Any], Error]]] = {}
    for rest, error in errors:
        if rest:
            group = forms if _is_form(rest[0]) else fields
            group.setdefault(rest[0], []).append((rest[1:], error))
    for found in fields.values():
        chosen += _best(found)
    return chosen + _best_form(list(forms.values()))


def _best_form(forms: Sequence[Sequence[tuple[Sequence[Any], Error]]]) -> list[Error]:
    """Return the errors to report of a field's alternative forms.

    These are all errors where each form is a plain value; else the errors of the form that fits best, or that its tag is unknown.
    """
    objects = [_best(found) for found in forms if any(rest for rest, _ in found)]
    if not objects:
        return [error for found in forms for _, error in found]
    best = min(objects, key=_misfit)
    num_tags = sum(map(_is_tag, best))
    if num_tags == 0:
        return best
    # Several forms of one name, which pydantic tells as one: what is there and does not fit belongs to the form that was meant.
    meant = [error for error in best if not _is_tag(error) and error["type"] != "missing"]
    if len(objects) == 1 and num_tags > 1 and meant:
        return meant
    return [error for found in objects for error in found if _is_tag(error)]


def _misfit(errors: Sequence[Error]) -> tuple[int, int, int]:
    """Return how far a body is from a form; of equally far forms, the form that allows the most for its fields comes first."""
    return sum(map(_is_tag, errors)), len({_field(error["loc"]) for error in errors}), -len(errors)


def _is_tag(error: Error) -> bool:
    return error["type"] in _TAGS


def _is_form(part: Any) -> bool:
    """Return whether this part of a place names one of a field's forms, and no field or index."""
    return isinstance(part, str) and (
        part in _TYPE_NAMES or part[:1].isupper() or any(sign in part for sign in "[(-")
    )


def _field(loc: Sequence[Any]) -> str:
    """Return the name of a place: `("messages", 0, "UserMessage", "content", "str")` → `messages[0].content`.

    vLLM reads the lists inside a chat's messages one by one: places in these begin with an index and do not tell the message.
    """
    text = ""
    if isinstance(loc[0] if loc else "", int):
        text = "messages[…]." + ("tool_calls" if any("ToolCall" in str(part) for part in loc) else "content")
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not _is_form(part):
            text += f".{part}" if text else str(part)
    return text if len(text) <= MOST_NAME_CHARS else text[: MOST_NAME_CHARS - 1] + "…"


def _sentence(field: str, errors: Sequence[Error]) -> str:
    name = f"`{field}`" if field else "The body"
    if any(error["type"] == "missing" for error in errors):
        return f"{name} is missing."
    texts = list(dict.fromkeys(map(_text, errors)))
    if all(text.startswith(_SHOULD_BE) for text in texts):
        return f"{name} should be {' or '.join(text.removeprefix(_SHOULD_BE) for text in texts)}."
    return " ".join(f"{name}: {text.removeprefix('Value error, ').rstrip('.')}." for text in texts)


def _text(error: Error) -> str:
    json_type = _JSON_TYPES.get(error["type"])
    return str(error["msg"]) if json_type is None else _SHOULD_BE + json_type
