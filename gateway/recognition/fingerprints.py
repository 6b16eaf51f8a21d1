"""What of a call's conversation is compared with earlier calls: hashes, never its text. Pure.

A conversation is a sequence of steps: its messages, the items of a Responses call, or equal pieces of a plain prompt. A later call of the same
conversation begins with the same steps, has the answer next, and then what came since.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from heapq import nsmallest
from itertools import islice, pairwise
from typing import Any, Literal, NamedTuple

import orjson

from engine_bridge.protocol.node import Api

# Fields that clients move or fill in from one call to the next though the message is the same.
_PASSING = frozenset(
    (
        "cache_control",
        "prompt_cache_breakpoint",
        "status",
        "annotations",
        "logprobs",
        "refusal",
        "audio",
        "function_call",
    )
)
# Of answers also these: Microsoft's frameworks sign an answer with the agent's name once its turn is over, and thoughts are left out then.
_PASSING_OF_ANSWERS = _PASSING | {"name", "reasoning", "reasoning_content", "reasoning_details"}
# An item with a role is a message, whether it says so or not.
_MESSAGE = ("type", "message")
# Parts of an answer that clients may leave out when they send it back.
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
# vLLM drops these blocks of Claude Code's system prompt, which differ in each call.
_BILLING = "x-anthropic-billing-header"
# Digits of instructions may differ in each call of one agent: the time, the date, a counter.
_DIGITS = b"0123456789"
_INSTRUCTING = ("system", "developer")
# A text of so many characters is known by itself. Chosen: no two texts of this length are alike by chance, as "Done." and "Go on." are.
LONG_CHARS = 100
# The latest answers of a call that may be a conversation's last one. Chosen: clients put a canned exchange or two behind it.
MAX_ANSWERS = 8
# Ids of an answer by which it is known. Chosen: agents call a dozen tools at once, and a client may say that there were a million.
MAX_IDS = 16
# Ids that models and clients count up (`functions.bash:3`, `call_1`): they are alike in all conversations.
_COUNTED_ID = re.compile(r"(?:^[A-Za-z]*|[^0-9A-Za-z])[0-9]{1,6}$")
# Ids of calls that some client writes into the text of an answer, in the forms that servers give them (smolagents, which has results as text, too).
# They have a digit, which names of functions seldom have.
_WRITTEN_ID = re.compile(r"\b(?:chatcmpl-tool-|call_|toolu_)(?=[A-Za-z]*[0-9])[0-9A-Za-z]{16,32}\b")
# A line of an answer by which the answer is known inside a message that tells it all, and how many of such a message's last lines and of its
# characters are looked through for it; lines behind what such a message tells, which say what to do next. Chosen.
LINE_CHARS, MAX_LINES, MAX_CHARS, MAX_LINES_BEHIND = 16, 128, 1 << 16, 3
# Bytes of a piece of a plain prompt. Chosen: shorter prompts than this begin alike by chance.
PIECE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """The marks by which an answer is known again: the ids of its calls of tools, and a hash of its text (b"" without text).

    is_long: whether the text has `LONG_CHARS` or more. line: a hash of its longest line; b"" where none has `LINE_CHARS`, or of an answer that
    was read from a history.
    """

    tool_ids: frozenset[str] = frozenset()
    text: bytes = b""
    is_long: bool = False
    line: bytes = b""

    def is_like(self, other: Answer) -> bool:
        """Return whether two answers may be the same one: a call of a tool in common decides, then the text; both, where the ids are counted."""
        common = self.tool_ids & other.tool_ids
        if any(map(_is_own, common)):
            return True
        return bool(common) == bool(self.tool_ids or other.tool_ids) and self.text == other.text

    @property
    def own(self) -> tuple[bytes, ...]:
        """Hashes of marks that no other answer has: of the ids of its calls of tools; of an answer that calls none, of a long text."""
        ids = nsmallest(MAX_IDS, filter(_is_own, self.tool_ids))
        return tuple(_hash(each.encode("utf-8", "replace")) for each in ids) or (
            (self.text,) if self.is_long and not self.tool_ids else ()
        )

    @property
    def has_counted_ids_alone(self) -> bool:
        """Whether it calls tools under ids that other answers have, too, so that its calls may be others than those of an answer that is like it."""
        return bool(self.tool_ids) and not any(map(_is_own, self.tool_ids))

    def anchors(self, opening: bytes, before: Before, *, is_last: bool = True) -> tuple[bytes, ...]:
        """Return hashes under which the conversation that got this answer is found, whatever became of its earlier history.

        Args:
            opening: of the conversation.
            before: what this answer followed, by which an answer without marks of its own is known.
            is_last: whether no other answer follows: then the question before it may tell which it is.
        """
        if own := self.own:
            return tuple(_hash(opening + each) for each in own)
        if not self.tool_ids and not self.text:
            return ()
        marks = _json(sorted(self.tool_ids)) + self.text
        followed = (*before.answer, *before.question, *before.turn) if is_last else before.answer
        return tuple(_hash(opening + each + marks) for each in followed)


class Before(NamedTuple):
    """What an answer follows, as far as no other conversation has it.

    answer: marks of the answer before. question: a hash of the last step. turn: a hash of all up to the last question of a person, behind which
    clients may leave out the calls of tools and their results.
    """

    answer: tuple[bytes, ...] = ()
    question: tuple[bytes, ...] = ()
    turn: tuple[bytes, ...] = ()


NOTHING = Before()


class State(NamedTuple):
    """The place where a conversation stands: a hash and the number of its steps; length and hash of a plain prompt's end that fills no piece."""

    prefix: bytes
    num_steps: int
    num_rest: int = 0
    rest: bytes = b""


