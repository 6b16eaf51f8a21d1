"""README and docs: each link leads somewhere, and each block of commands says that it is one, and why it is not run where it is not."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docs_blocks import blocks, pages

LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(
    r"^(?:sudo |\.venv/bin/)?(?:make|overture|docker|pip|python3?|curl|git|systemctl) ", re.MULTILINE
)
ALL = [*pages(), ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "decisions").glob("*.md"))]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        assert not anchor or other.suffix != ".md" or anchor in anchors(other), target


def test_each_block_of_commands_says_so_and_is_run_or_says_why_not() -> None:
    for page in pages():
        for block in blocks(page):
            assert block.language in ("", "bash", "python", "toml", "yaml", "json"), block.place
            assert block.language or not COMMAND.search(block.text), (
                f"{block.place}: these are commands: ```bash"
            )
        text = page.read_text(encoding="utf-8")
        indented = re.search(
            r"(?m)^\n    (?:sudo |\.venv/bin/)?(?:make|overture|docker|pip|python3?|curl) ", text
        )
        assert indented is None, f"{page}: fence the commands, so that they are run: ```bash"
