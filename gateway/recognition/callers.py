"""Which conversation a helper works for: its caller's answer handed the helper's task to a tool. Pure.

Frameworks give a helper its task as its caller wrote it, at times under a heading of their own: the OpenAI Agents SDK, smolagents, deepagents,
Google's ADK, Haystack, Microsoft's Agent Framework, Mastra and Cline send its lines as they were (tried with each), others put a word and a colon
before it. Nothing of a text is kept, only hashes of lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

import orjson

# A shorter line may stand in two texts by chance. Chosen.
LINE_CHARS = 16
# Texts that one answer hands to tools, lines at a conversation's beginning that are compared, and characters of a text, and of a whole beginning,
# that are looked through for them. Chosen: a dozen helpers begin at once, each with a task of a page, perhaps behind notes of its client.
MAX_HANDED, MAX_LINES, MAX_CHARS, MAX_OPENING_CHARS = 32, 256, 1 << 16, 1 << 18
# Texts of all sessions that are kept, some 16 MB: beyond it the oldest are forgotten. Chosen.
MAX_KEPT = 1 << 16


class Callers:
    """The conversations that wait for their tools, by what they handed to them."""

    def __init__(self) -> None:
        self._by_line: dict[tuple[str, bytes], str] = {}
        self._lines_of: dict[tuple[str, str], Sequence[bytes]] = {}

    def went_away(self, tenant: str, session_id: str, lines: Sequence[bytes]) -> None:
        """Note that a session waits for its tools. lines: of what it handed to them, as `handed_lines` returns them."""
        self.came_back(tenant, session_id)
        if lines:
            self._lines_of[tenant, session_id] = lines
            self._by_line.update(((tenant, line), session_id) for line in lines)
            while len(self._by_line) > MAX_KEPT:
                (owner, _), oldest = next(iter(self._by_line.items()))
                self.came_back(owner, oldest)

    def came_back(self, tenant: str, session_id: str) -> None:
        """Forget a session that waits no longer. An unknown one is ignored."""
        for line in self._lines_of.pop((tenant, session_id), ()):
            if self._by_line.get((tenant, line)) == session_id:
                del self._by_line[tenant, line]

    def caller_of(self, tenant: str, body: Any) -> str:
        """Return the tenant's session that handed over the task with which a call's conversation begins; "" for none."""
        if not self._by_line:
            return ""
        found = (self._by_line.get((tenant, line)) for line in _opening_lines(body))
        return next(filter(None, found), "")


def handed_lines(arguments: Iterable[str]) -> list[bytes]:
    """Return a hash of the longest line of each text in calls' arguments, which are JSON; of malformed ones nothing."""
    lines: list[bytes] = []
    for each in arguments:
        try:
            value = orjson.loads(each)
        except orjson.JSONDecodeError:
            continue
        for text in islice(_texts(value), MAX_HANDED):
            longest = max(map(str.strip, text[:MAX_CHARS].splitlines()), key=len, default="")
            if len(longest) >= LINE_CHARS:
                lines.append(_hash(longest))
    return lines[:MAX_HANDED]


def _texts(value: Any) -> Iterator[str]:
    rest = [value]
    while rest:
        match rest.pop():
            case str() as text:
                yield text
            case dict() as fields:
                rest += fields.values()
            case list() as items:
                rest += items


def _opening_lines(body: Any) -> Iterator[bytes]:
    """Yield hashes of the lines of a conversation's first messages, up to its first answer, with and without a heading before a colon."""
    steps = body.get("messages", body.get("input")) if isinstance(body, dict) else None
    if isinstance(steps, str):
        steps = [{"role": "user", "content": steps}]
    for line in islice(_lines(steps if isinstance(steps, list) else []), MAX_LINES):
        yield _hash(line)
        _, _, rest = line.partition(": ")
        if len(rest := rest.strip()) >= LINE_CHARS:
            yield _hash(rest)


def _lines(steps: Sequence[Any]) -> Iterator[str]:
    left = MAX_OPENING_CHARS
    for step in steps:
        if not isinstance(step, dict) or step.get("role") not in ("user", "system", "developer"):
            return
        content = step.get("content")
        parts = [{"text": content}] if isinstance(content, str) else content
        for part in parts if isinstance(parts, list) and step["role"] == "user" else ():
            text = part.get("text") if isinstance(part, dict) else None
            text = text[: min(MAX_CHARS, left)] if isinstance(text, str) else ""
            left -= len(text) + LINE_CHARS  # a part takes time, however short it is
            if left <= 0:
                return
            for line in text.splitlines():
                if len(line := line.strip()) >= LINE_CHARS:
                    yield line


def _hash(line: str) -> bytes:
    return blake2b(line.encode("utf-8", "replace"), digest_size=16).digest()
