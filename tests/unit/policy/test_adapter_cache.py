"""Who leaves the adapter cache, who may take KV's place, and how uses are counted."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.adapters import cached_adapter
from engine_bridge.policy.adapters.adapter_cache import POLICIES, ChameleonScore, EqualWeights, choose_victims
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
Make = Callable[[], AdapterEvictionPolicy]


def test_the_scores_weigh_as_the_paper_does() -> None:
    often, recent = adapter(1, idle_s=100, uses=10, num_bytes=1), adapter(2, idle_s=0, uses=0, num_bytes=1)
    cached = [often, recent, adapter(3, idle_s=100, uses=0, num_bytes=1 << 30)]
    assert ChameleonScore().scores(cached, NOW) == pytest.approx([0.45, 0.10, 0.45], abs=1e-6)
    assert EqualWeights().scores(cached, NOW) == pytest.approx([1 / 3] * 3, abs=1e-6)


@given(caches, st.integers(-10, 1 << 32), policies)
def test_victims_free_enough_and_no_more(cached: list[CachedAdapter], needed_bytes: int, make: Make) -> None:
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
    idle = {each.adapter_id for each in cached if not each.is_queued}
    if sum(size[adapter_id] for adapter_id in idle) >= needed_bytes:
        assert idle >= set(victims), "a queued one goes only if the others do not suffice"


@given(caches, policies)
def test_no_policy_lets_go_first_of_what_it_says_is_worth_more(
    cached: list[CachedAdapter], make: Make
) -> None:
    policy = make()
    for each in cached:
        policy.touched(each, NOW)
    worths = dict(zip(ids(cached), policy.worths(cached, 100.0, NOW), strict=True))
    order = [each for each in policy.order(cached, NOW) if not each.is_queued]
    assert all(worths[a.adapter_id] <= worths[b.adapter_id] * (1 + 1e-9) for a, b in pairwise(order))


def test_a_use_counts_half_after_the_half_life() -> None:
    window = UseWindow()
    window.used(1, 0.0)
    window.used(1, cached_adapter.USE_HALF_LIFE_S)
    assert window.uses(1, cached_adapter.USE_HALF_LIFE_S) == pytest.approx(1.5)
    assert window.uses(1, 2 * cached_adapter.USE_HALF_LIFE_S) == pytest.approx(0.75)
    assert window.uses(2, 0.0) == 0.0
