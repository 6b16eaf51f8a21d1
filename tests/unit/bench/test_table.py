"""The harness of the tables, on a scenario whose outcomes are a formula: plays, comparisons, figures and the report."""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import dataclass

import pytest

from bench.emulated.__main__ import COMMANDS
from bench.emulated.table import Bench, Figure, Table, crossing

played: list[Point] = []


@dataclass(frozen=True, slots=True)
class Point:
    """An arm with a load."""

    arm: str
    load: float = 1.0
    seed: int = 0


def serve(point: Point) -> dict[str, float]:
    """Ours takes a half of the base's time at seed 1 and a third at seed 2."""
    played.append(point)
    return {"ttft_s": point.load / (1 + point.seed if point.arm == "ours" else 1)}


def test_each_point_is_played_once_with_every_seed_and_arms_are_compared_seed_by_seed() -> None:
    played.clear()
    found = Bench(serve, (1, 2))
    found.play([Point("ours"), Point("base"), Point("ours")])
    assert found.ratios(Point("ours"), Point("base"), "ttft_s") == pytest.approx((1 / 2, 1 / 3))
    assert found.changes(Point("ours"), Point("base"), "ttft_s") == pytest.approx((-1 / 2, -2 / 3))
    assert played == [Point(arm, seed=seed) for arm in ("ours", "base") for seed in (1, 2)]


@pytest.mark.parametrize(
    ("seconds", "load"),
    [
        ((0.1, 0.2, 0.8), 8.5),
        ((0.1, 0.5, 0.3), 6 + 2 * 0.8614),
        ((0.1, 0.2, 0.3), None),
        ((0.5, 0.6, 0.7), None),
    ],
    ids=["between two loads", "where it first leaves the limit", "it never leaves it", "it left it before"],
)
def test_a_curve_leaves_its_limit_where_the_straight_line_between_logarithms_does(
    seconds: tuple[float, ...], load: float | None
) -> None:
    found = crossing((6, 8, 9), seconds, 0.4)
    assert found == (None if load is None else pytest.approx(load, abs=1e-3))


@pytest.mark.parametrize(
    ("value", "paper", "is_less_better", "is_short"),
    [
        (-0.9, -0.8, True, False),
        (-0.1, -0.8, True, True),
        (1.2, 1.5, False, True),
        (-0.1, None, True, False),
        (0.1, 1.0, None, False),
    ],
)
def test_a_figure_falls_short_on_the_wrong_side_of_the_papers(
    value: float, paper: float | None, is_less_better: bool | None, is_short: bool
) -> None:
    figure = Figure(("x",), (value,), paper, is_less_better)
    assert figure.falls_short is is_short and ("FALLS SHORT" in figure.row()[2]) is is_short
    assert figure.is_compared == (paper is not None and is_less_better is not None)


def part(bench: Bench) -> None:
    values = bench.changes(Point("ours", bench.size), Point("base", bench.size), "ttft_s")
    for name, paper in (("reached", -0.1), ("unknown", None), ("missed", -0.9)):
        assert bench.figure(("changes", name), values, paper) < 0
    bench.note(("gain",), bench.size)


TABLE = Table(
    "emulated-toy",
    "A toy",
    serve,
    {"one": part, "two": part},
    sizes=(7.0, 3.0),
    quick="one",
    seeds=4,
    quick_parts=("one",),
)


@pytest.mark.parametrize(
    ("words", "seeds", "gain", "parts"),
    [
        ([], [1, 2, 3, 4], 7.0, {"one", "two"}),
        (["--quick", "--seed", "5"], [5, 6], 3.0, {"one"}),
        (["--part", "one", "--seeds", "1"], [1], 7.0, {"one"}),
    ],
)
def test_a_command_plays_what_is_asked_and_ends_with_a_line_of_json(
    words: list[str], seeds: list[int], gain: float, parts: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    TABLE.add_arguments(parser)
    TABLE.run(parser.parse_args([*words, "--jobs", "1"]))
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert (result["bench"], result["seeds"], result["gain"]) == ("emulated-toy", seeds, gain)
    assert set(result["parts"]) == parts
    assert f"({len(parts)} of {2 * len(parts)} compared figures fall short" in lines[0]
    first = next(at for at, line in enumerate(lines) if "-- one" in line)
    assert [line.split()[0] for line in lines[first + 1 : first + 4]] == ["changes,"] * 3
    assert [line.split()[1] for line in lines[first + 1 : first + 4]] == ["missed", "reached", "unknown"]
    assert set(result["changes"]) == {"missed", "reached", "unknown"}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_there(name: str) -> None:
    assert importlib.import_module(f"bench.emulated.{name}").TABLE.parts
