"""How large a request is, and with which others it shares a lane."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.scheduling.lanes import MAX_LANES, exact_centroids, fit, least_squares
from engine_bridge.policy.scheduling.sizes import HALF_LIFE_REQUESTS, WeightedSize


def test_a_giant_flattens_the_others_for_a_while_only() -> None:
    sizes = WeightedSize()
    for _ in range(100):
        sizes.seen(100, 100, 8)
    before = sizes.scale.weighted_size(100, 100, 8)
    sizes.seen(100_000, 100, 8)
    assert sizes.scale.weighted_size(100, 100, 8) < before - 0.29
    for _ in range(10 * HALF_LIFE_REQUESTS):  # 1,000 fold is ten halvings
        sizes.seen(100, 100, 8)
    assert sizes.scale.weighted_size(100, 100, 8) == pytest.approx(before)


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
