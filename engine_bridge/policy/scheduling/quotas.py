"""How many tokens the requests of a lane may hold at a time, and which requests hold them. Pure.

Tokens are input + predicted output. Source: Chameleon §4.2, "Assigning Quotas per Queue" and "Admission to
the Batch".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from msgspec import Struct

from engine_bridge.policy.scheduling.lanes import Lanes, Rule, fit, knee

# The time that a lane's requests may take, as a multiple of their average run. Source: Chameleon §5.1 (five times the average at low load).
SLO_TIMES = 5.0
# Runs shorter than this count as this long, so that an SLO is positive. Chosen.
MIN_RUN_S = 0.001


class LaneLoad(Struct, frozen=True, kw_only=True):
    """A lane's load. largest_tokens: of one request. duration_s: expected run of one. slo_s: the time that it may take, with waiting."""

    largest_tokens: int
    duration_s: float
    arrivals_per_s: float
    slo_s: float


def minimum_tokens(load: LaneLoad) -> float:
    """Return the tokens with which a lane meets its SLO: S·D·(λ + 1/SLO), and never fewer than its largest request.

    Source: Chameleon §4.2, from μ = Tok/(S·D) and 1/(μ − λ) ≤ SLO (formula reconstructed). Departs in the floor: with few arrivals the formula
    falls below one request, and the lane could never start its largest.

    Raises:
        ValueError: the SLO is not positive.
    """
    if load.slo_s <= 0:
        raise ValueError("an SLO is positive")
    queued = load.largest_tokens * load.duration_s * (load.arrivals_per_s + 1 / load.slo_s)
    return max(queued, float(load.largest_tokens), 1.0)


def share(loads: Sequence[LaneLoad], num_tokens: int) -> tuple[int, ...]:
    """Return a quota for each lane; together exactly `num_tokens`.

    Each lane gets its minimum, and a part of the rest in proportion to it. Source: Chameleon §4.2, which takes for granted that the minima fit.
    Where they do not, they all shrink in proportion: it is the same formula, and no SLO can be kept then.

    Raises:
        ValueError: there are no lanes, or fewer than 0 tokens.
    """
    if not loads or num_tokens < 0:
        raise ValueError("quotas are shared among lanes, of tokens that are there")
    minima = [minimum_tokens(load) for load in loads]
    total = sum(minima)
    exact = [num_tokens * minimum / total for minimum in minima]
    quotas = [int(quota) for quota in exact]
    by_rest = sorted(range(len(quotas)), key=lambda lane: (quotas[lane] - exact[lane], lane))
    for lane in by_rest[: max(num_tokens - sum(quotas), 0)]:
        quotas[lane] += 1
    return tuple(quotas)


class SeenRequest(Struct, frozen=True):
    """A request that arrived in the recent window.

    Attributes:
        weighted_size: on the lanes' scale (Chameleon's WRS).
        tokens, duration_s: the real ones, or the predicted ones until it has ended.
    """

    weighted_size: float
    tokens: int
    duration_s: float


def lane_loads(lanes: Lanes, seen: Sequence[SeenRequest], window_s: float) -> tuple[LaneLoad, ...]:
    """Return each lane's load by the requests that came in a window of that length. A lane without any has no load, hence the least quota.

    Each lane has a separate SLO, by how long its requests run. Departs from Chameleon, which has one for all: a lane whose requests run
    for longer than that could never meet it, and the formula would give it nearly everything.
    """
    own: list[list[SeenRequest]] = [[] for _ in range(lanes.num_lanes)]
    for request in seen:
        own[lanes.lane_of(request.weighted_size)].append(request)
    return tuple(_load(requests, window_s) for requests in own)


def _load(requests: Sequence[SeenRequest], window_s: float) -> LaneLoad:
    duration_s = sum(request.duration_s for request in requests) / max(len(requests), 1)
    return LaneLoad(
        largest_tokens=max((request.tokens for request in requests), default=0),
        duration_s=duration_s,
        arrivals_per_s=len(requests) / max(window_s, 1e-9),
        slo_s=SLO_TIMES * max(duration_s, MIN_RUN_S),
    )


def fitted(
    seen: Sequence[SeenRequest], window_s: float, num_tokens: int, rule: Rule = knee
) -> tuple[Lanes, tuple[int, ...]]:
    """Return lanes for requests that came within `window_s`, and each lane's part of `num_tokens`. Raises ValueError for no requests."""
    if not seen:
        raise ValueError("lanes are fitted to requests")
    lanes = fit([request.weighted_size for request in seen], rule)
    return lanes, share(lane_loads(lanes, seen, max(window_s, 1.0)), num_tokens)


def overcharged_tokens(held: Iterable[tuple[int, int]], are_copied_back: bool) -> int:
    """Return how many more tokens running requests are charged, each for its size at its end, than there has to be memory for.

    They do not all end at once: all make a token in a step, so the request with the fewest left leaves first, and the others grow into its room.
    Where a preempted request computes its KV again, there must be memory for the largest sum on the way. Where its KV is copied back, which costs
    next to nothing, a running request counts with the tokens that it holds now: more run at a time, and sometimes one has to pause. A request that
    starts still needs room for its whole prediction, so they do not push each other out at once.

    Args:
        held: of each running request, tokens that it is charged, and how many of these it has still to make.
        are_copied_back: whether preempted requests find their KV in host memory.

    Source: the largest sum is S-LoRA's and LightLLM's estimate (S-LoRA/S-LoRA, slora/server/router/req_queue.py). There it decides which requests
    start, here how much of the quotas can be lent. The other case is ours.
    """
    if are_copied_back:
        return sum(left for _, left in held)
    num_charged = num_held = peak = 0
    # Requests with equally few left may come in any order: the largest sum is the one with the last of them.
    for num, (charged, left) in enumerate(sorted(held, key=itemgetter(1), reverse=True), 1):
        num_charged += charged
        num_held += charged - left  # held now by the requests that still run when this one ends
        if num_held + num * left > peak:
            peak = num_held + num * left
    return num_charged - peak


