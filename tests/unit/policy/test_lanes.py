"""How large a request is, and with which others it shares a lane."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_bridge.policy.scheduling.lanes import (
    MAX_LANES,
    MIN_SIZES,
    ONE_LANE,
    RULES,
    Lanes,
    exact_centroids,
    fit,
    knee,
    least_squares,
)
from engine_bridge.policy.scheduling.sizes import HALF_LIFE_REQUESTS, Scale, WeightedSize

ROOT = Path(__file__).parents[3]


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_a_size_is_weighed_as_in_the_paper() -> None:
    scale = Scale(max_input_tokens=1000, max_output_tokens=500, max_rank=128)
    assert scale.weighted_size(1000, 0, 0) == pytest.approx(0.3)
    assert scale.weighted_size(0, 500, 0) == pytest.approx(0.5)
    assert scale.weighted_size(0, 0, 128) == pytest.approx(0.2)
    assert scale.weighted_size(500, 250, 64) == pytest.approx(0.5)


requests = st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 256))


@given(st.lists(requests, max_size=20), requests, requests)
def test_sizes_lie_between_0_and_1_and_grow_with_each_part(
    seen: list[tuple[int, int, int]], small: tuple[int, int, int], more: tuple[int, int, int]
) -> None:
    sizes = WeightedSize()
    for request in seen:
        sizes.seen(*request)
    large = [part + extra for part, extra in zip(small, more, strict=True)]
    assert 0 <= sizes.weighted_size(*small) <= sizes.weighted_size(*large) <= 1 + 1e-12


def test_a_giant_flattens_the_others_for_a_while_only() -> None:
    sizes = WeightedSize()
    for _ in range(100):
        sizes.seen(100, 100, 8)
    before = sizes.weighted_size(100, 100, 8)
    sizes.seen(100_000, 100, 8)
    assert sizes.weighted_size(100, 100, 8) < before - 0.29
    for _ in range(10 * HALF_LIFE_REQUESTS):  # 1,000 fold is ten halvings
        sizes.seen(100, 100, 8)
    assert sizes.weighted_size(100, 100, 8) == pytest.approx(before)


def test_a_maximum_that_one_in_a_hundred_has_stays_within_a_third() -> None:
    sizes = WeightedSize()
    for at in range(1000):
        sizes.seen(100, 1000 if at % 100 == 0 else 10, 0)
        assert sizes.scale.max_output_tokens > 1000 * 2 / 3


def test_a_scale_stays_as_it_was_taken() -> None:
    sizes = WeightedSize()
    sizes.seen(100, 100, 8)
    taken = sizes.scale
    sizes.seen(1000, 1000, 64)
    assert taken.weighted_size(100, 100, 8) == pytest.approx(1.0)
    assert sizes.weighted_size(100, 100, 8) < 0.2


@pytest.mark.parametrize("wrong", [{"a": -0.1}, {"a": 0.0, "b": 0.0, "c": 0.0}, {"half_life_requests": 0}])
def test_weights_and_half_life_are_sensible(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        WeightedSize(**wrong)  # type: ignore[arg-type]


# -- lanes -------------------------------------------------------------------------------------------------------------

centroid_lists = st.lists(st.floats(0, 1), min_size=1, max_size=6)


@given(centroid_lists, st.floats(-1, 2), st.floats(-1, 2))
def test_a_size_goes_to_the_lane_of_the_nearest_centroid(
    centroids: list[float], one: float, other: float
) -> None:
    lanes = Lanes.around(centroids)
    nearest = min(abs(centroid - one) for centroid in lanes.centroids)
    assert abs(lanes.centroids[lanes.lane_of(one)] - one) <= nearest + 1e-12
    assert lanes.lane_of(min(one, other)) <= lanes.lane_of(max(one, other))


def test_lanes_meet_half_way_and_a_boundary_belongs_to_the_larger() -> None:
    lanes = Lanes.around([0.8, 0.2, 0.4])
    assert lanes.boundaries == pytest.approx((0.3, 0.6))
    at = lanes.boundaries[0]
    assert [lanes.lane_of(size) for size in (0.0, at - 1e-9, at, 0.5, 9.0)] == [0, 0, 1, 1, 2]
    assert Lanes.around([0.5, 0.5]).num_lanes == 1
    with pytest.raises(ValueError, match="centroid"):
        Lanes.around([])


# -- clusters ----------------------------------------------------------------------------------------------------------


def within(sizes: Sequence[float], centroids: Sequence[float]) -> float:
    return sum(min((size - centroid) ** 2 for centroid in centroids) for size in sizes)


def best_by_trying(sizes: Sequence[float], num_clusters: int) -> float:
    """The least sum of squares of any cut of sorted sizes into so many runs."""
    ordered = sorted(sizes)
    least = float("inf")
    for cuts in itertools.combinations(range(1, len(ordered)), min(num_clusters, len(ordered)) - 1):
        edges = [0, *cuts, len(ordered)]
        runs = [ordered[first:end] for first, end in itertools.pairwise(edges)]
        means = [sum(run) / len(run) for run in runs]
        least = min(least, sum((size - m) ** 2 for run, m in zip(runs, means, strict=True) for size in run))
    return least


@given(st.lists(st.integers(0, 50).map(float), min_size=1, max_size=9), st.integers(1, 4))
def test_the_clusters_are_the_best_there_are(sizes: list[float], num_clusters: int) -> None:
    centroids = exact_centroids(sizes, num_clusters)
    assert len(centroids) == min(num_clusters, len(set(sizes)))
    assert centroids == sorted(set(centroids))
    assert within(sizes, centroids) == pytest.approx(best_by_trying(sizes, num_clusters), abs=1e-9)


@pytest.mark.parametrize(("sizes", "num"), [([], 2), ([0.5], 0)])
def test_no_sizes_and_no_clusters_are_refused(sizes: list[float], num: int) -> None:
    with pytest.raises(ValueError, match="clusters need sizes"):
        exact_centroids(sizes, num)


@settings(max_examples=50)  # six fits each
@given(st.lists(st.floats(0, 1), min_size=MIN_SIZES, max_size=60), st.randoms(use_true_random=False))
def test_a_fit_does_not_depend_on_the_order_and_has_no_more_lanes_than_allowed(
    sizes: list[float], rng: random.Random
) -> None:
    shuffled = sizes.copy()
    rng.shuffle(shuffled)
    for rule in RULES.values():
        assert fit(sizes, rule) == fit(shuffled, rule)
        assert 1 <= fit(sizes, rule).num_lanes <= MAX_LANES
        assert fit(sizes, rule, max_lanes=2).num_lanes <= 2


def humps(*centres: float, spread: float = 0.02) -> list[float]:
    rng = random.Random(1)
    return [rng.gauss(centre, spread) for _ in range(200) for centre in centres]


@pytest.mark.parametrize(
    ("sizes", "num_lanes"),
    [
        pytest.param([0.3] * 100, 1, id="all alike"),
        pytest.param(humps(0.5, spread=0.05), 1, id="one narrow hump"),
        pytest.param(humps(0.1, 0.9), 2, id="two humps"),
        pytest.param(humps(0.1, 0.4, 0.9), 3, id="three humps"),
        pytest.param(humps(0.5, 0.505, 0.51, 0.515), 1, id="humps that are next to each other"),
    ],
)
def test_the_knee_takes_a_lane_for_each_size_there_is(sizes: list[float], num_lanes: int) -> None:
    lanes = fit(sizes)
    assert lanes.num_lanes == num_lanes
    assert fit(sizes, least_squares).num_lanes == (1 if len(set(sizes)) == 1 else MAX_LANES)


def test_the_knee_looks_past_a_lane_that_gains_little() -> None:
    assert knee([0.5, 0.49, 0.05, 0.04], 1.0) == 2
    assert knee([0.01, 0.009, 0.008], 1.0) == 0
    assert knee([0.0], 0.0) == 0


def test_a_long_window_is_clustered_by_its_quantiles_like_the_whole() -> None:
    sizes = humps(0.1, 0.4, 0.9) * 20
    assert fit(sizes).centroids == pytest.approx(fit(humps(0.1, 0.4, 0.9)).centroids, abs=0.01)


def test_few_sizes_make_one_lane() -> None:
    assert fit([0.1, 0.9] * (MIN_SIZES // 2 - 1)) == ONE_LANE
    assert fit([]) == ONE_LANE


def test_another_clustering_may_be_passed_in() -> None:
    asked: list[int] = []

    def cluster(sizes: Sequence[float], num_clusters: int) -> Sequence[float]:
        asked.append(num_clusters)
        return [0.9, 0.1, 0.1, 0.1][:num_clusters]

    assert fit(humps(0.1, 0.9), cluster=cluster).centroids == (0.1, 0.9)
    assert asked == [1, 2, 3, 4]


# -- purity ------------------------------------------------------------------------------------------------------------


def test_policies_load_nothing_of_engine_or_learning() -> None:
    code = (
        "import importlib, pkgutil, sys, engine_bridge.policy as policy;"
        " [importlib.import_module(found.name) for found in pkgutil.walk_packages(policy.__path__, 'engine_bridge.policy.')];"
        " print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "engine_bridge.policy.scheduling.lanes" in loaded
    assert loaded & {"asyncio", "torch", "vllm", "sklearn", "numpy"} == set()
