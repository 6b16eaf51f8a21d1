"""The policy that learns: how far back to look, and whom of its shadow caches to follow."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bench.sim.adapter_cache import Device, Link
from bench.sim.adapter_traces import Use, Workload
from engine_bridge.policy.adapters.adapter_cache import AdapterLru, choose_victims
from engine_bridge.policy.adapters.adaptive_eviction import HALF_LIVES, Adaptive, RequestShares, ShadowCache
from engine_bridge.policy.adapters.cached_adapter import AdapterEvictionPolicy, CachedAdapter, UseWindow

RELOAD_S_PER_BYTE = 1e-3


def facts(adapter_id: int, now: float, num_bytes: int = 100, num_requests: int = 0) -> CachedAdapter:
    return CachedAdapter(
        adapter_id=adapter_id,
        num_bytes=num_bytes,
        last_used_s=now,
        uses=0.0,
        reload_s=num_bytes * RELOAD_S_PER_BYTE,
        num_requests=num_requests,
    )


def ask(policy: AdapterEvictionPolicy, adapter_ids: Iterable[int]) -> None:
    """Requests one after the other."""
    for adapter_id in adapter_ids:
        policy.touched(facts(adapter_id, 0.0, num_requests=1), 0.0)
        policy.touched(facts(adapter_id, 0.0), 0.0)


def order(policy: AdapterEvictionPolicy, *adapters: CachedAdapter) -> list[int]:
    return [adapter.adapter_id for adapter in policy.order(adapters, 0.0)]


# -- shares ------------------------------------------------------------------------------------------------------------


def test_each_half_life_has_its_own_share_and_all_shares_add_up_to_1() -> None:
    shares = RequestShares()
    for adapter_id in [1] * 64 + [2]:
        shares.used(adapter_id)
    short, long = shares.of(2)[0], shares.of(2)[-1]
    assert short == pytest.approx(0.5, abs=1e-6), "of the last two requests, which count 1, 1/2, 1/4 …"
    assert long == pytest.approx(1 / 65, rel=0.01)
    assert shares.mixed(1) + shares.mixed(2) == pytest.approx(1.0)
    assert shares.mixed(3) == 0.0


def taught(adapter_ids: Iterable[int]) -> RequestShares:
    shares = RequestShares()
    for adapter_id in adapter_ids:
        if adapter_id in shares:
            shares.learn(adapter_id)
        shares.used(adapter_id)
    return shares


def test_trust_goes_to_long_memory_where_popularity_stays_and_to_short_where_it_moves() -> None:
    rng = random.Random(1)
    still = taught(rng.choices(range(40), [1 / (1 + place) for place in range(40)], k=3000))
    moving = taught(adapter_id for first in range(0, 4000, 2) for adapter_id in (first, first + 1, first))
    long = sum(trust for trust, half_life in zip(still.trust, HALF_LIVES, strict=True) if half_life >= 256)
    short = sum(trust for trust, half_life in zip(moving.trust, HALF_LIVES, strict=True) if half_life <= 4)
    assert long > 0.9 and short > 0.9


@given(st.lists(st.integers(0, 20), max_size=80))
def test_trust_stays_a_distribution_that_rules_nothing_out(adapter_ids: list[int]) -> None:
    shares = taught(adapter_ids)
    assert sum(shares.trust) == pytest.approx(1.0)
    assert min(shares.trust) > 0


def test_no_more_adapters_are_counted_than_agreed_and_the_longest_unused_is_forgotten() -> None:
    shares = RequestShares(max_adapters=2)
    assert [shares.used(adapter_id) for adapter_id in (1, 2, 1, 3)] == [None, None, None, 2]
    assert len(shares) == 2 and 2 not in shares


# -- shadows -----------------------------------------------------------------------------------------------------------


def test_a_shadow_loses_what_its_misses_took_to_load() -> None:
    shadow = ShadowCache(lambda adapter_id: 1 / adapter_id)
    for adapter_id in (1, 2, 3):
        shadow.enter(facts(adapter_id, 0.0), room_bytes=200)
    shadow.check_invariants(200)
    assert shadow.taken(facts(1, 0.0)) == 0.0
    least = facts(3, 0.0)  # it went when all came to 300 bytes
    assert shadow.taken(least) == shadow.lost_s == least.reload_s


def test_without_a_forecast_the_longest_unused_leaves_a_shadow() -> None:
    shadow = ShadowCache()
    for adapter_id, num_bytes in ((1, 10), (2, 100), (1, 10), (3, 100)):
        shadow.enter(facts(adapter_id, 0.0, num_bytes), room_bytes=200)
    assert [shadow.leave(adapter_id) for adapter_id in (1, 2, 3)] == [True, False, True]


def test_a_forecast_surely_leads_after_a_row_of_gains_but_not_after_as_many_in_ups_and_downs() -> None:
    steady, tossed = ShadowCache(), ShadowCache()
    for at in range(10):
        steady.compared(1.0)
        for _ in range(10):
            tossed.compared(1.0 if at % 2 else -0.8)
    assert tossed.lead_s > 0.8 * steady.lead_s and tossed.lead_s > 0
    assert steady.surely_leads() and not tossed.surely_leads()


def test_of_many_a_shadow_compares_some_in_turn_and_none_escapes_for_ever() -> None:
    shadow = ShadowCache(lambda adapter_id: 0.0 if adapter_id == 150 else 1.0)
    for adapter_id in range(200):
        shadow.enter(facts(adapter_id, 0.0), room_bytes=200 * 100)
    for newcomer in range(200, 204):
        shadow.enter(facts(newcomer, 0.0), room_bytes=200 * 100)
    assert not shadow.leave(150)


# -- the policy --------------------------------------------------------------------------------------------------------


def test_until_another_order_has_proved_better_the_longest_unused_goes_first() -> None:
    policy = Adaptive()
    ask(policy, [1, 2, 1, 3, 1, 2])
    assert order(policy, facts(1, 5.0), facts(2, 6.0, num_bytes=999), facts(3, 4.0)) == [3, 1, 2]


def following_the_mixture(adapter_ids: Iterable[int]) -> Adaptive:
    policy = Adaptive()
    ask(policy, adapter_ids)
    policy.followed = policy.forecasts[0]
    return policy


def test_at_equal_use_what_takes_longer_to_bring_back_by_the_byte_stays_longer() -> None:
    policy = following_the_mixture([2, 1] * 500)
    near, far = (
        facts(1, 0.0),
        CachedAdapter(adapter_id=2, num_bytes=100, last_used_s=-1.0, uses=0.0, reload_s=9.0),
    )
    assert order(policy, far, near) == [1, 2]


def test_a_request_counts_once_however_often_its_adapter_is_touched() -> None:
    policy = Adaptive()
    for num_requests in (1, 2, 1, 0):  # two requests come, and end
        policy.touched(facts(1, 0.0, num_requests=num_requests), 0.0)
    ask(policy, [2, 2])
    assert policy.shares.of(1)[-1] == pytest.approx(0.5, rel=0.01)


def test_its_worths_are_the_shares_of_requests_a_second() -> None:
    policy = Adaptive()
    for second in range(4000):
        adapter_id = 1 if second % 4 else 2
        policy.touched(facts(adapter_id, second, num_requests=1), second)
        policy.touched(facts(adapter_id, second), second)
    often, seldom = policy.worths([facts(1, 3999.0), facts(2, 3996.0)], 1.0, 4000.0)
    assert often == pytest.approx(0.75 * RELOAD_S_PER_BYTE, rel=0.2)
    assert seldom == pytest.approx(0.25 * RELOAD_S_PER_BYTE, rel=0.4)


def test_what_is_forgotten_is_worth_nothing() -> None:
    policy = following_the_mixture([1, 2, 2])
    policy.forgotten(2)
    assert order(policy, facts(1, 0.0), facts(2, 0.0)) == [2, 1]


def lost_ms(policy: AdapterEvictionPolicy, adapter_ids: Sequence[int], num_places: int) -> float:
    """Of a cache of equal adapters: mean wait for them, requests a second apart and done at once."""
    uses = [Use(float(at), adapter_id, 0.01) for at, adapter_id in enumerate(adapter_ids)]
    workload = Workload(uses, [100 << 20] * (max(adapter_ids) + 1), num_places * (100 << 20))
    device = Device(workload, policy, Link(10e9, 0.002), UseWindow())
    device.replay()
    device.check_invariants()
    return device.tally.result(0)["wait_mean_ms"]


def rounds(rng: random.Random, num: int) -> list[int]:
    """Popular adapters that are soon given up for others: what was asked for often is not asked for again."""
    return [
        adapter_id
        for first in range(0, 8 * num, 8)
        for adapter_id in rng.choices(range(first, first + 8), k=60)
    ]


def test_it_keeps_what_is_popular_where_popularity_stays() -> None:
    rng = random.Random(2)
    adapter_ids = rng.choices(range(100), [1 / (1 + place) for place in range(100)], k=4000)
    assert lost_ms(Adaptive(), adapter_ids, 10) < 0.85 * lost_ms(AdapterLru(), adapter_ids, 10)


def test_it_is_not_fooled_by_yesterdays_favourites() -> None:
    adapter_ids = rounds(random.Random(3), 60)
    assert lost_ms(Adaptive(), adapter_ids, 10) <= lost_ms(AdapterLru(), adapter_ids, 10)


def test_it_returns_to_lru_before_it_has_lost_what_it_had_gained() -> None:
    rng = random.Random(6)
    adapter_ids = rng.choices(range(100), [1 / (1 + place) for place in range(100)], k=1500)
    adapter_ids += [100 + adapter_id for adapter_id in rounds(rng, 60)]
    assert lost_ms(Adaptive(), adapter_ids, 10) < lost_ms(AdapterLru(), adapter_ids, 10)


def test_a_scan_does_not_wash_out_what_is_popular() -> None:
    rng = random.Random(4)
    adapter_ids: list[int] = []
    for _ in range(12):
        adapter_ids += rng.choices(range(10), k=200) + list(range(10, 60))
    assert lost_ms(Adaptive(), adapter_ids, 10) < 0.9 * lost_ms(AdapterLru(), adapter_ids, 10)


def test_it_decides_the_same_for_the_same_history() -> None:
    rng = random.Random(5)
    adapter_ids = rng.choices(range(50), k=1000)
    assert lost_ms(Adaptive(), adapter_ids, 9) == lost_ms(Adaptive(), adapter_ids, 9)


# -- anything that may happen ------------------------------------------------------------------------------------------


class Cache(RuleBasedStateMachine):
    """A cache of changing size around the policy, that is asked in any order and at any time."""

    @initialize(capacity=st.integers(0, 1000), max_adapters=st.integers(1, 12))
    def begin(self, capacity: int, max_adapters: int) -> None:
        self.capacity = capacity
        self.policy = Adaptive(max_adapters)
        self.max_adapters = max_adapters
        self.now = 0.0
        self.running: dict[int, int] = {}
        self.cached: dict[int, CachedAdapter] = {}

    @rule(adapter_id=st.integers(0, 15), after_s=st.floats(0, 100))
    def request(self, adapter_id: int, after_s: float) -> None:
        self.now += after_s
        self.cached.pop(adapter_id, None)
        self.running[adapter_id] = self.running.get(adapter_id, 0) + 1
        self.touch(adapter_id)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if not self.running:
            return
        adapter_id = data.draw(st.sampled_from(sorted(self.running)))
        self.running[adapter_id] -= 1
        self.touch(adapter_id)
        if not self.running[adapter_id]:
            del self.running[adapter_id]
            self.cached[adapter_id] = self.facts(adapter_id)
            self.shrink()

    @rule(capacity=st.integers(0, 1000))
    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.shrink()

    @rule(adapter_id=st.integers(0, 15))
    def unload(self, adapter_id: int) -> None:
        if adapter_id not in self.running:
            self.cached.pop(adapter_id, None)
            self.policy.forgotten(adapter_id)

    def facts(self, adapter_id: int) -> CachedAdapter:
        return facts(adapter_id, self.now, 40 + 10 * adapter_id, self.running.get(adapter_id, 0))

    def touch(self, adapter_id: int) -> None:
        self.policy.touched(self.facts(adapter_id), self.now)

    def shrink(self) -> None:
        over = sum(adapter.num_bytes for adapter in self.cached.values()) - self.capacity
        for victim in choose_victims(list(self.cached.values()), over, self.policy, self.now):
            assert victim not in self.running
            del self.cached[victim]
            self.policy.evicted(victim)
        assert sum(adapter.num_bytes for adapter in self.cached.values()) <= self.capacity

    @invariant()
    def state_is_bounded_and_order_agrees_with_worth(self) -> None:
        if not hasattr(self, "policy"):
            return
        assert len(self.policy.shares) <= self.max_adapters
        for shadow in (self.policy.lru, *self.policy.forecasts):
            shadow.check_invariants(float("inf"))
        cached = list(self.cached.values())
        worths = dict(zip(self.cached, self.policy.worths(cached, 1.0, self.now), strict=True))
        in_order = [worths[adapter.adapter_id] for adapter in self.policy.order(cached, self.now)]
        assert in_order == sorted(in_order)


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
