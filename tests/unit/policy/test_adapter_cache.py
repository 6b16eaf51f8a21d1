"""Who leaves the adapter cache, who may take KV's place, and how uses are counted."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.sim.adapter_policies import ExpectedGain, GreedyDual
from engine_bridge.policy.adapters.adapter_cache import (
    POLICIES,
    AdapterLru,
    ChameleonScore,
    EqualWeights,
    PrefixFacts,
    choose_victims,
    may_take_prefix,
)
from engine_bridge.policy.adapters.cached_adapter import AdapterEvictionPolicy, CachedAdapter, UseWindow

MIB = 1 << 20
NOW = 1000.0


def adapter(adapter_id: int, idle_s: float = 10.0, **fields: Any) -> CachedAdapter:
    defaults: dict[str, Any] = {"num_bytes": 16 * MIB, "uses": 1.0, "reload_s": 0.01}
    return CachedAdapter(adapter_id=adapter_id, last_used_s=NOW - idle_s, **(defaults | fields))


def ids(adapters: list[CachedAdapter]) -> list[int]:
    return [each.adapter_id for each in adapters]


caches = st.lists(
    st.builds(
        adapter,
        st.integers(0, 1000),
        idle_s=st.floats(-5, 1000),
        num_bytes=st.integers(1, 1 << 30),
        uses=st.floats(0, 1000),
        reload_s=st.floats(0, 10),
        is_queued=st.booleans(),
    ),
    max_size=15,
    unique_by=lambda each: each.adapter_id,
)
policies = st.sampled_from(list(POLICIES.values()))


def test_policies_go_by_their_names() -> None:
    assert {name: policy().name for name, policy in POLICIES.items()} == {name: name for name in POLICIES}


# -- orders ------------------------------------------------------------------------------------------------------------


@given(caches, policies)
def test_an_order_has_everyone_once_and_those_queued_last(
    cached: list[CachedAdapter], make: Callable[[], AdapterEvictionPolicy]
) -> None:
    order = make().order(cached, NOW)
    assert sorted(ids(order)) == sorted(ids(cached))
    assert [each.is_queued for each in order] == sorted(each.is_queued for each in cached)


@given(caches, policies, st.randoms(use_true_random=False))
def test_an_order_does_not_depend_on_that_of_the_list(
    cached: list[CachedAdapter], make: Callable[[], AdapterEvictionPolicy], rng: random.Random
) -> None:
    shuffled = cached.copy()
    rng.shuffle(shuffled)
    assert make().order(shuffled, NOW) == make().order(cached, NOW)


@given(caches)
def test_scores_lie_between_0_and_1(cached: list[CachedAdapter]) -> None:
    for policy in (ChameleonScore(), EqualWeights()):
        assert all(0 <= score <= 1 + 1e-12 for score in policy.scores(cached, NOW))


def test_the_best_in_all_three_scores_1_and_the_worst_next_to_nothing() -> None:
    best = adapter(1, idle_s=0, num_bytes=256 * MIB, uses=50)
    worst = adapter(2, idle_s=100, num_bytes=MIB, uses=0)
    assert ChameleonScore().scores([best, worst], NOW) == pytest.approx([1.0, 0.45 / 256])


def test_the_scores_weigh_as_the_paper_does() -> None:
    often, recent, large = (
        adapter(1, idle_s=100, uses=10, num_bytes=1),
        adapter(2, idle_s=0, uses=0, num_bytes=1),
        adapter(3, idle_s=100, uses=0, num_bytes=1 << 30),
    )
    assert ChameleonScore().scores([often, recent, large], NOW) == pytest.approx([0.45, 0.10, 0.45], abs=1e-6)
    assert EqualWeights().scores([often, recent, large], NOW) == pytest.approx([1 / 3] * 3, abs=1e-6)


@pytest.mark.parametrize("name", ["chameleon", "equal_weights"])
def test_a_small_one_seldom_used_goes_before_a_large_one_often_used(name: str) -> None:
    small = adapter(1, num_bytes=16 * MIB, uses=1, reload_s=0.004)
    large = adapter(2, num_bytes=256 * MIB, uses=20, reload_s=0.03)
    assert ids(POLICIES[name]().order([large, small], NOW)) == [1, 2]


def test_at_equal_use_the_paper_keeps_the_large_one_and_gain_per_byte_the_small_one() -> None:
    small = adapter(1, num_bytes=16 * MIB, uses=5, reload_s=0.004)
    large = adapter(2, num_bytes=256 * MIB, uses=5, reload_s=0.03)
    assert ids(ChameleonScore().order([large, small], NOW)) == [1, 2]
    for policy in (GreedyDual(), ExpectedGain()):
        assert ids(policy.order([large, small], NOW)) == [2, 1]


@pytest.mark.parametrize("make", [GreedyDual, ExpectedGain])
def test_what_takes_longer_to_bring_back_stays_longer(make: Callable[[], AdapterEvictionPolicy]) -> None:
    near, far = adapter(1, idle_s=1, reload_s=0.01), adapter(2, idle_s=2, reload_s=0.5)
    assert ids(make().order([far, near], NOW)) == [1, 2]


# -- textbooks ---------------------------------------------------------------------------------------------------------


def faults(policy: AdapterEvictionPolicy, accesses: list[int], num_places: int, **fields: Any) -> list[int]:
    """Victims of a cache of equal adapters with one use each, in turn."""
    last_used_s: dict[int, float] = {}
    victims = []
    for at, adapter_id in enumerate(accesses):
        now = float(at)
        if adapter_id not in last_used_s and len(last_used_s) == num_places:
            cached = [adapter(a, idle_s=NOW - used_s, **fields) for a, used_s in last_used_s.items()]
            (victim,) = choose_victims(cached, 1, policy, now)
            policy.evicted(victim)
            del last_used_s[victim]
            victims.append(victim)
        last_used_s[adapter_id] = now
        policy.touched(adapter(adapter_id, idle_s=NOW - now, **fields), now)
    return victims


def textbook_lru(accesses: list[int], num_places: int) -> list[int]:
    cache: OrderedDict[int, None] = OrderedDict()
    victims = []
    for adapter_id in accesses:
        if adapter_id not in cache and len(cache) == num_places:
            victims.append(cache.popitem(last=False)[0])
        cache[adapter_id] = None
        cache.move_to_end(adapter_id)
    return victims


@given(st.lists(st.integers(0, 8), max_size=60), st.integers(1, 5), st.sampled_from([AdapterLru, GreedyDual]))
def test_lru_and_greedy_dual_among_equals_are_the_textbooks_lru(
    accesses: list[int], num_places: int, make: Callable[[], AdapterEvictionPolicy]
) -> None:
    assert faults(make(), accesses, num_places) == textbook_lru(accesses, num_places)


# -- victims -----------------------------------------------------------------------------------------------------------


@given(caches, st.integers(-10, 1 << 32), policies)
def test_victims_free_enough_and_none_could_be_spared(
    cached: list[CachedAdapter], needed_bytes: int, make: Callable[[], AdapterEvictionPolicy]
) -> None:
    victims = choose_victims(cached, needed_bytes, make(), NOW)
    size = {each.adapter_id: each.num_bytes for each in cached}
    if needed_bytes <= 0 or sum(size.values()) < needed_bytes:
        assert victims == ()
        return
    freed = sum(size[victim] for victim in victims)
    assert freed >= needed_bytes
    assert all(freed - size[victim] < needed_bytes for victim in victims)
    order = ids(make().order(cached, NOW))
    assert list(victims) == [adapter_id for adapter_id in order if adapter_id in victims]


@given(caches, st.integers(1, 1 << 32), policies)
def test_a_queued_one_goes_only_if_the_others_do_not_suffice(
    cached: list[CachedAdapter], needed_bytes: int, make: Callable[[], AdapterEvictionPolicy]
) -> None:
    idle_bytes = sum(each.num_bytes for each in cached if not each.is_queued)
    queued = {each.adapter_id for each in cached if each.is_queued}
    if idle_bytes >= needed_bytes:
        assert not queued & set(choose_victims(cached, needed_bytes, make(), NOW))


def test_small_ones_are_spared_when_a_large_one_covers_all() -> None:
    cached = [
        adapter(1, 30, num_bytes=10),
        adapter(2, 20, num_bytes=20),
        adapter(3, 10, num_bytes=100),
        adapter(4, 1),
    ]
    assert choose_victims(cached, 90, AdapterLru(), NOW) == (3,)
    assert choose_victims(cached, 110, AdapterLru(), NOW) == (1, 3)
    assert choose_victims(cached, 115, AdapterLru(), NOW) == (2, 3)


def test_a_newcomer_may_turn_out_to_be_worth_least() -> None:
    kept, newcomer = adapter(1, 60, uses=9.0), adapter(2, 0, uses=1.0)
    assert choose_victims([kept, newcomer], 1, ExpectedGain(), NOW) == (2,)
    assert choose_victims([kept, newcomer], 1, AdapterLru(), NOW) == (1,)


# -- adapters against KV -----------------------------------------------------------------------------------------------


def prefix(num_bytes: int = 16 * MIB, restore_s: float = 0.01, reuse_per_s: float = 0.1) -> PrefixFacts:
    return PrefixFacts(num_bytes=num_bytes, restore_s=restore_s, reuse_per_s=reuse_per_s)


def worth(uses_per_s: float, **fields: Any) -> float:
    """Of one adapter, by the policy that counts seconds: a hundred seconds' uses."""
    return ExpectedGain().worths([adapter(1, uses=100 * uses_per_s, **fields)], 100.0, NOW)[0]