@dataclass(frozen=True, slots=True)
class Telling:
    """A message that may tell a whole conversation: clients that keep it as text send one message, which grows in each call.

    under: a hash of all before the message. heads: how many of its lines stay as they are, as far as one knows, and a hash of them; the most first.
    """

    under: bytes
    heads: tuple[tuple[int, bytes], ...]

    def place(self, line: bytes) -> bytes:
        """Return the key under which the message is found that tells an answer with this line next."""
        return self.under + line


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One call's conversation.

    Attributes:
        prefixes: a hash of each of its beginnings: of the first step, of the first two, and so on to the whole. Of the instructions at its beginning
            the digits are left out.
        opening: a hash of what its steps stand under, without digits: the model, and the instructions up to the first message of them. Clients
            put a summary of what they have left out into the second one.
        exact: of the model and all instructions, with their digits.
        before: what its answer will follow; nothing for a plain prompt.
        steps: the messages or items themselves, for `answer_after`; empty for a plain prompt.
        prompt: a plain prompt's bytes; b"" for messages.
        telling: its last message, which may tell all that was said; None for any other end.
    """

    prefixes: tuple[bytes, ...]
    opening: bytes
    exact: bytes = b""
    before: Before = NOTHING
    steps: Sequence[Any] = ()
    prompt: bytes = b""
    telling: Telling | None = None

    @property
    def state(self) -> State:
        """The state that a later call of the same conversation begins with."""
        rest = self.prompt[len(self.prefixes) * PIECE_BYTES :]
        return State(self.prefixes[-1], len(self.prefixes), len(rest), _hash(rest))

    def answer_after(self, state: State) -> Answer | None:
        """Return the answer that follows a conversation which this one begins with; None where something else does.

        In a plain prompt anything may be an answer, so that its marks are empty.
        """
        if self.prompt:
            at = state.num_steps * PIECE_BYTES
            rest = self.prompt[at : at + state.num_rest]
            is_longer = len(self.prompt) > at + state.num_rest
            return Answer() if is_longer and _hash(rest) == state.rest else None
        num_steps, answers = state.num_steps, []
        for step in self.steps[num_steps:]:
            if not _is_answer(step):
                break
            answers.append(step)
        return answer_of(answers) if answers else None

    def is_next_after(self, state: State) -> bool:
        """Return whether this may be the very next call of a conversation which it begins with: no more than one answer has come since."""
        since = [begin >= state.num_steps for begin, _ in islice(_answers(self.steps, len(self.steps)), 2)]
        return sum(since) <= 1

    def anchors(self) -> Iterator[bytes]:
        """Yield the anchors of its answers, the latest answer first."""
        places = islice(_answers(self.steps, len(self.steps)), MAX_ANSWERS)
        for number, (begin, end) in enumerate(places):
            answer = answer_of(self.steps[begin:end])
            before = NOTHING if answer.own else _before(self.steps, begin)
            if not number and begin:
                before = before._replace(turn=(self.prefixes[begin - 1],))
            yield from answer.anchors(self.opening, before, is_last=not number)

    def places(self) -> dict[bytes, int]:
        """Return where a conversation is found whose answer the last message tells: by each of its last lines, with and without a heading.

        With the number of lines before that line, where it stands last.
        """
        found: dict[bytes, int] = {}
        if self.telling is not None:
            lines = _text_of(self.steps[-1]).splitlines()
            for number in reversed(range(max(0, len(lines) - MAX_LINES), len(lines))):
                line = lines[number][:MAX_CHARS]
                for each in (line, line.partition(": ")[2]):
                    if len(each := each.strip()) >= LINE_CHARS:
                        found.setdefault(self.telling.place(_hash(each.encode("utf-8", "replace"))), number)
        return found

    def lines_told(self, before: Sequence[Telling]) -> list[int]:
        """Return with how many lines of each earlier message its last one begins; 0 for none, and for fewer than make it the same."""
        lines = _text_of(self.steps[-1])[:MAX_CHARS].splitlines()
        digests = _digests(lines, sorted({num_lines for each in before for num_lines, _ in each.heads}))
        return [next((num for num, digest in each.heads if digests.get(num) == digest), 0) for each in before]


def fingerprint(api: Api, body: Any) -> Fingerprint | None:
    """Return the fingerprint of a call; None for one whose conversation cannot be told, such as several prompts at once or a malformed body."""
    if not isinstance(body, dict):
        return None
    if api == "completions":
        return _of_prompt(body)
    steps = body.get("input" if api == "responses" else "messages")
    if api == "responses" and isinstance(steps, str):
        steps = [{"role": "user", "content": steps}]
    if not isinstance(steps, list) or not steps:
        return None
    num_leading = 0
    while num_leading < len(steps) and _is_instructing(steps[num_leading]):
        num_leading += 1
    instructions = [_plain(body.get("system")), body.get("instructions"), *map(_plain, steps[:num_leading])]
    model, under = _json(body.get("model")), _json(instructions)
    opening = _hash(
        model + _json(instructions[:3]).translate(None, _DIGITS)
    )  # both fields, and the first message
    begun = last = _hash(model + under.translate(None, _DIGITS))
    prefixes = [last] * num_leading
    for step in steps[num_leading:]:
        last = _hash(last + _json(_plain(step)))
        prefixes.append(last)
    before = _before(steps, len(steps))
    asked = _last_question(steps)
    if num_leading <= asked < len(steps) - 1:
        before = before._replace(turn=(prefixes[asked],))
    telling = _telling(prefixes[-2] if len(steps) > 1 else begun, steps[-1])
    return Fingerprint(tuple(prefixes), opening, _hash(model + under), before, steps=steps, telling=telling)


def answer_of(steps: Sequence[Any]) -> Answer:
    """Return the marks of an answer that is given as messages or items."""
    ids: set[str] = set()
    texts: list[str] = []
    for step in steps:
        if not isinstance(step, dict):
            continue
        ids.update(_ids(step))
        content = step.get("content")
        parts = [{"text": content}] if isinstance(content, str) else content
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict):
                if part.get("type") == "tool_use":
                    ids.update(_ids({"call_id": part.get("id")}))
                elif part.get("type") not in _THOUGHTS and isinstance(part.get("text"), str):
                    texts.append(part["text"])
    return _marks(ids, "".join(texts))


def marks(tool_ids: set[str], text: str) -> Answer:
    """Return the marks of an answer with these calls of tools and this text, whose outer white space clients may strip."""
    line = max(map(str.strip, text[:MAX_CHARS].splitlines()), key=len, default="")
    digest = _hash(line.encode("utf-8", "replace")) if len(line) >= LINE_CHARS else b""
    return replace(_marks(tool_ids, text), line=digest)


def _marks(tool_ids: set[str], text: str) -> Answer:
    text = text.strip()
    digest = _hash(text.encode("utf-8", "replace")) if text else b""
    written = islice((found[0] for found in _WRITTEN_ID.finditer(text, 0, MAX_CHARS)), MAX_IDS)
    return Answer(frozenset((*tool_ids, *written)), digest, len(text) >= LONG_CHARS)


def turn_of(body: Any) -> Literal["", "begins", "continues"]:
    """Return the turn of a program that a call is, as in `EngineRequest.turn`."""
    if ends_with_results(body):
        return "continues"
    return "begins" if isinstance(body, dict) and body.get("tools") else ""


def ends_with_results(body: Any) -> bool:
    """Return whether a call brings the results of tools, so that its conversation continues without a person.

    Behind them clients put reminders, and pictures that a tool has made. A client that writes the calls into an answer's text gives their results
    as text, too.
    """
    steps = body.get("messages", body.get("input")) if isinstance(body, dict) else None
    given: list[Any] = steps if isinstance(steps, list) else []
    for step in reversed(given):
        if _is_result(step):
            return True
        if not isinstance(step, dict):
            break
        if _is_answer(step):
            return (
                step is not given[-1]
                and not any(_ids(step))
                and bool(_WRITTEN_ID.search(_text_of(step), 0, MAX_CHARS))
            )
    return False


def _is_result(step: Any) -> bool:
    """Return whether a message or an item has the result of a tool."""
    if not isinstance(step, dict):
        return False
    if step.get("role") in ("tool", "function") or str(step.get("type", "")).endswith("_output"):
        return True
    parts = step.get("content")
    return isinstance(parts, list) and any(
        isinstance(part, dict) and part.get("type") == "tool_result" for part in parts
    )


def _of_prompt(body: dict[str, Any]) -> Fingerprint | None:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        data = prompt.encode("utf-8", "replace")
    elif isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        try:
            data = array("q", prompt).tobytes()
        except OverflowError:
            return None
    else:
        return None
    opening = last = _hash(orjson.dumps(body.get("model")))
    num_pieces = len(data) // PIECE_BYTES
    prefixes = []
    for number in range(num_pieces):
        piece = data[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
        last = _hash(last + piece)
        prefixes.append(last)
    return Fingerprint(tuple(prefixes), opening, prompt=data) if prefixes else None


def _answers(steps: Sequence[Any], end: int) -> Iterator[tuple[int, int]]:
    """Yield where the answers before step number `end` begin and end, the latest first."""
    while end:
        begin = end
        while begin and _is_answer(steps[begin - 1]):
            begin -= 1
        if begin < end:
            yield begin, end
        end = max(begin - 1, 0)


def _before(steps: Sequence[Any], end: int) -> Before:
    """Return what an answer at this place follows."""
    begun, ended = next(_answers(steps, end), (0, 0))
    question = (_hash(_json(_plain(steps[end - 1]))),) if end and _has_own_marks(steps[end - 1]) else ()
    return Before(answer_of(steps[begun:ended]).own, question)


def _last_question(steps: Sequence[Any]) -> int:
    """Return the number of the last step that is neither an answer nor the result of a tool; -1 for none."""
    numbers = reversed(range(len(steps)))
    return next((each for each in numbers if not _is_answer(steps[each]) and not _is_result(steps[each])), -1)


def _telling(under: bytes, step: Any) -> Telling | None:
    """Return the message as one that may tell a conversation; None for one of a single line, and for any other step."""
    if not isinstance(step, dict) or step.get("role") != "user":
        return None
    lines = _text_of(step)[:MAX_CHARS].splitlines()
    if len(lines) < 2:
        return None
    fewest = max(len(lines) - MAX_LINES_BEHIND, (len(lines) + 1) // 2)
    heads = _digests(lines, range(fewest, len(lines) + 1))
    return Telling(under, tuple(reversed(heads.items())))


def _text_of(step: dict[str, Any]) -> str:
    """Return the text of a message; "" where it has none, or several."""
    content = _plain(step.get("content"))
    return content if isinstance(content, str) else ""


def _digests(lines: Sequence[str], numbers: Sequence[int]) -> dict[int, bytes]:
    """Return hashes of the first lines, by their number, for each of some rising numbers that there are as many lines of."""
    found, seen = {}, blake2b(digest_size=16)
    for begin, end in pairwise((0, *numbers)):
        if end > len(lines):
            break
        seen.update("".join(f"{line}\n" for line in lines[begin:end]).encode("utf-8", "replace"))
        found[end] = seen.digest()
    return found


def _is_own(tool_id: Any) -> bool:
    """Return whether no other conversation has this id of a call."""
    return isinstance(tool_id, str) and bool(tool_id) and not _COUNTED_ID.search(tool_id)


def _has_own_marks(step: Any) -> bool:
    """Return whether no other conversation has this question or result of a tool: by its call's id, or because its text is long."""
    if not isinstance(step, dict):
        return False
    content = step.get("content", step.get("output"))
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    ids = [step.get("tool_call_id"), step.get("call_id"), *(part.get("tool_use_id") for part in parts)]
    texts = [content, *(part.get(name) for part in parts for name in ("text", "content"))]
    return any(map(_is_own, ids)) or sum(len(text) for text in texts if isinstance(text, str)) >= LONG_CHARS


