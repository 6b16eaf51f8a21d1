"""Text that a client chose costs its reader time in proportion to its length, whatever it says."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.advisories.drafts import whole_words
from gateway.errors import GatewayError
from gateway.sessions.excerpt import excerpt
from gateway.sessions.text import clean_text, title_from
from gateway.settings.logs import _without_objects
from gateway.turns.protocol import decode, encode, frame_id

from .parts import Parts, settled

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
# What is linear takes a hundredth of it for a megabyte; what is quadratic takes minutes. CPU time, so that a busy machine changes little.
LIMIT_S = 1.0

TEXTS = {
    "one word and a blank": lambda size: "x" * (size - 1) + " ",
    "blanks": lambda size: " " * size,
    "blank lines": lambda size: " \n" * (size // 2),
    "short words": lambda size: "a " * (size // 2),
    "no characters": lambda size: "\0" * size,
    "opening brackets": lambda size: "<" * size,
    "small files": lambda size: "a:\n```\n\n```\n\n" * (size // 14),
    "a file without an end": lambda size: "a:\n```\n" + "\n```x" * (size // 5),
    "a long fence": lambda size: f"a:\n{'`' * (size // 2)}\n" + "\n`" * (size // 4),
    "braces": lambda size: "{1" * (size // 2),
    "dotted names": lambda size: "a." * (size // 2),
    "titles": lambda size: "title: " * (size // 7),
}
READERS: dict[str, Callable[[str], Any]] = {
    "a draft's whole words": whole_words,
    "a title": title_from,
    "what is stored": clean_text,
    "an excerpt of a search": lambda text: excerpt("a" * 2000 + "b", text[:8000] + "a" * 8000),
    "a line of asyncio's": _without_objects,
}


def seconds(work: Callable[[], Any]) -> float:
    since = time.thread_time()
    work()
    return time.thread_time() - since


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("reader", READERS)
def test_a_megabyte_of_any_text_is_read_in_proportion_to_its_length(reader: str, text: str) -> None:
    given = TEXTS[text](MIB)
    assert seconds(lambda: READERS[reader](given)) < LIMIT_S


@pytest.mark.parametrize("value", ["[]", "{}", "1", '""', "[" * 100 + "]" * 100])
@pytest.mark.parametrize("head", ['{"type":"ping","t":', '{"type":"stop","id":', '{"type":"hello","more":'])
def test_a_frame_of_many_values_costs_no_more_than_its_bytes(head: str, value: str) -> None:
    frame = f"{head}[{','.join([value] * (MIB // (len(value) + 1)))}]}}"

    def read() -> None:
        frame_id(frame)
        try:
            decoded = decode(frame, 2 * MIB)
        except GatewayError:
            return
        encode({"type": "pong", "t": getattr(decoded, "t", None)})

    assert seconds(read) < LIMIT_S / 10


def test_a_pings_value_comes_back_whatever_its_size() -> None:
    for value in ("null", "[1,2]", f'"{"x" * 10_000}"', "[" + "[]," * 5000 + "1]"):
        ping = decode(f'{{"type":"ping","t":{value}}}', MIB)
        assert encode({"t": ping.t}) == f'{{"t":{value}}}'.encode()  # type: ignore[union-attr]


async def test_a_draft_is_not_looked_at_where_none_are_taken_nor_where_it_is_too_long_to_be_asked(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []
    monkeypatch.setattr("gateway.advisories.drafts.whole_words", lambda text: looked_at.append(text) or "")
    parts.drafts.accepts_drafts = False
    parts.drafts.update("ann", "s", None, "What is ")
    parts.drafts.accepts_drafts = True
    parts.drafts._max_chars = lambda: 10
    parts.drafts.update("ann", "s", None, "What is the ")
    assert not looked_at
    parts.drafts.update("ann", "s", None, "What is ")
    await settled()
    assert looked_at == ["What is "]


class Spelled(NamedTuple):
    """A regular expression in our sources. is_anchored: texts are only ever matched from their first character."""

    place: str
    pattern: re.Pattern[str]
    is_anchored: bool

    def read(self, text: str) -> None:
        if self.is_anchored:
            self.pattern.fullmatch(text)
            self.pattern.match(text)
        else:
            for _ in self.pattern.finditer(text):
                pass


def spelled() -> Iterator[Spelled]:
    """Every regular expression that our sources spell out."""
    for package in ("gateway", "engine_bridge", "kvtiers", "overture_client"):
        for path in sorted((ROOT / package).rglob("*.py")):
            source = path.read_text()
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                    uses = re.findall(rf"\b{re.escape(ast.unparse(node.targets[0]))}\.(\w+)\(", source)
                    yield from _spelled_in(
                        node.value, path, bool(uses) and set(uses) <= {"match", "fullmatch"}
                    )
                elif isinstance(node, ast.Call):
                    yield from _spelled_in(node, path, ast.unparse(node.func) in ("re.match", "re.fullmatch"))


def _spelled_in(call: ast.Call, path: Path, is_anchored: bool) -> Iterator[Spelled]:
    name = ast.unparse(call.func)
    if not name.startswith("re.") or not call.args or not isinstance(call.args[0], ast.Constant):
        return
    named = [keyword.value for keyword in call.keywords if keyword.arg == "flags"]
    flags = named or (call.args[1:2] if name == "re.compile" else [])
    flag = eval(ast.unparse(flags[0]), {"re": re}) if flags else 0
    if isinstance(call.args[0].value, str):
        place = f"{path.relative_to(ROOT)}:{call.lineno}"
        yield Spelled(place, re.compile(call.args[0].value, flag), is_anchored)


def test_no_regular_expression_of_ours_takes_the_square_of_a_texts_length() -> None:
    texts = [make(1 << 15) for make in TEXTS.values()]
    # An assigned one is met twice: as what is assigned, which tells how it is used, and as a call.
    found = {each.place: each for each in sorted(spelled(), key=lambda each: each.is_anchored)}
    assert len(found) > 30
    slow = {
        place
        for place, each in found.items()
        if any(seconds(partial(each.read, text)) > LIMIT_S / 5 for text in texts)
    }
    assert not slow
