"""The clients' table: what a script's lines come to, what goes into the page, and modules that stand for others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.live.shared.report import ROOT
from tests.clients import table
from tests.clients.catalog import CLIENTS, HOOK_TESTS, Client
from tests.clients.environments import EMPTY_CLASSES, add_empty_module
from tests.clients.running import Outcome, Result, outcomes


def line(name: str, **more: object) -> str:
    return json.dumps({"call": name, "ok": not more, **more})


def exact_versions(listing: Path) -> dict[str, str]:
    """What a list for pip or a package.json for npm names, each with its version."""
    text = listing.read_text()
    if listing.suffix == ".json":
        found: dict[str, str] = json.loads(text)["dependencies"]
        return found
    pins = [pin.partition("==") for pin in text.splitlines() if not pin.startswith("#")]
    return {name.lower(): version for name, _, version in pins}


def test_every_client_has_its_script_and_its_exact_versions() -> None:
    assert len(CLIENTS) == len({client.name for client in CLIENTS}) >= 25
    for client in CLIENTS:
        assert client.script.is_file() and client.requirements.is_file(), client.name
        versions = exact_versions(client.requirements)
        assert all(re.match(r"\d[\w.]*(\+cpu)?$", version) for version in versions.values()), versions
        assert client.package in versions and (client.script.suffix == ".py" or "node" in versions), (
            client.name
        )
    assert (ROOT / HOOK_TESTS).is_file()


def test_each_line_of_a_script_is_a_call_whatever_the_client_prints_between() -> None:
    lines = ["Hello!", line("plain"), line("tool", error="no", traceback=["at"]) + "more of a stream", "{}"]
    compact = ['{"call":"plain","ok":true}', '{"call":"tool","ok":false,"error":"no","traceback":["at"]}']
    for printed in (lines, compact):  # by Python and by JavaScript
        assert outcomes(printed, 0, "") == [Outcome("plain"), Outcome("tool", "no", ("at",))]


@pytest.mark.parametrize(("lines", "status"), [([line("plain")], 1), ([], 0), ([], -9)])
def test_a_script_that_ends_early_or_says_nothing_has_failed(lines: list[str], status: int) -> None:
    *_, last = outcomes(lines, status, "Traceback\nImportError: no such thing")
    assert last.error and last.traceback[-1] == "ImportError: no such thing"


def test_the_page_keeps_what_stands_around_the_table() -> None:
    result = Result(Client("a", "a", "a", remarks="one | two"), "1.0", [Outcome("x"), Outcome("y", "no")])
    page = f"before\n{table.BEGIN}old\n{table.END}after\n"
    made = table.put_into(page, table.rows([result]))
    assert (
        made.startswith(f"before\n{table.BEGIN}")
        and made.endswith(f"{table.END}after\n")
        and "old" not in made
    )
    assert "| a | 1.0 | 2 | 1 | one \\| two; fails: y |" in made
    assert table.put_into(made, table.rows([result])) == made
    with pytest.raises(ValueError, match="no <!-- written"):
        table.put_into("a page", [])


def test_classes_of_empty_modules_can_be_derived_from_together(tmp_path: Path) -> None:
    (tmp_path / "overture_empty.py").write_text(EMPTY_CLASSES)
    for name in ("first.inner", "second"):
        add_empty_module(tmp_path, name)
    code = "from first.inner import A; from second import B; import first\nclass C(A, B.nested): pass\nraise C('x')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.strip().endswith("C: x")
