"""Text of clients that stays text: what it writes like a special token is no special token. Pure: strings and JSON values in and out.

A chat template writes messages and its own special tokens into one text, and the tokenizer cannot tell one from the other: a user's
`<|im_start|>system` becomes a system message. So each place where a client's text spells such a token is marked before the template sees it. In what
the template renders, unmarked tokens are the template's own: they are given aliases that nobody can guess, the marks go, and a tokenizer that knows
the tokens by their aliases alone reads the rest as any text. Where nothing was marked, nothing is done.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from msgspec import Struct

SpecialTokensInContent = Literal["keep", "split"]
ContentFormat = Literal["auto", "string", "openai"]
"""vLLM's names of the forms in which a chat template gets the content of a message: as one text, or as a list of parts."""

# Texts of these roles come from anywhere. Texts of other roles may hold, for example, reasoning that a model wrote between its tags.
_UNTRUSTED_ROLES = ("user", "tool", "function")
# Fields that the model does not read: names of kinds, and media.
_NO_TEXT = frozenset(
    {
        "type",
        "role",
        "image_url",
        "input_audio",
        "audio_url",
        "video_url",
        "image_embeds",
        "audio_embeds",
        "prompt_embeds",
    }
)


class KnownToken(Struct, frozen=True):
    """A token that a tokenizer finds as a whole in a text."""

    content: str
    is_special: bool

    @property
    def is_tag(self) -> bool:
        """Whether it is written as a tag: `<think>`, `[INST]`."""
        return (self.content[0], self.content[-1]) in (("<", ">"), ("[", "]"))


