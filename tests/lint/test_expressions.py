"""No regular expression of ours takes the square of a text's length, whatever a client writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.unit.gateway.test_hostile_text import LIMIT_S, TEXTS, seconds

from .sources import ROOT, nodes_of


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
            for node in nodes_of(source):
                if (
                    isinstance(node, ast.Assign)
                    and isinstance(node.value, ast.Call)
                    and _is_of_re(node.value)
                ):
                    uses = re.findall(rf"\b{re.escape(ast.unparse(node.targets[0]))}\.(\w+)\(", source)
                    yield from _spelled_in(
                        node.value, path, bool(uses) and set(uses) <= {"match", "fullmatch"}
                    )
                elif isinstance(node, ast.Call) and _is_of_re(node):
                    yield from _spelled_in(node, path, ast.unparse(node.func) in ("re.match", "re.fullmatch"))


def _is_of_re(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func).startswith("re.")


def _spelled_in(call: ast.Call, path: Path, is_anchored: bool) -> Iterator[Spelled]:
    name = ast.unparse(call.func)
    if not call.args or not isinstance(call.args[0], ast.Constant):
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
