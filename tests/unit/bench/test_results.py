"""Kept runs, the page and the plots made of them: figures with units, what falls short first, and nothing that was not measured."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from matplotlib.figure import Figure as Drawing

from bench.emulated.adaptivellm import Bench as AdaptiveBench
from bench.emulated.adaptivellm import _sweeps
from bench.results import limits
from bench.results.__main__ import SIMULATED, check, command_of, made, main, simulate, stale, write
from bench.results.claim import CHANGE, HIGHER, LOWER, RATIO, SHARE, YES, Claim, Figure
from bench.results.claims import CHAMELEON, CLAIMS, GROUPS, MECHANISMS
from bench.results.frontier import frontier
from bench.results.frontier import panel as draw_frontier
from bench.results.lookup import find, rows_of, shown
from bench.results.page import BOUNDED, MARKER, REACHED, SHORT, UNDECIDED, page, top
from bench.results.plots import ARMS, DARK, OTHERWISE, plots
from bench.results.plots import _curves as draw_curves
from bench.results.plots import _panel as draw_panel
from bench.results.runs import ROOT, Run, RunError, commit_of, keep, load
from bench.results.runs import shown as shown_command
from bench.sim.core.tables import Workers
from bench.sim.symphony import Bench as SymphonyBench
from bench.sim.symphony import limit_settings
from bench.sim.symphony_runs import Setting

SVG = "{http://www.w3.org/2000/svg}"
BY_HAND = "\n\n# Notes\n\nby hand: 17 ± 3\n"
KEPT = load()


def run(name: str, date: str = "2026-01-01 00:00", **result: Any) -> Run:
    return Run(name, f"python -m {name}", "abc1234", date, {"cpu": "one", "cores": 2}, 60.0, result)


def claim(what: str, aim: float, path: str = "gain", better: str = HIGHER, unit: str = RATIO) -> Claim:
    return Claim(
        CHAMELEON,
        "C1",
        what,
        unit,
        aim,
        "Fig. 1",
        sim=Figure("sim-x", path),
        live=Figure("live-x", path),
        better=better,
    )


def lines_of(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


def page_of(*claims: Claim, runs: list[Run]) -> str:
    return page(MARKER + BY_HAND, {run.name: run for run in runs}, claims)


# -- claims ------------------------------------------------------------------------------------------------------------


def figures() -> list[Figure]:
    found = [figure for claim in CLAIMS for figure in (claim.sim, claim.live, claim.goal)]
    return [figure for figure in found if isinstance(figure, Figure)]


def bench_of(figure: Figure) -> Path:
    folder, _, name = figure.run.partition("-")
    return ROOT / "bench" / folder / f"{name}.py"


@pytest.mark.parametrize("figure", figures(), ids=str)
def test_every_path_of_a_claim_is_in_a_kept_run_or_names_a_key_of_the_bench(figure: Figure) -> None:
    if find(KEPT, figure) is None:
        first = figure.path.split(".")[0]
        assert re.search(rf"\b{re.escape(first)}\b", bench_of(figure).read_text()), "neither kept nor a key"


def test_the_simulated_figures_of_chameleon_are_all_kept_with_their_spread() -> None:
    rows = [
        row for row in rows_of(CLAIMS, KEPT) if row.claim.sim and row.claim.sim.run == "emulated-chameleon"
    ]
    assert len(rows) == 14
    assert all(row.sim and row.sim.spread for row in rows)


def test_claims_are_told_apart_and_name_known_groups_and_mechanisms() -> None:
    assert len({(claim.group, claim.what) for claim in CLAIMS}) == len(CLAIMS)
    assert {claim.group for claim in CLAIMS} == set(GROUPS)
    assert {part for claim in CLAIMS for part in claim.id.split("–") if part} <= set(MECHANISMS)
    assert all(claim.source for claim in CLAIMS if claim.paper is not None)


def test_of_a_paper_s_range_the_easier_end_is_the_aim_unless_another_is_named() -> None:
    assert Claim(CHAMELEON, "", "", RATIO, (4.0, 8.0)).goal == 4
    assert Claim(CHAMELEON, "", "", CHANGE, (-0.2, -0.4)).goal == -0.2
    assert Claim(CHAMELEON, "", "", CHANGE, (-0.2, -0.4), aim=-0.4).goal == -0.4


# -- finding figures ---------------------------------------------------------------------------------------------------


def test_a_figure_is_found_by_its_keys() -> None:
    found = find({"sim-x": run("sim-x", deep={"9": 3})}, Figure("sim-x", "deep.9", less=1))
    assert found and (found.value, found.spread) == (2, None)


def listed(median: float, paper: float | None, *spread: float) -> dict[str, Any]:
    return {"what": "", "median": median, "paper": paper, "spread": list(spread)}


@pytest.mark.parametrize(
    ("figures", "spread"),
    [
        ([listed(2.5, 2.0, 2.4, 2.6), listed(2.5, 1.5, 1, 9), listed(2.4, 2.0, 1, 9)], (2.4, 2.6)),
        ([listed(2.5, 2.0, 2.4, 2.6), listed(2.5, 2.0, 2.4, 2.6)], (2.4, 2.6)),
        ([listed(2.5, 2.0, 2.4, 2.6), listed(2.5, 2.0, 1, 9)], None),
        ([listed(2.5, None, 2.4, 2.6)], None),
        ([], None),
    ],
)
def test_a_simulated_figure_s_spread_is_that_of_its_median_and_the_paper_s_number(
    figures: list[dict[str, Any]], spread: tuple[float, float] | None
) -> None:
    one = run("sim-x", gain=2.5, parts={"main": {"figures": []}, "more": {"figures": figures}})
    (row,) = rows_of([claim("x", 2.0)], {"sim-x": one})
    assert row.sim and row.sim.spread == spread


def test_a_number_s_spread_stands_under_the_same_path_and_is_shifted_with_it() -> None:
    runs = {"live-x": run("live-x", a={"b": 1.2}, spread={"a": {"b": [1.1, 1.4]}})}
    found = find(runs, Figure("live-x", "a.b", less=1))
    assert found and found.spread == pytest.approx((0.1, 0.4))


@pytest.mark.parametrize("path", ["none", "text", "null", "items.0", "deep.er.still", "deep"])
def test_what_is_no_number_is_not_measured(path: str) -> None:
    runs = {"sim-x": run("sim-x", text="1", null=None, items=[1], deep={"er": 1})}
    assert find(runs, Figure("sim-x", path)) is None


def test_the_whole_run_goes_before_its_parts_and_the_newest_part_before_older_ones() -> None:
    old, new = (
        run("live-x-old", "2026-01-02 00:00", gain=1, more=1),
        run("live-x-new", "2026-01-03 00:00", gain=2),
    )
    others = run("live-xyz", "2026-01-09 00:00", gain=9)
    runs = {run.name: run for run in (old, new, others)}
    of_parts, of_old = find(runs, Figure("live-x", "gain")), find(runs, Figure("live-x", "more"))
    assert of_parts and of_parts.run is new
    assert of_old and of_old.run is old
    whole = find(runs | {"live-x": run("live-x", "2026-01-01 00:00", gain=3)}, Figure("live-x", "gain"))
    assert whole and whole.value == 3


@pytest.mark.parametrize(
    ("value", "better", "is_short"),
    [(1.9, HIGHER, True), (2.0, HIGHER, False), (2.1, LOWER, True), (2.0, LOWER, False)],
)
def test_what_is_on_the_wrong_side_of_its_aim_falls_short(value: float, better: str, is_short: bool) -> None:
    (row,) = rows_of([claim("x", 2.0, better=better)], {"live-x": run("live-x", gain=value)})
    assert row.falls_short is is_short


def test_a_claim_is_short_where_either_the_simulated_or_the_live_figure_is() -> None:
    runs = {"sim-x": run("sim-x", gain=3), "live-x": run("live-x", gain=1)}
    (row,) = rows_of([claim("x", 2.0)], runs)
    assert (row.is_short(row.sim), row.is_short(row.live), row.falls_short) == (False, True, True)


def test_an_aim_that_was_not_measured_makes_nothing_short() -> None:
    stall = Claim(
        "Overture", "E9", "stall", "ms", live=Figure("live-x", "stall"), aim=Figure("live-x", "step")
    )
    (row,) = rows_of([stall], {"live-x": run("live-x", stall=5)})
    assert (row.aim, row.falls_short) == (None, False)
    (row,) = rows_of([stall], {"live-x": run("live-x", stall=5, step=4)})
    assert (row.aim, row.falls_short) == (4, True)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (-0.807, "change", "−80.7%"),
        (4.12, "change", "+412%"),
        (12.9 / 8.7, "ratio", "1.48×"),
        (0.0025, "share", "0.25%"),
        (34.4, "ms", "34.4 ms"),
        (2.3, "s", "2.3 s"),
        (16506, "bytes", "16,506 bytes"),
        (1.0, YES, "yes"),
        (0.0, YES, "no"),
    ],
)
def test_numbers_are_shown_with_their_units(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


# -- the page ----------------------------------------------------------------------------------------------------------


def test_what_falls_short_comes_first_and_is_bold_with_its_spread_and_run() -> None:
    reached, missing, short = claim("reached", 2, "good"), claim("missing", 2, "absent"), claim("short", 2)
    figures = {"main": {"figures": [listed(1.5, 2, 1.25, 1.75)]}}
    text = page_of(reached, missing, short, runs=[run("sim-x", good=2.5, gain=1.5, parts=figures)])
    at = [text.index(f"C1 {name} ") for name in ("short", "missing", "reached")]
    assert at == sorted(at)
    (line,) = lines_of(text, "C1 short")
    assert "| **1.5×** (1.25× … 1.75×) | not measured |" in line
    assert "| 2×, Chameleon Fig. 1 |" in line and "≥ 2×" in line
    assert "[sim-x](results/sim-x.json) abc1234" in line
    assert "**" not in lines_of(text, "C1 reached")[0]
    assert "Of 3 claims 1 fall short, 0 fall short where even" in text
    assert "1 are not measured, 1 reach their aim." in text


def test_what_is_near_a_bound_that_misses_the_aim_too_stands_apart() -> None:
    def bounded(what: str, path: str) -> Claim:
        return replace(claim(what, 2, path), bound=Figure("sim-x", "bound"), live=None)

    text = page_of(
        bounded("near", "near"),
        bounded("far", "far"),
        replace(bounded("nothing", "nothing"), bound=Figure("sim-x", "nothing")),
        replace(bounded("reachable", "near"), aim=1.5),
        runs=[run("sim-x", bound=1.6, near=1.55, far=1.3, nothing=1.0)],
    )
    short, as_all_must = (text.index(f"## {name}\n") for name in (SHORT, BOUNDED))
    assert short < text.index("C1 far") < as_all_must < text.index("C1 near") < text.index("C1 reachable")
    assert "| ≥ 2× | 1.6× |" in lines_of(text, "C1 near")[0]
    assert as_all_must < text.index("C1 nothing")


def test_of_an_error_that_nobody_is_rid_of_a_ninth_more_is_near() -> None:
    def error(what: str) -> Claim:
        return Claim(
            "Chameleon",
            "C1",
            what,
            SHARE,
            0.02,
            "Fig. 1",
            Figure("sim-x", what),
            bound=Figure("sim-x", "bound"),
            better=LOWER,
        )

    text = page_of(
        error("near"),
        error("far"),
        error("less"),
        runs=[run("sim-x", bound=0.09, near=0.0999, far=0.101, less=0.08)],
    )
    short, as_all_must = (text.index(f"## {name}\n") for name in (SHORT, BOUNDED))
    assert short < text.index("C1 far") < as_all_must < text.index("C1 near") < text.index("C1 less")


def test_an_interval_that_spans_the_aim_decides_nothing() -> None:
    names = ("above", "below", "around")
    figures = {"above": 2.3, "below": 1.9, "around": 2.3}
    intervals = {"above": [2.1, 2.4], "below": [1.8, 1.95], "around": [1.9, 2.4]}
    text = page_of(
        *(replace(claim(name, 2, name), live=None) for name in names),
        runs=[run("sim-x", **figures, intervals=intervals)],
    )
    short, undecided, reached = (text.index(f"## {name}\n") for name in (SHORT, UNDECIDED, REACHED))
    assert (
        short
        < text.index("C1 below")
        < undecided
        < text.index("C1 around")
        < reached
        < text.index("C1 above")
    )
    assert "| 2.3× (1.9× … 2.4×) |" in lines_of(text, "C1 around")[0]


def test_each_run_is_listed_with_command_commit_date_machine_and_source() -> None:
    one = Run(
        "live-x", "python -m x", "not recorded", "2026-01-01", {}, None, {}, "transcribed from y", "Odd."
    )
    text = page_of(runs=[run("sim-x"), one])
    assert "| `python -m sim-x` | abc1234 | 2026-01-01 00:00 | one, 2 cores | 60 s |" in text
    (line,) = lines_of(text, "`python -m x`")
    assert line.endswith(
        "| not recorded | 2026-01-01 | not recorded | not recorded | Transcribed from y. Odd. |"
    )


def test_without_runs_nothing_has_a_number_of_ours() -> None:
    text = page(MARKER, {})
    assert f"Of {len(CLAIMS)} claims 0 fall short, " in text
    assert f", {len(CLAIMS)} are not measured, 0 reach their aim." in text
    for row in rows_of(CLAIMS, {}):
        assert not row.is_measured


def test_what_is_by_hand_stays_to_the_byte_and_a_page_without_the_marker_is_refused() -> None:
    again = page("old top\n" + MARKER + BY_HAND, {})
    assert again.endswith(MARKER + BY_HAND)
    assert "old top" not in again
    assert page(again, {}) == again
    with pytest.raises(RunError, match="lacks the line"):
        page("no marker" + BY_HAND, {})


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "bench/results").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "bench/RESULTS.md").write_text(MARKER + BY_HAND)
    return tmp_path


def test_check_passes_after_write_and_fails_when_a_run_a_page_or_a_plot_has_changed(root: Path) -> None:
    folder = root / "bench/results"
    with pytest.raises(RunError, match=r"stale.*RESULTS\.md.*write"):
        check(root, folder)
    write(root, folder)
    check(root, folder)
    (folder / "live-gateway.json").write_text(run("live-gateway", stream_efficiency=0.5).text())
    assert stale(root, folder) == ["bench/RESULTS.md"]
    write(root, folder)
    (root / "docs/plots/symphony.svg").unlink()
    (root / "docs/plots/chameleon.svg").write_text("")
    assert stale(root, folder) == ["docs/plots/symphony.svg", "docs/plots/chameleon.svg"]


def test_the_readme_shows_plots_that_are_made() -> None:
    readme = (ROOT / "README.md").read_text()
    linked = set(re.findall(r"docs/plots/[\w-]+\.svg", readme))
    assert linked == {str(path.relative_to(ROOT)) for path in made() if path.suffix == ".svg"}
    assert "bench/RESULTS.md" in readme.partition("## Evidence")[2].partition("\n## ")[0]


def test_kept_files_name_the_command_the_commit_and_no_path_of_one_machine() -> None:
    for one in KEPT.values():
        assert one.command.startswith("python -m bench."), one.name
        assert one.commit and one.date and one.machine and one.result, one.name
        assert not re.search(r"/(home|root|tmp|work|mnt|Users)/", one.text()), one.name


def test_a_file_that_is_no_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "sim-x.json").write_text('{"command": "x"}')
    with pytest.raises(RunError, match=r"sim-x\.json"):
        load(tmp_path)


def test_a_run_survives_its_file(tmp_path: Path) -> None:
    one = Run("sim-x", "x", "a", "2026-01-01", {"cpu": "é"}, None, {"gain": [1, None]}, "somewhere", "a note")
    (tmp_path / "sim-x.json").write_text(one.text())
    assert load(tmp_path) == {"sim-x": one}


# -- keeping -----------------------------------------------------------------------------------------------------------


def python(code: str) -> list[str]:
    return ["python", "-c", code]


def test_keep_passes_output_through_and_writes_the_last_line_with_the_facts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = keep("sim-x", python("print('a table'); print('{\"gain\": 2}'); print()"), tmp_path)
    assert capfd.readouterr().out == 'a table\n{"gain": 2}\n\n'
    facts = json.loads((tmp_path / "sim-x.json").read_text())
    assert list(facts) == ["command", "commit", "date", "machine", "wall_s", "result"]
    assert facts["result"] == {"gain": 2}
    assert facts["commit"] == commit_of(ROOT) == kept.commit
    assert isinstance(facts["wall_s"], float)
    assert load(tmp_path) == {"sim-x": kept}


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
        keep("sim-x", python(code), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x", "sim-", "sim-X", "../sim-x", "live-x.json", "sim-x-"])
def test_names_say_whether_a_run_is_simulated_emulated_or_live(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="a name is"):
        keep(name, python("print('{}')"), tmp_path)


def test_runs_of_the_emulated_node_have_a_name_of_their_own(tmp_path: Path) -> None:
    assert keep("emulated-x-part", python("print('{}')"), tmp_path).name == "emulated-x-part"


def test_of_absolute_paths_the_command_keeps_the_last_part() -> None:
    words = ["python", "-m", "b", "--data", "/home/me/data.csv", "--to=/var/x/y/", "a/b", "two words"]
    assert shown_command(words) == "python -m b --data data.csv --to=y/ a/b 'two words'"


def test_a_changed_tree_is_marked_but_not_for_what_runs_write(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "bench/results").mkdir(parents=True)
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "bench/RESULTS.md").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = commit_of(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{7,}", commit)
    (tmp_path / "bench/results/sim-x.json").write_text("{}")
    (tmp_path / "bench/RESULTS.md").write_text("2")
    assert commit_of(tmp_path) == commit
    (tmp_path / "bench/results/more.py").write_text("1")
    assert commit_of(tmp_path) == f"{commit}+changes"
    (tmp_path / "bench/results/more.py").unlink()
    (tmp_path / "code.py").write_text("2")
    assert commit_of(tmp_path) == f"{commit}+changes"


def test_one_table_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []
    written: list[bool] = []

    def fake_keep(name: str, command: list[str]) -> None:
        asked.append((name, command))
        if name == "sim-caraserve":
            raise RunError("broken")

    monkeypatch.setattr("bench.results.__main__.keep", fake_keep)
    monkeypatch.setattr("bench.results.__main__.write", lambda: written.append(True))
    with pytest.raises(RunError, match=r"not kept: sim-caraserve$"):
        simulate()
    assert sorted(name for name, _ in asked) == sorted(SIMULATED)
    assert dict(asked)["emulated-chameleon"][:5] == ["python", "-m", "bench.emulated", "chameleon", "--part"]
    assert written == [True]


@pytest.mark.parametrize("name", [name for name, words in SIMULATED.items() if "--part" in words])
def test_the_parts_that_are_kept_of_a_table_are_parts_of_it(name: str) -> None:
    _, _, package, table, *words = command_of(name)
    parts = importlib.import_module(f"{package}.{table}").PARTS
    asked = {words[at + 1] for at, word in enumerate(words) if word == "--part"}
    assert asked and asked <= set(parts)


def swept(**limits: object) -> dict[str, Run]:
    runs = (
        Run(name, "a command", "abc", "2026-01-01", {}, 1.0, {"limits": limits})
        for name in ("sim-symphony-limits", "emulated-adaptivellm-limits")
    )
    return {run.name: run for run in runs}


def test_where_a_mechanism_stops_paying_is_bold() -> None:
    found = list(
        limits.rows(
            swept(
                lead_share={"0": {"saved_ttft": 0.01, "pays": False}, "1": {"saved_ttft": 0.6, "pays": True}},
                host_bytes={
                    "16e9": {"saved_ttft": -2.0, "pays": False},
                    "a trace": {"saved_ttft": 0, "pays": False},
                },
                host_blocks={"10": {"swap": 0.9, "cost": 1.0}, "20": {"swap": 1.25, "cost": 1.3}},
            )
        )
    )
    assert [row[2] for row in found] == [
        "**0: 0.99×**; 1: 0.4×",
        "**16: 3×**; **a trace: 1×**",
        "**10: 0.9×**; 20: 1.25×",
        "**10: 1×**; 20: 1.3×",
    ]
    assert found[0][3] == "[sim-symphony-limits](results/sim-symphony-limits.json) abc"
    assert "## Where it stops paying" not in top([], {})
    assert "| D3 always swapping" in top([], swept(host_blocks={"10": {"swap": 0.9, "cost": 1.0}}))


def test_the_sweeps_are_those_that_the_tables_make() -> None:
    advisories = {sweep.key for sweep in limits.SWEEPS if sweep.run == "sim-symphony-limits"}
    assert advisories == limit_settings(SymphonyBench(Workers(1), (1,), Setting(), Path("none"))).keys()
    swapping = {sweep.key for sweep in limits.SWEEPS if sweep.run == "emulated-adaptivellm-limits"}
    assert (
        swapping
        == _sweeps(AdaptiveBench(Workers(1), (1,), num_requests=1).setting(("OPT-13B", "chatbot"))).keys()
    )


@pytest.mark.parametrize("arguments", [["keep"], ["keep", "sim-x"], ["keep", "sim-x", "--"], ["wrong"]])
def test_a_wrong_call_is_told_how_to_call(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as told:
        main(arguments)
    assert told.value.code == 1
    assert "keep NAME -- COMMAND" in capsys.readouterr().out


def test_checking_imports_no_policy_and_no_engine() -> None:
    code = "import sys, bench.results.__main__; print(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert not {"engine_bridge", "bench.sim", "torch", "vllm"} & set(out.split())


# -- plots -------------------------------------------------------------------------------------------------------------


def everything() -> dict[str, Run]:
    """Runs in which all claims are measured, all wide of the mark, with a spread."""
    found: dict[str, Run] = {"emulated-chameleon": KEPT["emulated-chameleon"]}
    for one in CLAIMS:
        for figure in (one.sim, one.live):
            if figure and find(found, figure) is None:
                result = found.setdefault(figure.run, run(figure.run)).result
                value = -3.456 * (one.paper_ends or (0.5,))[0]
                for tree, leaf in ((result, value), (result.setdefault("spread", {}), [2 * value, -value])):
                    *keys, last = figure.path.split(".")
                    for key in keys:
                        tree = tree.setdefault(key, {})
                    tree[last] = leaf
    return found


STATES = {"kept": KEPT, "no runs": {}, "all measured": everything()}
PLOTS = {f"{name}, {state}": text for state, runs in STATES.items() for name, text in plots(runs).items()}


def labels_of(text: str) -> set[str]:
    return {"".join(label.itertext()) for label in ET.fromstring(text).iter(f"{SVG}text")}


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_is_well_formed_says_what_it_is_and_has_colours_for_a_dark_page(name: str) -> None:
    drawing = ET.fromstring(PLOTS[name])
    title, style = drawing.find(f"{SVG}title"), drawing.find(f"{SVG}style")
    assert title is not None and title.text in labels_of(PLOTS[name])
    assert style is not None and style.text is not None and "prefers-color-scheme: dark" in style.text
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", PLOTS[name].replace(style.text, "")))
    assert used <= set(DARK), "every colour has its like on a dark page"


def test_a_plot_is_drawn_the_same_each_time() -> None:
    assert plots(KEPT) == plots(KEPT)


def test_the_plot_of_a_paper_names_axes_marks_and_numbers_with_units() -> None:
    labels = labels_of(plots(KEPT)["chameleon.svg"])
    assert {"● simulated", "◆ live", "change against the baseline, %", "times the baseline"} <= labels
    assert {"−80.7%", "1.48×"} <= labels
    (row,) = [row for row in rows_of(CLAIMS, KEPT) if row.claim.what.startswith("P99 TTFT at high load")]
    assert row.sim and row.live
    assert {shown(row.sim.value, CHANGE), f"{shown(row.live.value, CHANGE)}*", OTHERWISE} <= labels


def test_marks_stand_where_their_values_are() -> None:
    runs = {"sim-x": run("sim-x", gain=3, spread={"gain": [2, 4]}), "live-x": run("live-x", gain=1)}
    axes = Drawing().add_subplot()
    draw_panel(axes, RATIO, rows_of([claim("x", 2)], runs))
    _, paper, spread, simulated, live = (list(line.get_xdata()) for line in axes.lines)
    assert (paper, spread, simulated, live) == ([2], [2, 4], [3], [1])
    assert axes.get_xscale() == "linear"


def test_ratios_far_apart_are_drawn_by_logarithm() -> None:
    axes = Drawing().add_subplot()
    draw_panel(axes, RATIO, rows_of([claim("x", 2), claim("y", 24)], {}))
    assert axes.get_xscale() == "log"


def test_the_curves_have_a_line_for_each_arm_through_its_medians_and_the_slo() -> None:
    part = KEPT["emulated-chameleon"].result["parts"]["main"]
    axes = Drawing().add_subplot()
    draw_curves(axes, part["curve"], "ttft_p99_s", part["slo_s"])
    *arms, slo = (list(line.get_ydata()) for line in axes.lines)
    assert arms == [[median(one["ttft_p99_s"]) for one in part["curve"][name].values()] for name in ARMS]
    assert set(slo) == {part["slo_s"]}
    labels = labels_of(plots(KEPT)["chameleon-ttft.svg"])
    assert {
        "P99 TTFT, s",
        "P50 TTFT, s",
        "load, requests/s",
        "scheduler alone",
        "what serves by default",
    } <= labels


def test_without_a_run_the_curves_say_so() -> None:
    assert "not measured" in labels_of(plots({})["chameleon-ttft.svg"])


def test_the_frontier_has_a_mark_at_each_orders_means_and_a_stroke_to_its_worst_p99() -> None:
    def row(p50: float, p99: float) -> dict[str, object]:
        change = {"ttft_p50": p50, "ttft_p99": p99}
        return {"setting": "azure", "load": 1.2, "mlq": change, "bounded 0.8": change}

    axes = Drawing().add_subplot()
    draw_frontier(axes, [row(-0.5, 0.0), row(-0.5, 3.0)])
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    assert lines[2] == ([-0.5, -0.5], [1.0, 3.0]) and lines[3] == ([-0.5], [1.0]), (
        "twice, and four times at worst"
    )


def test_the_frontier_is_drawn_the_same_each_time_and_says_when_there_is_none() -> None:
    kept = KEPT["emulated-order"]
    assert frontier(kept) == frontier(kept)
    assert {"P50 TTFT, change", "P99 TTFT, change", "mlq", "bounded 0.8", "vLLM"} <= labels_of(frontier(kept))
    assert "not measured" in labels_of(frontier(None))
