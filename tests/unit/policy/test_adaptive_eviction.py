"""The policy that learns: how far back to look, and whom of its shadow caches to follow."""

import random
from collections.abc import Sequence

import pytest

from bench.emulated.adapter_cache import Device, Use, Workload
from engine_bridge.policy.adapters.adapter_cache import AdapterLru
from engine_bridge.policy.adapters.adaptive_eviction import Adaptive
from engine_bridge.policy.adapters.cached_adapter import AdapterEvictionPolicy, CachedAdapter, UseWindow

RELOAD_S_PER_BYTE = 1e-3


def facts(adapter_id: int, now: float, num_requests: int = 0) -> CachedAdapter:
    used = {"last_used_s": now, "uses": 0.0, "num_requests": num_requests}
    return CachedAdapter(adapter_id=adapter_id, num_bytes=100, reload_s=100 * RELOAD_S_PER_BYTE, **used)


def test_its_worths_are_the_shares_of_requests_a_second() -> None:
    policy = Adaptive()
    for second in range(4000):
        adapter_id = 1 if second % 4 else 2
        policy.touched(facts(adapter_id, second, num_requests=1), second)
        policy.touched(facts(adapter_id, second), second)
    often, seldom = policy.worths([facts(1, 3999.0), facts(2, 3996.0)], 1.0, 4000.0)
    assert often == pytest.approx(0.75 * RELOAD_S_PER_BYTE, rel=0.2)
    assert seldom == pytest.approx(0.25 * RELOAD_S_PER_BYTE, rel=0.4)


def test_beyond_so_many_adapters_the_longest_unused_is_forgotten() -> None:
    policy = Adaptive(max_adapters=2)
    for adapter_id in (1, 2, 1, 3):
        policy.touched(facts(adapter_id, 0.0, num_requests=1), 0.0)
        policy.touched(facts(adapter_id, 0.0), 0.0)
    assert [adapter_id in policy.shares for adapter_id in (1, 2, 3)] == [True, False, True]
    assert len(policy.shares) == 2


def lost_ms(policy: AdapterEvictionPolicy, adapter_ids: Sequence[int], num_places: int) -> float:
    """Of a cache of equal adapters: mean wait for them, requests a second apart and done at once."""
    uses = [Use(float(at), adapter_id, 0.01) for at, adapter_id in enumerate(adapter_ids)]
    workload = Workload(uses, [100 << 20] * (max(adapter_ids) + 1), num_places * (100 << 20))
    device = Device(workload, policy, UseWindow())
    device.replay()
    device.check_invariants()
    return device.wait_mean_ms


def rounds(rng: random.Random, num: int) -> list[int]:
    """Popular adapters that are soon given up for others: what was asked for often is not asked for again."""
    chosen = (rng.choices(range(first, first + 8), k=60) for first in range(0, 8 * num, 8))
    return [adapter_id for each in chosen for adapter_id in each]


def test_it_returns_to_lru_before_it_has_lost_what_it_had_gained() -> None:
    rng = random.Random(6)
    adapter_ids = rng.choices(range(100), [1 / (1 + place) for place in range(100)], k=1500)
    adapter_ids += [100 + adapter_id for adapter_id in rounds(rng, 60)]
    assert lost_ms(Adaptive(), adapter_ids, 10) < lost_ms(AdapterLru(), adapter_ids, 10)


def test_of_adapters_asked_for_in_a_circle_the_same_stay() -> None:
    adapter_ids = [at % 12 for at in range(1200)]
    ours, lrus = (lost_ms(policy, adapter_ids, num_places=10) for policy in (Adaptive(), AdapterLru()))
    assert ours < 0.3 * lrus, (
        "LRU gives up each adapter just before it is asked for; keeping ten of twelve loses a sixth"
    )