def test_what_saves_more_seconds_per_byte_and_second_may_lie_on_the_device() -> None:
    cold, hot = 0.05, 0.2
    assert may_take_prefix(worth(hot), prefix())
    assert not may_take_prefix(worth(cold), prefix())
    assert may_take_prefix(worth(cold), prefix(restore_s=0.001))
    assert may_take_prefix(worth(cold, num_bytes=MIB), prefix())
    assert not may_take_prefix(worth(hot), prefix(num_bytes=MIB))


def test_between_equals_nothing_moves() -> None:
    assert not may_take_prefix(worth(0.1), prefix())


def test_blocks_that_nobody_asks_for_again_give_way_to_any_use() -> None:
    assert may_take_prefix(worth(1e-6), prefix(reuse_per_s=0.0))
    assert not may_take_prefix(worth(0.0), prefix(reuse_per_s=0.0))


@given(st.integers(1, 1 << 30), st.floats(0, 10), st.floats(0, 10), st.integers(1, 1 << 30), st.floats(0, 10))
def test_an_adapter_and_a_prefix_never_both_take_each_others_place(
    num_bytes: int, reload_s: float, per_s: float, prefix_bytes: int, restore_s: float
) -> None:
    there = may_take_prefix(
        worth(per_s, num_bytes=num_bytes, reload_s=reload_s), prefix(prefix_bytes, restore_s)
    )
    back = may_take_prefix(
        worth(0.1, num_bytes=prefix_bytes, reload_s=restore_s), prefix(num_bytes, reload_s, per_s)
    )
    assert not (there and back)


