"""How tokens are shared among lanes, and that all of them come back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_bridge.policy.scheduling.lanes import Lanes
from engine_bridge.policy.scheduling.quotas import (
    LaneLoad,
    Ledger,
    SeenRequest,
    fitted,
    lane_loads,
    minimum_tokens,
    overcharged_tokens,
    share,
)


def load(**fields: Any) -> LaneLoad:
    defaults = {"largest_tokens": 100, "duration_s": 2.0, "arrivals_per_s": 3.0, "slo_s": 10.0}
    return LaneLoad(**(defaults | fields))


loads = st.lists(
    st.builds(
        load,
        largest_tokens=st.integers(0, 10_000),
        duration_s=st.floats(0, 100),
        arrivals_per_s=st.floats(0, 100),
        slo_s=st.floats(0.1, 100),
    ),
    min_size=1,
    max_size=4,
)


# -- shares ------------------------------------------------------------------------------------------------------------


def test_the_minimum_is_that_of_the_paper() -> None:
    """With it, 1/(μ − λ) is just the SLO."""
    one = load()
    tokens = minimum_tokens(one)
    assert tokens == pytest.approx(100 * 2.0 * (3.0 + 1 / 10.0))
    per_s = tokens / (one.largest_tokens * one.duration_s)
    assert 1 / (per_s - one.arrivals_per_s) == pytest.approx(one.slo_s)


def test_a_lane_with_few_arrivals_can_still_start_its_largest() -> None:
    assert minimum_tokens(load(arrivals_per_s=0.0)) == 100
    with pytest.raises(ValueError, match="SLO"):
        minimum_tokens(load(slo_s=0.0))


@given(loads, st.integers(0, 100_000))
def test_shares_are_all_there_is_in_proportion_to_the_minima(each: list[LaneLoad], num_tokens: int) -> None:
    quotas = share(each, num_tokens)
    assert sum(quotas) == num_tokens
    minima = [minimum_tokens(one) for one in each]
    for quota, minimum in zip(quotas, minima, strict=True):
        assert quota == pytest.approx(num_tokens * minimum / sum(minima), abs=1.0)
        assert num_tokens < sum(minima) + len(each) or quota >= int(minimum)


def test_what_is_left_over_goes_to_who_lost_most_by_rounding() -> None:
    minima = [load(largest_tokens=tokens, duration_s=0.0) for tokens in (100, 300)]
    assert share(minima, 5) == (1, 4), "1.25 and 3.75"


@pytest.mark.parametrize(("each", "num_tokens"), [([], 100), ([load()], -1)])
def test_what_cannot_be_shared_is_refused(each: list[LaneLoad], num_tokens: int) -> None:
    with pytest.raises(ValueError, match="shared"):
        share(each, num_tokens)


def test_a_window_counts_as_a_second_at_least() -> None:
    seen = [SeenRequest(0.1, 10, 1.0)] * 100 + [SeenRequest(0.9, 1000, 10.0)] * 30
    lanes, quotas = fitted(seen, 1.0, 10**9)
    assert lanes.num_lanes == 2
    assert fitted(seen, 0.1, 10**9)[1] == quotas != fitted(seen, 2.0, 10**9)[1]


def test_what_lanes_have_to_do_is_read_from_a_window() -> None:
    seen = [SeenRequest(0.1, 50, 1.0), SeenRequest(0.2, 70, 3.0), SeenRequest(0.9, 900, 20.0)]
    small, large = lane_loads(Lanes.around([0.1, 0.9]), seen, window_s=10.0)
    assert small == LaneLoad(largest_tokens=70, duration_s=2.0, arrivals_per_s=0.2, slo_s=10.0)
    assert large == LaneLoad(largest_tokens=900, duration_s=20.0, arrivals_per_s=0.1, slo_s=100.0)
    (nothing,) = lane_loads(Lanes.around([0.1]), [], window_s=10.0)
    assert (nothing.largest_tokens, nothing.duration_s, nothing.arrivals_per_s) == (0, 0.0, 0.0)
    assert minimum_tokens(nothing) == 1


def test_one_long_run_takes_nothing_from_lanes_that_it_is_not_in() -> None:
    """Its lane's SLO is by its own runs."""
    seen = [SeenRequest(0.1, 50, 2.0)] * 20 + [SeenRequest(0.9, 900, 20.0)] * 10
    before, after = (
        lane_loads(Lanes.around([0.1, 0.9]), each, 10.0)
        for each in (seen, [*seen, SeenRequest(0.9, 900, 5000.0)])
    )
    assert before[0] == after[0] and before[1].slo_s < after[1].slo_s


# -- what is free ------------------------------------------------------------------------------------------------------


def test_a_lane_borrows_only_from_the_pool_and_leaves_what_is_kept() -> None:
    spare = Ledger([100, 50, 50]).spare(200)
    assert spare.fits(0, 100)
    assert not spare.fits(0, 101)
    assert spare.fits_pool(0, 200, set())
    assert spare.fits_pool(0, 150, {0, 2})
    assert not spare.fits_pool(0, 151, {0, 2})


def test_what_is_planned_beyond_ones_own_comes_from_the_pool() -> None:
    spare = Ledger([100, 50]).spare(150)
    spare.take(0, 120)
    assert not spare.fits(0, 1)
    assert spare.fits_pool(1, 30, {0}), "nothing of its own is left to keep for it"
    assert not spare.fits_pool(1, 31, {0})


