"""A conversation in the form that a chat template takes: where instructions may stand, and whether roles must alternate. Pure.

Instructions are messages of the roles `system` and `developer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

Place = Literal["nowhere", "first", "anywhere"]
"""The messages of the role `system` that a chat template renders: none, one at the beginning, or all."""
PLACES: tuple[Place, ...] = get_args(Place)

_INSTRUCTING = ("system", "developer")
# Within a question, instructions are marked so that the model tells them from the person's words. Source: coding agents mark theirs so.
_MARKED = "<system-reminder>\n{}\n</system-reminder>"


class TemplateRules(NamedTuple):
    """The conversations that a chat template takes.

    Attributes:
        place: where it takes instructions.
        has_developer: whether it knows the role `developer`.
        alternates: whether it refuses two messages of one role in a row.
    """

    place: Place = "anywhere"
    has_developer: bool = True
    alternates: bool = False

    def applied(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Return a conversation as the template takes it; `messages` itself stays as it is.

        Instructions at the beginning become one message, or the beginning of the first question. Later ones become part of the question or of the
        tool's result before them, else of the question behind them. Put first, each new one would invalidate the cached KV of the whole
        conversation. Messages in a row become one where roles must alternate.
        """
        if self.place != "anywhere" or not self.has_developer:
            messages = self._placed(messages)
        return _in_turn(messages) if self.alternates else messages

    def _placed(self, messages: Sequence[Any]) -> Sequence[Any]:
        turns = _Turns(self.place)
        for message in messages:
            is_unknown = _role(message) == "developer" and not self.has_developer
            turns.add({**message, "role": "system"} if is_unknown else message)
        return turns.ended()


class _Turns:
    """The messages of a conversation so far, and instructions that wait for the next question."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._messages: list[Any] = []
        self._waiting: list[Any] = []

    def add(self, message: Any) -> None:
        """Add the next message."""
        if _role(message) not in _INSTRUCTING or self._place == "anywhere":
            if self._waiting and _role(message) == "user":
                message = _with(message, *self._take(), message.get("content"))
            elif self._waiting:
                self._messages.append(_question(self._take()))
            self._messages.append(message)
        elif self._place == "first" and not self._messages:
            self._messages.append(message)
        else:
            self._put(message.get("content"))

    def _put(self, content: Any) -> None:
        """Put an instruction's content into a neighbouring message."""
        last = self._messages[-1] if self._messages else None
        role = _role(last)
        if last is None:
            self._waiting.append(content)
        elif role in _INSTRUCTING and len(self._messages) == 1:
            self._messages[-1] = _with(last, last.get("content"), content)
        elif role in ("user", "tool") and not self._waiting:
            self._messages[-1] = _with(last, last.get("content"), _marked(content))
        else:
            self._waiting.append(_marked(content))

    def _take(self) -> list[Any]:
        taken, self._waiting = self._waiting, []
        return taken

    def ended(self) -> list[Any]:
        """Return all messages: instructions that no question follows are a question themselves."""
        if self._waiting:
            self._messages.append(_question(self._take()))
        return self._messages


def _in_turn(messages: Sequence[Any]) -> list[Any]:
    """Return messages of which those in a row by one side are one. Calls of tools and their results stay apart."""
    found: list[Any] = []
    for message in messages:
        last: Any = found[-1] if found else None
        is_in_row = _role(message) in ("user", "assistant") and _role(message) == _role(last)
        if is_in_row and not message.get("tool_calls") and not last.get("tool_calls"):
            found[-1] = _with(last, last.get("content"), message.get("content"))
        else:
            found.append(message)
    return found


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _question(contents: Sequence[Any]) -> Any:
    return {"role": "user", "content": _joined(contents)}


def _with(message: Any, *contents: Any) -> Any:
    return {**message, "content": _joined(contents)}


def _joined(contents: Sequence[Any]) -> Any:
    """Return several contents as one: a text where all are texts, else a list of parts."""
    given = [content for content in contents if content]
    if all(isinstance(content, str) for content in given):
        return "\n\n".join(given)
    return [part for content in given for part in _parts(content)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _marked(content: Any) -> Any:
    """Return an instruction as it stands within a question."""
    if isinstance(content, str):
        return _MARKED.format(content)
    texts = [part.get("text", "") if isinstance(part, dict) else str(part) for part in content or ()]
    return _MARKED.format("\n".join(texts)) if any(texts) else ""
