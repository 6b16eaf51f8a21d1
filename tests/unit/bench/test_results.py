"""Kept runs, the page and the plots made of them: figures with units, what falls short first, and nothing that was not measured."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bench.results.__main__ import SIMULATED, check, write
from bench.results.claims import CLAIMS, GROUPS, MECHANISMS, WITHOUT_NUMBER, Claim
from bench.results.lookup import find, rows_of
from bench.results.page import REACHED, SHORT, UNDECIDED, page
from bench.results.runs import ROOT, Run, RunError, commit_of, keep, load

KEPT = load()


def run(name: str, date: str = "2026-01-01 00:00", **result: Any) -> Run:
    return Run(name, f"python -m {name}", "abc1234", date, {"cpu": "one", "cores": 2}, 60.0, result)


def claim(what: str, aim: float, path: str = "gain", better: str = "higher", unit: str = "ratio") -> Claim:
    return Claim(
        "Chameleon",
        "C1",
        what,
        unit,
        aim,
        "Fig. 1",
        sim=f"emulated-x:{path}",
        live=f"live-x:{path}",
        better=better,
    )


# -- claims ------------------------------------------------------------------------------------------------------------


def test_one_command_renews_every_run_in_virtual_time() -> None:
    assert SIMULATED.keys() == {name for name in KEPT if name.startswith("emulated-")}


@pytest.mark.parametrize("name", KEPT)
def test_the_command_of_a_kept_run_is_still_there(name: str) -> None:
    python, _, module, *arguments = KEPT[name].command.split()
    assert python == "python" and find_spec(module) is not None
    assert module != "bench.emulated" or find_spec(f"{module}.{arguments[0]}") is not None


def test_every_path_of_a_claim_is_in_a_kept_run_or_names_a_key_of_the_bench() -> None:
    for place in (place for claim in CLAIMS for place in (claim.sim, claim.live, claim.goal)):
        if isinstance(place, str) and place and find(KEPT, place) is None:
            run, _, path = place.partition(":")
            folder, _, name = run.partition("-")
            text = (ROOT / "bench" / folder / f"{name}.py").read_text()
            assert re.search(rf"\b{re.escape(path.split('.')[0])}\b", text), (
                f"{place}: neither kept nor a key"
            )


def test_claims_are_told_apart_and_name_known_groups_and_mechanisms() -> None:
    assert len({(claim.group, claim.what) for claim in CLAIMS}) == len(CLAIMS)
    assert {claim.group for claim in CLAIMS} == set(GROUPS)
    assert {part for claim in CLAIMS for part in claim.id.split("–") if part} <= set(MECHANISMS)
    assert all(claim.source for claim in CLAIMS if claim.paper is not None)


# -- finding figures ---------------------------------------------------------------------------------------------------


def test_what_is_no_number_is_not_measured() -> None:
    result = {"text": "1", "null": None, "items": [1], "deep": {"er": 3}}
    runs = {"emulated-x": run("emulated-x", **result, spread={"deep": {"er": [2, 5]}})}
    for path in ("none", "text", "null", "items.0", "deep.er.still", "deep"):
        assert find(runs, f"emulated-x:{path}") is None
    found = find(runs, "emulated-x:deep.er - 1")
    assert found and (found.value, found.spread) == (2, (1, 4)), "one is taken from both"


def test_the_whole_run_goes_before_its_parts_and_the_newest_part_before_older_ones() -> None:
    old, new = (
        run("live-x-old", "2026-01-02 00:00", gain=1, more=1),
        run("live-x-new", "2026-01-03 00:00", gain=2),
    )
    others = run("live-xyz", "2026-01-09 00:00", gain=9)
    runs = {run.name: run for run in (old, new, others)}
    of_parts, of_old = find(runs, "live-x:gain"), find(runs, "live-x:more")
    assert of_parts and of_parts.run is new
    assert of_old and of_old.run is old
    whole = find(runs | {"live-x": run("live-x", "2026-01-01 00:00", gain=3)}, "live-x:gain")
    assert whole and whole.value == 3


def test_an_aim_that_was_not_measured_makes_nothing_short() -> None:
    stall = Claim("Overture", "E9", "stall", "ms", live="live-x:stall", aim="live-x:step")
    (row,) = rows_of([stall], {"live-x": run("live-x", stall=5)})
    assert (row.aim, row.falls_short) == (None, False)
    (row,) = rows_of([stall], {"live-x": run("live-x", stall=5, step=4)})
    assert (row.aim, row.falls_short) == (4, True)


# -- the page ----------------------------------------------------------------------------------------------------------


def page_of(*claims: Claim, **result: Any) -> str:
    return page({"emulated-x": run("emulated-x", **result)}, claims)


def test_what_falls_short_comes_first_and_is_bold_with_its_spread_and_run() -> None:
    reached, missing, short = (
        replace(claim(name, 2, path), note="why", bound="emulated-x:bound")
        for name, path in (("reached", "good"), ("missing", "absent"), ("short", "gain"))
    )
    listed = {"what": "", "median": 1.5, "paper": 2, "spread": [1.25, 1.75]}
    parts = {"main": {"figures": [listed, listed | {"paper": 1, "spread": [0, 9]}]}}
    text = page_of(reached, missing, short, good=2.5, gain=1.5, bound=1.6, parts=parts)
    lines = [line for line in text.splitlines() if line.startswith("| C1")]
    assert [line.split()[2] for line in lines] == ["short", "missing", "reached"]
    assert "| **[1.5×](results/emulated-x.json)** (1.25× … 1.75×), bound 1.6× | not measured |" in lines[0]
    assert "| 2×, Chameleon Fig. 1 |" in lines[0] and "≥ 2×" in lines[0] and "(why)" in lines[0]
    assert "**" not in lines[2] and "(why)" not in lines[2]
    assert "Of 3 claims 1 fall short, 0 are undecided, 1 are not measured, 1 reach their aim." in text


def test_an_interval_that_spans_the_aim_decides_nothing() -> None:
    figures = {"above": 2.3, "below": 1.9, "around": 2.3}
    intervals = {"above": [2.1, 2.4], "below": [1.8, 1.95], "around": [1.9, 2.4]}
    claims = (replace(claim(name, 2, name), live="") for name in figures)
    text = page_of(*claims, **figures, intervals=intervals)
    marks = (f"## {SHORT}", "C1 below", f"## {UNDECIDED}", "C1 around", f"## {REACHED}", "C1 above")
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    assert "C1 around | 2×, Chameleon Fig. 1 | [2.3×](results/emulated-x.json) (1.9× … 2.4×) |" in text


def test_every_mechanism_has_a_row_or_a_test_and_the_page_is_short() -> None:
    named = {part for claim in CLAIMS for part in claim.id.split("–")}
    ranges = {f"{letter}{number}" for letter, last in (("A", 4), ("C", 9)) for number in range(1, last + 1)}
    assert set(MECHANISMS) - ranges - named == set(WITHOUT_NUMBER)
    assert all((ROOT / path).is_file() for path in WITHOUT_NUMBER.values())
    assert len(CLAIMS) <= 65
    assert len(page(KEPT).splitlines()) <= 110, "two screens"
    assert f"{len(CLAIMS)} are not measured, 0 reach their aim." in page({})


# -- files -------------------------------------------------------------------------------------------------------------


def test_check_passes_after_write_and_fails_when_a_run_or_a_plot_has_changed(tmp_path: Path) -> None:
    folder = tmp_path / "bench/results"
    folder.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    write(tmp_path, folder)
    check(tmp_path, folder)
    readme, plots = (ROOT / "README.md").read_text(), {path.name for path in tmp_path.glob("docs/plots/*")}
    assert set(re.findall(r"docs/plots/([\w-]+\.svg)", readme)) == plots, (
        "the README shows those that are made"
    )
    (folder / "live-gateway.json").write_text(run("live-gateway", stream_efficiency=0.5).text())
    (tmp_path / "docs/plots/symphony.svg").unlink()
    (tmp_path / "docs/plots/chameleon.svg").write_text("")
    with pytest.raises(
        RunError, match=r"stale: bench/RESULTS.md, docs/plots/symphony.svg, docs/plots/chameleon.svg; "
    ):
        check(tmp_path, folder)


def test_kept_files_name_the_command_the_commit_and_no_path_of_one_machine() -> None:
    for one in KEPT.values():
        assert one.command.startswith("python -m bench."), one.name
        assert one.commit and one.date and one.machine and one.result, one.name
        assert not re.search(r"/(home|root|tmp|work|mnt|Users)/", one.text()), one.name


# -- keeping -----------------------------------------------------------------------------------------------------------


def test_keep_passes_output_through_and_writes_the_last_line_with_the_facts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = keep("emulated-x", ["python", "-c", "print('a table'); print('{\"gain\": 2}'); print()"], tmp_path)
    assert capfd.readouterr().out == 'a table\n{"gain": 2}\n\n'
    facts = json.loads((tmp_path / "emulated-x.json").read_text())
    assert list(facts) == ["command", "commit", "date", "machine", "wall_s", "result"]
    assert facts["result"] == {"gain": 2}
    assert facts["commit"] == commit_of(ROOT) == kept.commit
    assert isinstance(facts["wall_s"], float)
    assert load(tmp_path) == {"emulated-x": kept}
    (tmp_path / "emulated-x.json").write_text('{"command": "x"}')
    with pytest.raises(RunError, match=r"emulated-x\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print('{}'); raise SystemExit(3)", "exit status 3"),
        ("print('{\"is_recorded\": false}')", "recorded data were missing"),
        ("print('{}'); print('done')", "no JSON object"),
        ("print('[1]')", "no JSON object"),
        ("", "no JSON object"),
    ],
)
def test_a_command_that_fails_or_ends_in_no_json_object_is_not_kept(
    tmp_path: Path, code: str, why: str
) -> None:
    with pytest.raises(RunError, match=why):
        keep("emulated-x", ["python", "-c", code], tmp_path)
    assert not list(tmp_path.iterdir())