def _is_instructing(step: Any) -> bool:
    return isinstance(step, dict) and step.get("role") in _INSTRUCTING


def _is_answer(step: Any) -> bool:
    if not isinstance(step, dict):
        return False
    kind = str(step.get("type") or "")
    return step.get("role") == "assistant" or kind == "reasoning" or kind.endswith("_call")


def _ids(step: dict[str, Any]) -> Iterator[str]:
    """Yield the ids of the calls of tools in a message or an item."""
    calls = step.get("tool_calls")
    for call in (*(calls if isinstance(calls, list) else ()), {"id": step.get("call_id")}):
        if isinstance(call, dict) and isinstance(call.get("id"), str):
            yield call["id"]


def _plain(value: Any) -> Any:
    """Return a step without what passes, and a text in one form however it was given."""
    if isinstance(value, list):
        kept = [part for part in value if not _passes(part)]
        if len(kept) == 1 and isinstance(kept[0], dict) and kept[0].keys() - _PASSING <= {"type", "text"}:
            return kept[0].get("text", "")
        return [_plain(part) for part in kept]
    if isinstance(value, dict):
        passing = _PASSING_OF_ANSWERS if value.get("role") == "assistant" else _PASSING
        return {
            name: _plain(part)
            for name, part in value.items()
            if name not in passing and part is not None and part not in ("", []) and (name, part) != _MESSAGE
        }
    return value


def _passes(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    text = part.get("text")
    return part.get("type") in _THOUGHTS or (isinstance(text, str) and text.startswith(_BILLING))


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
