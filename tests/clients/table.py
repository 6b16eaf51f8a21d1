"""The table of docs/clients.md, and what is printed of failures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.clients.running import Result

BEGIN, END = "<!-- written by make clients -->\n", "<!-- end -->\n"


def rows(results: Iterable[Result]) -> list[str]:
    """The table's lines in Markdown: client, version, calls, failed, remarks."""
    lines = ["| client | version | calls | failed | remarks |", "|---|---|---|---|---|"]
    for result in results:
        package = result.client.package
        name = result.client.name if result.client.name == package else f"{result.client.name} (`{package}`)"
        lines.append(
            f"| {name} | {result.version or '–'} | {len(result.calls)} | {len(result.failed)} | {_remarks(result)} |"
        )
    return lines


def put_into(page: str, table: Sequence[str]) -> str:
    """The page with `table` between its marks. Raises ValueError where the marks are missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The page has no {BEGIN.strip()} with a {END.strip()} after it.")
    return before + BEGIN + "\n".join(table) + "\n" + END + after


def write(path: Path, results: Iterable[Result]) -> None:
    """Put the results' table into the page at `path`."""
    path.write_text(put_into(path.read_text(), rows(results)))


def failures(results: Iterable[Result]) -> list[str]:
    """Lines for a terminal: each failed call with its error and the first lines of its traceback."""
    return [
        line
        for result in results
        for call in result.failed
        for line in (
            f"\n{result.client.name}: {call.name}: {call.error}",
            *(f"    {at}" for at in call.traceback),
        )
    ]


def _remarks(result: Result) -> str:
    hook = ["with the hook of docs/agents.md" if result.client.hook else ""]
    failed = [f"fails: {', '.join(call.name for call in result.failed)}" if result.failed else ""]
    said = "; ".join(text for text in [result.client.remarks, *hook, *failed] if text)
    return re.sub(r"\s+", " ", said).replace("|", "\\|")
