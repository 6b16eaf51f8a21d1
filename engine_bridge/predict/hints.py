"""Hints of an answer's length in its request's text and settings: a fixed tuple of numbers, made in tens of microseconds.

Only numbers and hashes are kept: no text. The words with a fixed meaning are English; a question in another language counts by its length, marks,
digits and lines, and by the learned weights of its words (`words.py`).

Measured (`bench.emulated length`, share of answers put into the right one of five classes of length; 2026-11-29): MT-Bench-101 without adapters
54%, and 47% without anything read from the text. That data repeats a few tasks in whole conversations, and its figure carries over to nothing else:
of 800 first turns of the same data 44% (29% without). p90 covers 88 to 92% in each. What a program asks by a
template of its own is told apart by `template`. Settings and tools are in no data that we have; they stand because they cost a comparison each.

Changing what a hint means, or their order, makes what was learned from them worthless: raise `FORMAT` in `length.py` with it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from engine_bridge.predict.words import places_of
from engine_bridge.protocol.asked import CONTEXT_HINTS, NO_TEXT, NOTHING_ASKED, TEXT_HINTS, Asked

# Characters of a question that are read, half of them from its end, where long questions state the wish. Chosen: bounds the time.
MAX_READ = 2048
# Characters of system prompts that are counted. Chosen.
MAX_COUNTED = 1 << 20
# Words of a question that tell its template. Chosen: "translate the following text into" tells one, and its filling comes later.
OPENING_WORDS = 5
# Most words of one kind that count in a question. Chosen.
MAX_WORDS = 8

# Words that ask for a short answer, a long one, one with many parts, one as long as its source, and for code. Chosen.
_WORDS = {
    "brief": "only just brief briefly short shortly concise concisely which who when where",
    "long": "essay story stories article report letter email speech script poem blog detail details detailed comprehensive explain describe "
    "discuss analyze analyse compare write create generate develop design plan guide tutorial why",
    "parts": "list lists step steps example examples idea ideas tip tips reason reasons way ways point points bullet bullets table outline "
    "recipe item items suggest suggestions recommend",
    "same": "translate rewrite rephrase paraphrase correct fix convert edit improve proofread summarize summarise summary shorten extract classify",
    "code": "code function python javascript java sql html css regex class program algorithm",
}
_PHRASES = {
    "brief": (
        "yes or no",
        "true or false",
        "one word",
        "one sentence",
        "single word",
        "single sentence",
        "how many",
        "how much",
    ),
    "long": ("how do", "how can", "how would", "how should", "how to", "in depth"),
    "code": ("```",),
}
_KINDS = tuple(_WORDS)
_KIND_OF = {word: kind for kind, words in _WORDS.items() for word in words.split()}
_WORD = re.compile("[a-z]+|[0-9]+")
_LETTERS = re.compile(r"[^\W\d_]+")
_SPELLED = {"a": 1, "an": 1, "one": 1, "single": 1, "two": 2, "three": 3, "four": 4, "five": 5, "ten": 10}
# Tokens of each unit. Chosen; a word is 4/3 of a token in English.
_TOKENS_OF = {"word": 4 / 3, "sentence": 25.0, "line": 15.0, "paragraph": 100.0, "page": 600.0}
_TOKENS_OF |= {f"{unit}s": num_tokens for unit, num_tokens in _TOKENS_OF.items()}

SETTING_HINTS = ("structured", "temperature", "is_bounded", "has_stop", "ignores_eos")
HINTS = TEXT_HINTS + CONTEXT_HINTS + SETTING_HINTS


def read_conversation(messages: Sequence[tuple[str, str]]) -> Asked:
    """Read a conversation of (role, text) pairs, in their order."""
    return read_body({"messages": [{"role": role, "content": text} for role, text in messages]})


def read_body(body: Any) -> Asked:
    """Read the JSON body of any of OpenAI's or Anthropic's calls. Malformed fields count as missing; never raises."""
    if not isinstance(body, dict):
        return NOTHING_ASKED
    question, num_turns = _text(body.get("prompt")), 0
    systems = [_text(body.get(given)) for given in ("system", "instructions")]
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        question, num_turns = messages, 1
    # Only the needed parts are read: a body may hold thousands of messages.
    for message in reversed(messages) if isinstance(messages, list) else ():
        role = message.get("role") if isinstance(message, dict) else None
        if role == "user":
            num_turns += 1
            if num_turns == 1:
                question = _text(message.get("content"))
        elif role in ("system", "developer"):
            systems.append(_text(message.get("content")))
    has_tools = bool(body.get("tools")) and body.get("tool_choice") != "none"
    return _asked(question, [text for text in systems if text], num_turns, has_tools=has_tools)


def _system_key(systems: Sequence[str]) -> str:
    """Return a hash of how long the system prompts of a call are, and how each begins; "" for none."""
    said = "".join(f"{len(text)} {text[:MAX_READ]}" for text in systems)
    return _digest(said) if systems else ""


def _template_key(system: str, question: str) -> str:
    """Return the key of the system prompts and the question's first words; "" without words."""
    words = _LETTERS.findall(question[:MAX_READ].lower())[:OPENING_WORDS]
    return system + _digest(" ".join(words)) if words else ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _text(content: Any) -> str:
    """Return the text of a message: a string, or a list of parts, of which only text counts."""
    if isinstance(content, str):
        return content
    found = ""
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str):
            found += text
        if len(found) > MAX_COUNTED:
            break
    return found


