"""Which requests share a lane: sizes are clustered, and lanes meet half way between neighbouring centroids. Pure.

Source: Chameleon §4.2, "Determining the Number of Queues". A fit takes milliseconds (see `exact_centroids`), so it belongs off the engine's thread.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

MAX_LANES = 4  # Source: Chameleon §4.2.
MIN_SIZES = 16  # Fewer say nothing of clusters: one lane. Chosen.
# A further lane must take away this share of all squared sizes. Chosen: sizes alike to within 14% stay in one lane, and evenly spread sizes get
# three.
MIN_GAIN = 0.02
# Number of quantiles that represent a longer window in the exact clustering. Chosen: 10 ms for all of K = 1..4 together.
MAX_SAMPLE = 256

# Chooses one of the candidates, given their within-cluster sums of squares for K = 1, 2, …, and the sum of all squared sizes; returns an index.
Rule = Callable[[Sequence[float], float], int]


@dataclass(frozen=True, slots=True)
class Lanes:
    """Lanes in order of size, the smallest requests' lane first: one for each centroid, which rise strictly."""

    centroids: tuple[float, ...] = (0.0,)
    boundaries: tuple[float, ...] = ()

    @classmethod
    def around(cls, centroids: Sequence[float]) -> Lanes:
        """Return lanes with boundaries at the midpoints of neighbours; equal centroids make one lane. centroids: at least one."""
        rising = sorted(set(centroids))
        return cls(tuple(rising), tuple((low + high) / 2 for low, high in pairwise(rising)))

    @property
    def num_lanes(self) -> int:
        """The number of lanes."""
        return len(self.centroids)

    def lane_of(self, weighted_size: float) -> int:
        """Return the lane of a size, 0 for the smallest. A size on a boundary belongs to the larger lane; no size is too small or too large."""
        return bisect_right(self.boundaries, weighted_size)


ONE_LANE = Lanes()


# -- how many ----------------------------------------------------------------------------------------------------------


def knee(sums_of_squares: Sequence[float], all_squares: float) -> int:
    """Return the smallest K after which no further lane takes away `MIN_GAIN` of all squared sizes. The default.

    Why: the wait behind others grows with the squared sizes of the requests in the same queue (Pollaczek–Khinchine: 1 + CV²), and the part of it
    that lanes remove is the spread within lanes, against all squares. The paper's own rule, the least sum of squares, falls with every K and so
    always takes the largest; and a rule of separation alone (silhouette) would split a narrow hump in halves, since it does not see that the halves
    are alike in size. Further lanes are looked at too: three clusters at equal distances gain little by the second, and much by the third.
    """
    scale = all_squares or 1.0
    return next(
        k
        for k, here in enumerate(sums_of_squares)
        if all(
            (here - other) / scale < MIN_GAIN * more
            for more, other in enumerate(sums_of_squares[k + 1 :], start=1)
        )
    )


def least_squares(sums_of_squares: Sequence[float], all_squares: float) -> int:
    """Return the K with the least sum of squares. Source: Chameleon §4.2; in effect the largest K for which there are distinct sizes."""
    return min(range(len(sums_of_squares)), key=sums_of_squares.__getitem__)


RULES: dict[str, Rule] = {"knee": knee, "least_squares": least_squares}


def fit(sizes: Sequence[float], rule: Rule = knee) -> Lanes:
    """Return lanes for requests like these; one lane where there are fewer than `MIN_SIZES`. sizes: WRS of a recent window, all on one `Scale`."""
    if len(sizes) < MIN_SIZES:
        return ONE_LANE
    ordered = sorted(sizes)
    candidates = [Lanes.around(exact_centroids(ordered, k)) for k in range(1, MAX_LANES + 1)]
    squares = [_within(ordered, lanes) for lanes in candidates]
    return candidates[rule(squares, sum(size * size for size in ordered))]


def _within(ordered: Sequence[float], lanes: Lanes) -> float:
    """Return the sum of squared distances to the nearest centroid."""
    edges = [0, *(bisect_left(ordered, boundary) for boundary in lanes.boundaries), len(ordered)]
    return sum(
        (size - centroid) ** 2
        for centroid, (first, end) in zip(lanes.centroids, pairwise(edges), strict=True)
        for size in ordered[first:end]
    )


# -- exact clustering in one dimension ---------------------------------------------------------------------------------


def exact_centroids(sizes: Sequence[float], num_clusters: int) -> list[float]:
    """Return the centroids of the optimal clustering, rising: fewer than asked for where fewer sizes differ.

    Windows longer than `MAX_SAMPLE` are represented by that number of quantiles. sizes: at least one. num_clusters: at least 1.

    Source: Wang & Song, Ckmeans.1d.dp, The R Journal 3/2, 2011: clusters of sorted numbers are intervals, so dynamic programming finds the
    optimum, and the same one each time, which Lloyd's K-means with its random start does not. The divide and conquer is theirs of 2016:
    the best place for the last cut never moves back as the interval grows.
    """
    points = _quantiles(sorted(sizes), MAX_SAMPLE)
    spread = _Spread(points)
    best = [spread.cost(0, end) for end in range(len(points) + 1)]
    cuts: list[list[int]] = []
    for clusters in range(2, min(num_clusters, len(set(points))) + 1):
        best, cut = _one_more(spread, best, clusters)
        cuts.append(cut)
    return _means(points, cuts)


def _quantiles(ordered: Sequence[float], num: int) -> Sequence[float]:
    if len(ordered) <= num:
        return ordered
    return [ordered[(2 * at + 1) * len(ordered) // (2 * num)] for at in range(num)]


class _Spread:
    """The sum of squared distances from the mean, of any run of sorted points, in constant time."""

    def __init__(self, points: Sequence[float]) -> None:
        # Around the middle point, so that squares do not swallow small differences.
        middle = points[len(points) // 2]
        self._sums = [0.0, *accumulate(point - middle for point in points)]
        self._squares = [0.0, *accumulate((point - middle) ** 2 for point in points)]

    def cost(self, first: int, end: int) -> float:
        """Return the sum for the points from `first` up to, but without, `end`."""
        if end - first < 2:
            return 0.0
        total = self._sums[end] - self._sums[first]
        return max(self._squares[end] - self._squares[first] - total * total / (end - first), 0.0)


def _one_more(spread: _Spread, best: list[float], clusters: int) -> tuple[list[float], list[int]]:
    """Return the costs of the first n points in one cluster more than `best` has them in, and where the last cluster then begins."""
    size = len(best)
    costs, cuts = [0.0] * size, list(range(size))
    todo = [(clusters, size - 1, clusters - 1, size - 1)]
    while todo:
        low, high, first, last = todo.pop()
        if low > high:
            continue
        end = (low + high) // 2
        costs[end], cut = min(
            (best[at] + spread.cost(at, end), at) for at in range(first, min(last, end - 1) + 1)
        )
        cuts[end] = cut
        todo += [(low, end - 1, first, cut), (end + 1, high, cut, last)]
    return costs, cuts


def _means(points: Sequence[float], cuts: list[list[int]]) -> list[float]:
    means: list[float] = []
    end = len(points)
    for cut in reversed(cuts):
        means.append(sum(points[cut[end] : end]) / (end - cut[end]))
        end = cut[end]
    return [sum(points[:end]) / end, *reversed(means)]
