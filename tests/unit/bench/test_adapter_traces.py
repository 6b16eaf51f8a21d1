"""Traffic for the adapter cache: the same for the same seed, whatever its temper, and read from files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from bench.sim.adapter_cache import over_lru, verdict
from bench.sim.adapter_traces import TEMPERS, generated, read_uses


@pytest.mark.parametrize("temper", TEMPERS)
def test_a_temper_is_the_same_for_the_same_seed_and_has_as_many_requests_as_asked(temper: str) -> None:
    first, again, other = (generated(temper, seed, 0.1, 900) for seed in (1, 1, 2))
    assert first == again and first != other
    assert len(first.uses) == 900
    assert all(first.sizes[use.adapter_id] > 0 for use in first.uses)
    assert [use.at_s for use in first.uses] == sorted(use.at_s for use in first.uses)


def test_bursts_repeat_the_one_before_and_a_loop_never_does() -> None:
    def num_repeats(temper: str) -> int:
        uses = generated(temper, 3, 0.1, 2000).uses
        return sum(a.adapter_id == b.adapter_id for a, b in pairwise(uses))

    assert num_repeats("bursts") > 0.43 * 1999 * 0.9
    assert num_repeats("loops") == 0


@pytest.mark.parametrize(
    "text",
    [
        "time,adapter,bytes\n10.5,a,100\n10,b,200\n12,a,100\n",
        "adapter,model,time,bytes\na,x,10.5,100\nb,x,10,200\na,x,12,100\n",
        "10.5,a,100\n10,b,200\n12,a,100\n",
        "time,adapter,bytes\n2026-01-01 00:00:10.5,a,100\n2026-01-01 00:00:10,b,200\n2026-01-01 00:00:12,a,100\n",
    ],
)
def test_a_file_is_read_with_its_columns_in_any_order_and_in_order_of_time(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    workload = read_uses(path, seed=1, cache_share=0.5)
    assert [(use.at_s, use.adapter_id) for use in workload.uses] == [(0.0, 0), (0.5, 1), (2.0, 1)]
    assert workload.sizes == [200, 100] and workload.cache_bytes == 150


def test_bytes_that_a_file_does_not_say_are_dealt_by_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("".join(f"{at},adapter-{at % 20}\n" for at in range(40)))
    assert read_uses(path, 1, 0.1) == read_uses(path, 1, 0.1)
    assert read_uses(path, 1, 0.1).sizes != read_uses(path, 2, 0.1).sizes


@pytest.mark.parametrize("text", ["", "time,adapter\n", "1\n2\n"])
def test_a_file_without_requests_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match="no requests"):
        read_uses(path, 1, 0.1)


def run(traffic: str, policy: str, waits_ms: list[float]) -> dict[str, object]:
    where = {"part": "tempers", "traffic": traffic, "cache_share": 0.05, "policy": policy}
    return where | {"wait_mean_ms": waits_ms, "bytes_moved": [10, 10], "hit_rate": [0.5, 0.5]}


def test_the_verdict_is_the_worst_tempers_mean_over_seeds() -> None:
    policies = ("adaptive", "greedy_dual", "expected_gain", "expected_gain, 20 s", "clairvoyant")
    runs = [run(traffic, "lru", [2.0, 8.0]) for traffic in ("stationary", "jobs")]
    runs += [run("stationary", policy, [1.0, 4.0]) for policy in policies]
    runs += [run("jobs", policy, [1.0, 16.0]) for policy in policies]
    result = verdict(runs)
    assert (result["worst_vs_lru"], result["worst_at"]) == (1.0, "jobs 5%")
    assert (result["stationary_vs_lru"], result["worst_run_vs_lru"]) == (0.5, 2.0)


def test_a_trace_on_which_neither_loses_anything_counts_as_equal() -> None:
    assert over_lru({"x": [0.0, 3.0]}, {"x": [0.0, 6.0]}, "x") == [1.0, 0.5]
