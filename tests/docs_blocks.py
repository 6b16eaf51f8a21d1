"""The blocks of README and docs: which of them are commands, and which of those can run here.

A block of commands says so behind its fence: ```bash or ```python. One that cannot run in a test says why: ```bash skip: it needs root.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.conftest import ROOT

SKIP = " skip: "
_FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block. language: "" for what is no command; why_not: why it is not run, "" for one that is."""

    page: Path
    line: int
    language: str
    why_not: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """README, CONTRIBUTING, and all of docs but the decisions, which tell of their time."""
    docs = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "operations").glob("*.md")])
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCED.finditer(text):
        language, _, why_not = found[1].partition(SKIP)
        yield Block(page, text.count("\n", 0, found.start()) + 1, language, why_not, found[2])