def test_what_is_borrowed_is_gone_for_the_lender_until_it_comes_back() -> None:
    ledger = Ledger([100, 100])
    ledger.charge("large", 0, 150)
    assert not ledger.spare(200).fits(1, 51)
    assert ledger.spare(200).fits(1, 50)
    ledger.refund("large")
    assert ledger.spare(200).fits(1, 100)


def test_less_room_than_quotas_counts() -> None:
    assert not Ledger([100, 100]).spare(60).fits(0, 61)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6))
def test_what_is_overcharged_is_never_held_at_one_time(running: list[tuple[int, int]]) -> None:
    """Against every step of what runs, one by one; running: tokens held now and still to be made."""
    charged = sum(held + left for held, left in running)
    most = max(
        (sum(held + step for held, left in running if step <= left) for step in range(31)),
        default=0,
    )
    assert overcharged_tokens([(held + left, left) for held, left in running], False) == charged - most


def test_where_kv_is_copied_back_what_is_held_now_counts() -> None:
    assert overcharged_tokens([(100, 40), (50, 0), (30, 15)], True) == 55
    assert overcharged_tokens([(100, 40)], False) == 0, "one alone will hold it all"


def test_one_that_outgrew_its_guess_stops_others_until_it_ends() -> None:
    ledger = Ledger([100])
    ledger.charge("wrong", 0, 10)
    assert ledger.correct("wrong", 120) == 110
    assert ledger.correct("wrong", 50) == 0, "a charge never falls"
    assert ledger.charged("wrong") == 120
    assert not ledger.spare(100).fits(0, 1)
    assert not ledger.spare(100).fits_pool(0, 1, set())
    assert ledger.refund("wrong") == 120
    assert ledger.spare(100).fits(0, 100)


def test_what_cannot_be_charged_is_refused_and_changes_nothing() -> None:
    ledger = Ledger([100])
    ledger.charge("a", 0, 10)
    for wrong in (("a", 0, 10), ("b", 1, 10), ("b", 0, -1)):
        with pytest.raises(ValueError, match="cannot charge"):
            ledger.charge(*wrong)
    assert ledger.used == (10,)
    assert ledger.refund("unknown") == ledger.correct("unknown", 5) == 0
    for quotas in ([], [-1]):
        with pytest.raises(ValueError, match="lane"):
            ledger.resize(quotas)


class LedgerMachine(RuleBasedStateMachine):
    """Charges within what is free, corrections, refunds and new lanes, against a dict of what each request holds."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger([100, 60, 40])
        self.held: dict[str, int] = {}
        self.lanes: dict[str, int] = {}
        self.num_outgrown = 0
        self.count = 0

    @rule(lane=st.integers(0, 2), tokens=st.integers(0, 120), is_pooled=st.booleans())
    def charge(self, lane: int, tokens: int, is_pooled: bool) -> None:
        lane = min(lane, len(self.ledger.quotas) - 1)
        spare = self.ledger.spare(self.ledger.num_tokens)
        if spare.fits_pool(lane, tokens, set()) if is_pooled else spare.fits(lane, tokens):
            self.count += 1
            name = str(self.count)
            self.ledger.charge(name, lane, tokens)
            self.held[name], self.lanes[name] = tokens, lane
            if tokens and not is_pooled:
                assert self.ledger.used[lane] <= self.ledger.quotas[lane]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.integers(0, 300))
    def correct(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        more = max(tokens - self.held[name], 0)
        assert self.ledger.correct(name, tokens) == more
        self.held[name] += more
        self.num_outgrown += more

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def refund(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        assert self.ledger.refund(name) == self.held.pop(name)
        del self.lanes[name]
        assert self.ledger.refund(name) == 0, "only once"

    @rule(quotas=st.sampled_from([(200,), (50, 150), (100, 60, 40)]), is_moved=st.booleans())
    def resize(self, quotas: tuple[int, ...], is_moved: bool) -> None:
        moves = dict.fromkeys(self.held, 0) if is_moved else {}
        self.ledger.resize(quotas, moves)
        for name in self.held:
            self.lanes[name] = min(moves.get(name, self.lanes[name]), len(quotas) - 1)

    @invariant()
    def nothing_is_lost_or_made_up(self) -> None:
        self.ledger.check_invariants()
        assert self.ledger.num_used == sum(self.held.values())
        sums = [0] * len(self.ledger.quotas)
        for name, tokens in self.held.items():
            sums[self.lanes[name]] += tokens
        assert self.ledger.used == tuple(sums)

    @invariant()
    def no_more_is_held_than_there_is(self) -> None:
        assert self.ledger.num_used <= self.ledger.num_tokens + self.num_outgrown

    def teardown(self) -> None:
        for name in self.held:
            self.ledger.refund(name)
        assert self.ledger.used == (0,) * len(self.ledger.quotas)
        assert len(self.ledger) == 0


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30)


def test_two_kinds_of_requests_become_two_lanes_with_all_tokens_between_them() -> None:
    small = [SeenRequest(0.1 + number / 1000, 50, 1.0) for number in range(50)]
    large = [SeenRequest(0.8 + number / 1000, 900, 20.0) for number in range(50)]
    lanes, quotas = fitted(small + large, 100.0, 10_000)
    assert lanes.num_lanes == len(quotas) == 2
    assert lanes.lane_of(0.12) != lanes.lane_of(0.83)
    assert sum(quotas) == 10_000 and quotas[1] > quotas[0] > 0
    with pytest.raises(ValueError, match="fitted to requests"):
        fitted([], 1.0, 100)
