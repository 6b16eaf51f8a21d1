"""Where a conversation's instructions (messages of the roles `system` and `developer`) stand, so that its chat template takes them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

Place = Literal["nowhere", "first", "anywhere"]
"""The messages of the role `system` that a chat template renders: none, one at the beginning, or all."""
PLACES: tuple[Place, ...] = get_args(Place)

_ROLES = ("system", "developer")
# Within a question, instructions are marked so that the model tells them from the person's words. Source: coding agents mark theirs so.
_MARKED = "<system-reminder>\n{}\n</system-reminder>"


class Instructions(NamedTuple):
    """What a chat template does with instructions.

    Attributes:
        place: where it takes them.
        has_developer: whether it knows the role `developer`.
    """

    place: Place
    has_developer: bool = False

    def placed(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Return a conversation whose instructions stand where the template takes them.

        Those at the beginning become one message, or the beginning of the first question. Later ones become part of the question or of the tool's
        result before them, else of the question behind them: they stay behind what was said before, so that the conversation's cached KV stays
        valid, as it would not if they were put first. `messages` itself stays as it is.
        """
        later = messages if self.place == "nowhere" else messages[1:]
        if not any(_role(message) in _ROLES for message in later) and _role_of_first(messages) != "developer":
            return messages
        turns = _Turns(self.place)
        for message in messages:
            is_other = _role(message) == "developer" and not self.has_developer
            turns.add({**message, "role": "system"} if is_other else message)
        return turns.ended()


class _Turns:
    """The turns of a conversation so far, and instructions that wait for the next question."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._turns: list[Any] = []
        self._waiting: list[Any] = []

    def add(self, message: Any) -> None:
        """Add the next message."""
        if _role(message) not in _ROLES or self._place == "anywhere":
            if self._waiting:
                if _role(message) == "user":
                    message = _with(message, *self._waiting, message.get("content"))
                else:
                    self._turns.append({"role": "user", "content": _joined(self._waiting)})
                self._waiting = []
            self._turns.append(message)
        elif not self._turns and self._place == "first":
            self._turns.append(message)
        elif self._place == "first" and len(self._turns) == 1 and _role(self._turns[0]) in _ROLES:
            self._turns[0] = _with(self._turns[0], self._turns[0].get("content"), message.get("content"))
        elif not self._turns:
            self._waiting.append(message.get("content"))
        elif _role(self._turns[-1]) in ("user", "tool") and not self._waiting:
            last = self._turns[-1]
            self._turns[-1] = _with(last, last.get("content"), _marked(message.get("content")))
        else:
            self._waiting.append(_marked(message.get("content")))

    def ended(self) -> list[Any]:
        """Return all turns: instructions that no question follows are one of their own."""
        if self._waiting:
            self._turns.append({"role": "user", "content": _joined(self._waiting)})
        return self._turns


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _role_of_first(messages: Sequence[Any]) -> Any:
    return _role(messages[0]) if messages else None


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
    """Return an instruction as it stands within a user's message."""
    if isinstance(content, str):
        return _MARKED.format(content)
    texts = [part.get("text", "") if isinstance(part, dict) else str(part) for part in content or ()]
    return _MARKED.format("\n".join(texts)) if any(texts) else ""