@given(caches, policies)
def test_no_policy_lets_go_first_of_what_it_says_is_worth_more(
    cached: list[CachedAdapter], make: Callable[[], AdapterEvictionPolicy]
) -> None:
    policy = make()
    for each in cached:
        policy.touched(each, NOW)
    worths = dict(zip(ids(cached), policy.worths(cached, 100.0, NOW), strict=True))
    order = [each for each in policy.order(cached, NOW) if not each.is_queued]
    assert all(worths[a.adapter_id] <= worths[b.adapter_id] * (1 + 1e-9) for a, b in pairwise(order))


@given(caches, st.sampled_from([AdapterLru, ChameleonScore, EqualWeights]))
def test_scores_without_a_unit_divide_what_all_adapters_save(
    cached: list[CachedAdapter], make: Callable[[], AdapterEvictionPolicy]
) -> None:
    if cached and all(each.uses for each in cached):
        saved = sum(each.uses * each.reload_s for each in cached) / sum(each.num_bytes for each in cached)
        mean = sum(make().worths(cached, 100.0, NOW)) / len(cached)
        assert mean == pytest.approx(saved / 100.0)


# -- counting ----------------------------------------------------------------------------------------------------------


def test_a_use_counts_half_after_the_half_life() -> None:
    window = UseWindow(half_life_s=100.0)
    window.used(1, 0.0)
    window.used(1, 100.0)
    assert window.uses(1, 100.0) == pytest.approx(1.5)
    assert window.uses(1, 200.0) == pytest.approx(0.75)
    assert window.uses(2, 200.0) == 0.0


def test_a_steady_rate_is_found_early_and_late() -> None:
    window = UseWindow(half_life_s=100.0)
    for second in range(2000):
        window.used(1, float(second))
        if second in (50, 300, 1999):
            assert window.per_s(1, second + 0.5) == pytest.approx(1.0, rel=0.05)


def test_a_single_use_is_not_taken_for_a_storm() -> None:
    window = UseWindow()
    assert window.per_s(1, 0.0) == 0.0
    window.used(1, 0.0)
    assert window.per_s(1, 0.0) == pytest.approx(1.0, rel=0.01)


def test_a_clock_that_goes_back_adds_nothing() -> None:
    window = UseWindow()
    window.used(1, 100.0)
    assert window.uses(1, 50.0) == 1.0


def test_a_full_window_forgets_the_longest_unused() -> None:
    window = UseWindow(max_adapters=2)
    for at, adapter_id in enumerate((1, 2, 1, 3)):
        window.used(adapter_id, float(at))
    assert len(window) == 2
    assert window.uses(2, 4.0) == 0.0
    assert window.uses(1, 4.0) > 1.9


def test_what_is_forgotten_has_no_uses() -> None:
    window = UseWindow()
    window.used(1, 0.0)
    window.forget(1)
    window.forget(1)
    assert (len(window), window.uses(1, 0.0)) == (0, 0.0)


@pytest.mark.parametrize("wrong", [{"half_life_s": 0.0}, {"max_adapters": 0}])
def test_a_window_of_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="positive"):
        UseWindow(**wrong)
