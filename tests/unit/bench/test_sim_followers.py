"""The bench of who comes next: its accounts against sums made by hand, and that ours loses to "this agent again" nowhere."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from bench.sim import followers as bench
from bench.sim.agent_runs import MADE, Call, Run, read
from bench.sim.followers import Promises, calibration_error, events, replay

SESSION = ("run", "agent")


def test_a_promise_comes_true_while_it_lives_and_not_after() -> None:
    promises = Promises()
    promises.make(SESSION, 0.8, until_s=10.0, now=0.0)
    assert promises.keep(SESSION, 10.0)
    promises.make(SESSION, 0.6, until_s=20.0, now=10.0)
    assert not promises.keep(SESSION, 21.0)
    assert not promises.keep(SESSION, 22.0)  # nothing was promised
    assert promises.outcomes == [(0.8, True), (0.6, False)]


def test_what_is_promised_again_while_it_lives_counts_once_and_lives_longer() -> None:
    promises = Promises()
    promises.make(SESSION, 0.8, until_s=10.0, now=0.0)
    promises.make(SESSION, 0.9, until_s=15.0, now=5.0)
    assert promises.keep(SESSION, 14.0)
    assert promises.outcomes == [(0.8, True)]


def test_what_is_promised_again_after_it_has_lapsed_counts_twice() -> None:
    promises = Promises()
    promises.make(SESSION, 0.8, until_s=10.0, now=0.0)
    promises.make(SESSION, 0.9, until_s=25.0, now=20.0)
    promises.end()
    assert promises.outcomes == [(0.8, False), (0.9, False)]


def test_calibration_is_off_by_what_was_said_too_much_or_too_little_in_each_bin() -> None:
    sure = [(0.95, True)] * 9 + [(0.95, False)]  # said 0.95, came 0.9
    doubtful = [(0.25, True)] * 5 + [(0.25, False)] * 5  # said 0.25, came 0.5
    assert calibration_error(sure) == pytest.approx(0.05)
    assert calibration_error(sure + doubtful) == pytest.approx(0.15)
    assert calibration_error([]) == 0.0


def run_of(agents: str) -> Run:
    return [Call(2.0 * place, 2.0 * place + 1, agent) for place, agent in enumerate(agents)]


def test_the_rule_foresees_whoever_was_there_before() -> None:
    """A B A: of two later calls the second A is foreseen; of three promises one comes true."""
    result = replay(events([run_of("ABA")], random.Random(1), 1.0)).result()
    assert result["num_calls"] == 2
    assert (result["trivial_precision"], result["trivial_recall"]) == (pytest.approx(1 / 3, abs=1e-4), 0.5)


def test_a_file_s_runs_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("run,at_s,agent,end_s\nx,3,b,4\nx,0,a,\ny,0,a,9\n")
    first, second = read(path)
    assert first == [Call(0.0, pytest.approx(2.7), "a"), Call(3.0, 4.0, "b")]
    assert second == [Call(0.0, 9.0, "a")]


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("run,time\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        read(path)


@pytest.mark.parametrize("name", MADE)
def test_ours_is_no_worse_than_the_rule_and_means_what_it_says(name: str) -> None:
    """On seeds that nothing was chosen by; the bench itself takes more of them."""
    whole = bench.Tally()
    for seed in (901, 902, 903):
        rng = random.Random(f"{name} {seed}")
        whole.add(replay(events(MADE[name](rng), rng, 3.0)))
    result = whole.result()
    assert result["precision_vs_trivial"] >= 0.99
    assert result["recall_vs_trivial"] >= 0.99
    assert result["calibration_error"] <= 0.12


def test_the_line_of_json_has_the_worst_of_all_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("run,at_s,agent\n" + "".join(f"{run},{at},a\n" for run in range(9) for at in range(4)))
    command = ["followers", "--csv", str(path), "--data", "mine", "--data", "roles", "--seeds", "1", "--json"]
    monkeypatch.setattr(sys, "argv", command)
    bench.main()
    result = json.loads(capsys.readouterr().out)
    assert [data["data"] for data in result["data"]] == ["mine", "roles"]
    for key, worst in (("precision_vs_trivial", min), ("recall_vs_trivial", min), ("calibration_error", max)):
        assert result[key] == worst(data[key] for data in result["data"])