def _asked(question: str, systems: Sequence[str], num_turns: int, *, has_tools: bool) -> Asked:
    if len(question) > MAX_READ:
        shown = f"{question[: MAX_READ // 2]} {question[-MAX_READ // 2 :]}"
    else:
        shown = question
    context = (
        math.log1p(min(sum(map(len, systems)), MAX_COUNTED)),
        math.log1p(num_turns),
        float(has_tools),
    )
    hints = text_hints(shown, len(question)) + context
    system = _system_key(systems)
    return Asked(shown, hints, system, _template_key(system, shown), places_of(shown))


def text_hints(question: str, num_chars: int | None = None) -> tuple[float, ...]:
    """Return the TEXT_HINTS of a question. num_chars: of the whole question, if `question` is only a part."""
    if not question:
        return NO_TEXT
    lowered = question.lower()
    words = _WORD.findall(lowered)
    num_words = len(words) * (num_chars or len(question)) / len(question)
    digits = sum(len(word) for word in words if word.isdigit()) / len(question)
    return (
        math.log1p(num_words),
        math.log1p(question.count("?")),
        math.log1p(question.count("\n")),
        digits,
        _tokens_asked_for(words),
        *_counts(lowered, words),
    )


def _counts(lowered: str, words: Sequence[str]) -> list[float]:
    found = [_KIND_OF[word] for word in words if word in _KIND_OF]
    counts = []
    for kind in _KINDS:
        num = found.count(kind) + sum(lowered.count(phrase) for phrase in _PHRASES.get(kind, ()))
        counts.append(float(min(num, MAX_WORDS)))
    return counts


def _tokens_asked_for(words: Sequence[str]) -> float:
    """Return the logarithm of the tokens of "in 200 words", "two paragraphs"; 0 without such a wish. The last one counts."""
    asked = 0.0
    for before, unit in pairwise(words):
        if unit in _TOKENS_OF:
            # A number of more digits is no wish.
            amount = _SPELLED.get(before, int(before) if before.isdigit() and len(before) <= 5 else 0)
            asked = amount * _TOKENS_OF[unit] or asked
    return math.log1p(asked)


def setting_hints(
    *, is_structured: bool, temperature: float | None, is_bounded: bool, has_stop: bool, ignores_eos: bool
) -> tuple[float, ...]:
    """Return the SETTING_HINTS. is_bounded: the client set `max_tokens` below what the context leaves."""
    heat = 1.0 if temperature is None else temperature
    return float(is_structured), heat, float(is_bounded), float(has_stop), float(ignores_eos)