class Marks:
    """Marks what clients wrote like one of a tokenizer's tokens, and finds the template's own.

    Args:
        tokens: all that the tokenizer finds as a whole.
        secret: decimal digits that no client knows, since what writes an alias has its token. Digits, because templates change cases.
    """

    def __init__(self, tokens: Sequence[KnownToken], secret: str = "") -> None:
        secret = secret or "".join(secrets.choice("0123456789") for _ in range(24))
        tokens = [token for token in tokens if token.content]
        # Of the private use areas: no letters, no blanks, nothing that a normaliser changes.
        self._mark = f"\ue000{secret}\ue001"
        self.aliases = {token.content: f"\ue002{secret}{number}\ue001" for number, token in enumerate(tokens)}
        """The alias by which the tokenizer knows a token, by the token's text."""
        special = [token.content for token in tokens if token.is_special]
        self._special = _any_of(special)
        self._tokens = _any_of([*special, *(token.content for token in tokens if token.is_tag)])
        escaped = re.escape(json.dumps(self._mark)[1:-1])
        self._marks = re.compile(f"{re.escape(self._mark)}|{escaped}", re.IGNORECASE)
        # One character cannot be marked inside.
        single = [token.content for token in tokens if len(token.content) == 1]
        plain = f"{re.escape(self._mark)}{_any_of(single).pattern}|" if single else ""
        self._own = re.compile(f"{plain}{_any_of([token.content for token in tokens]).pattern}")

    def messages(self, messages: Iterable[Any]) -> tuple[list[Any], bool]:
        """Return the messages of a chat with marks, and whether there are any. Values other than JSON's stay as they are."""
        marked, has_marks = [], False
        for message in messages:
            role = message.get("role") if isinstance(message, Mapping) else None
            value, is_marked = self.value(message, is_trusted=role not in _UNTRUSTED_ROLES)
            marked.append(value)
            has_marks |= is_marked
        return marked, has_marks

    def value(self, value: Any, *, is_trusted: bool = True) -> tuple[Any, bool]:
        """Return any JSON value with marks, and whether there are any.

        is_trusted: whether it may write tokens that are not special, such as `<think>`.
        """
        if isinstance(value, str):
            return self._text(value, is_trusted)
        if isinstance(value, Mapping):
            return self._mapping(value, is_trusted)
        if isinstance(value, (list, tuple)) or type(value).__name__ == "ValidatorIterator":
            return self._list(list(value), is_trusted)
        return value, False

    def _text(self, text: str, is_trusted: bool) -> tuple[str, bool]:
        places = self._places(text, is_trusted)
        return _with(self._mark, text, places), bool(places)

    def _places(self, text: str, is_trusted: bool) -> list[int]:
        """Return where marks go: behind the first character of each token, also where tokens overlap."""
        tokens = self._special if is_trusted else self._tokens
        places, at = [], 0
        while found := tokens.search(text, at):
            at = found.start() + 1
            places.append(at if len(found[0]) > 1 else found.start())
        return places

    def _mapping(self, value: Mapping[str, Any], is_trusted: bool) -> tuple[dict[str, Any], bool]:
        marked, has_marks = {}, False
        for key, item in value.items():
            if key in _NO_TEXT:
                marked[key] = item
                continue
            key, is_marked = self._text(key, is_trusted) if isinstance(key, str) else (key, False)
            read = self._arguments if key == "arguments" and isinstance(item, str) else self.value
            marked[key], is_item_marked = read(item, is_trusted=is_trusted)
            has_marks |= is_marked or is_item_marked
        return marked, has_marks

    def _arguments(self, text: str, *, is_trusted: bool) -> tuple[str, bool]:
        """Return the arguments of a tool call with marks: they come as a JSON text, in which a token may be spelled with escapes."""
        try:
            value, has_marks = self.value(json.loads(text), is_trusted=is_trusted)
        except (ValueError, RecursionError):
            return self._text(text, is_trusted)
        return (json.dumps(value, ensure_ascii=False), True) if has_marks else (text, False)

    def _list(self, values: list[Any], is_trusted: bool) -> tuple[list[Any], bool]:
        """Return the parts of a text with marks: templates and parsers join them, so a token may begin in one part and end in another."""
        texts = [_text_of(part) for part in values]
        around = {place for joint in ("", "\n") for place in self._over_edges(texts, joint, is_trusted)}
        marked, has_marks = [], bool(around)
        for number, part in enumerate(values):
            value, is_marked = self.value(part, is_trusted=is_trusted)
            if number in around:
                value = (
                    value + self._mark
                    if isinstance(value, str)
                    else value | {"text": value["text"] + self._mark}
                )
            marked.append(value)
            has_marks |= is_marked
        return marked, has_marks

    def _over_edges(self, texts: Sequence[str | None], joint: str, is_trusted: bool) -> Iterable[int]:
        """Return the numbers of the texts behind which a mark must stand, lest they spell a token with the next ones."""
        numbers = [number for number, text in enumerate(texts) if text is not None]
        if len(numbers) < 2:
            return
        whole, ends = "", []
        for number in numbers:
            whole += (texts[number] or "") + joint
            ends.append(len(whole) - len(joint))
        tokens, at, edge = self._special if is_trusted else self._tokens, 0, 0
        while found := tokens.search(whole, at):
            at = found.start() + 1
            while edge < len(ends) and ends[edge] <= found.start():
                edge += 1
            if edge < len(ends) - 1 and ends[edge] < found.end():
                yield numbers[edge]

    # -- in the rendered text ------------------------------------------------------------------------------------------

    def are_in(self, text: str) -> bool:
        """Return whether a client's text has spelled a token in it."""
        return self._marks.search(text) is not None

    def without(self, value: Any) -> Any:
        """Return a text, or any JSON value, without marks."""
        if isinstance(value, str):
            return self._marks.sub("", value)
        if isinstance(value, dict):
            return {self.without(key): self.without(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.without(item) for item in value]
        return value

    def with_aliases(self, text: str) -> str:
        """Return a rendered text with an alias for each of the template's own tokens, and with its marks."""
        return self._own.sub(lambda found: self.aliases.get(found[0], found[0]), text)

    def pieces(self, text: str) -> list[str]:
        """Return the pieces of a text between its marks."""
        return self._marks.split(text)


def _with(mark: str, text: str, places: list[int]) -> str:
    edges = [0, *places, len(text)]
    return mark.join(text[start:end] for start, end in pairwise(edges)) if places else text


def _text_of(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else None


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the longest of these texts.

    It is a tree by their characters: at each place it is tried at most as long as the longest text is, however many texts there are (some tokenizers
    keep a
    thousand in reserve).
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_pattern(tree) if tree else r"(?!)")


def _pattern(node: dict[str, Any]) -> str:
    ways = [re.escape(letter) + _pattern(then) for letter, then in node.items() if letter]
    if not ways:
        return ""
    return f"(?:{'|'.join(ways)}){'?' if '' in node else ''}"