class Spare:
    """The free tokens as one decision works with them: a copy, so that planning changes nothing."""

    def __init__(self, lane_free: list[int], num_free: int) -> None:
        self.lane_free = lane_free
        """Free tokens of each lane's own quota."""
        self.num_free = num_free
        """Free tokens in total, below zero if requests outgrew them. May be less than the lanes' together, where a lane borrowed."""

    def fits(self, lane: int, tokens: int) -> bool:
        """Return whether the tokens fit the lane's own quota, as far as other lanes have not borrowed it (phase 1)."""
        return tokens <= self.lane_free[lane] and tokens <= self.num_free

    def fits_pool(self, lane: int, tokens: int, kept: set[int]) -> bool:
        """Return whether the tokens fit all that is free, except the unused quota of the `kept` lanes (phase 2)."""
        reserved = sum(self.lane_free[other] for other in kept if other != lane)
        return tokens <= self.num_free - reserved

    def take(self, lane: int, tokens: int) -> None:
        """Plan tokens for a request of the lane; tokens beyond its own quota are borrowed."""
        self.lane_free[lane] = max(self.lane_free[lane] - tokens, 0)
        self.num_free -= tokens


class Ledger:
    """Tracks how many tokens each request holds. All charged tokens come back, by `refund`.

    A lane may hold more than its quota (borrowed in phase 2); all together hold no more than there are, as long as `charge` follows `fits`
    and no request outgrows its guess. A request that has outgrown its guess is charged in full, and none starts until it fits again.

    Raises:
        ValueError: there is no lane, or a quota is negative.
    """

    def __init__(self, quotas: Sequence[int]) -> None:
        self._charges: dict[str, tuple[int, int]] = {}  # lane, tokens
        self._quotas: tuple[int, ...] = ()
        self._used: list[int] = []
        self.resize(quotas)

    def __len__(self) -> int:
        return len(self._charges)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._charges

    @property
    def quotas(self) -> tuple[int, ...]:
        """The share of the device of each lane, in tokens."""
        return self._quotas

    @property
    def used(self) -> tuple[int, ...]:
        """Tokens that each lane's requests hold, borrowed ones included."""
        return tuple(self._used)

    @property
    def num_tokens(self) -> int:
        """The sum of all quotas."""
        return sum(self._quotas)

    @property
    def num_used(self) -> int:
        """Tokens that running requests of all lanes are charged."""
        return sum(self._used)

    def spare(self, num_tokens: int, overcharged_tokens: int = 0) -> Spare:
        """Return the free tokens if only `num_tokens` are there now, and all charges together are too high by `overcharged_tokens`."""
        lane_free = [max(quota - used, 0) for quota, used in zip(self._quotas, self._used, strict=True)]
        return Spare(lane_free, min(num_tokens, self.num_tokens) - self.num_used + overcharged_tokens)

    def charge(self, request_id: str, lane: int, tokens: int) -> None:
        """Charge a request that starts to run. Raises ValueError: it is charged already, there is no such lane, or the tokens are negative."""
        if request_id in self._charges or not 0 <= lane < len(self._used) or tokens < 0:
            raise ValueError(f"cannot charge {tokens} tokens of lane {lane}, or charged before")
        self._charges[request_id] = (lane, tokens)
        self._used[lane] += tokens

    def correct(self, request_id: str, tokens: int) -> int:
        """Raise the charge of a request that outgrew its guess and will hold this many tokens.

        Returns:
            By how much the charge rose: it never falls, and for an unknown request it is 0.
        """
        lane, before = self._charges.get(request_id, (0, tokens))
        if tokens <= before:
            return 0
        self._charges[request_id] = (lane, tokens)
        self._used[lane] += tokens - before
        return tokens - before

    def refund(self, request_id: str) -> int:
        """Note that a request holds nothing any more. Return the tokens that came back, 0 for an unknown request."""
        lane, tokens = self._charges.pop(request_id, (0, 0))
        self._used[lane] -= tokens
        return tokens

    def resize(self, quotas: Sequence[int], lane_of: Mapping[str, int] | None = None) -> None:
        """Take new lanes and quotas, in tokens. Raises ValueError if there is no lane, or a quota is negative.

        lane_of: new lanes of requests that hold tokens; others keep theirs, or the last lane if there are fewer now.
        """
        if not quotas or min(quotas) < 0:
            raise ValueError("there is at least one lane, and no quota is negative")
        self._quotas = tuple(quotas)
        self._used = [0] * len(quotas)
        for request_id, (old, tokens) in self._charges.items():
            lane = min((lane_of or {}).get(request_id, old), len(quotas) - 1)
            self._charges[request_id] = (lane, tokens)
            self._used[lane] += tokens

    def check_invariants(self) -> None:
        """Check the books. Raises AssertionError: a lane's tokens are not the sum of the charges of its requests."""
        sums = [0] * len(self._quotas)
        for lane, tokens in self._charges.values():
            assert tokens >= 0, "a negative charge"
            sums[lane] += tokens
        assert sums == self._used, f"lanes hold {self._used}, their requests {sums}"
