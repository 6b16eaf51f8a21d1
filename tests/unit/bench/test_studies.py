"""The studies of single policies: traffic, accounts and sums against those made by hand, and that ours loses to the plain rule nowhere."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench.emulated import adapter_cache
from bench.emulated.adapter_cache import TEMPERS
from bench.emulated.followers import (
    Call,
    Point,
    Promises,
    Tally,
    calibration_error,
    events,
    serve,
)
from bench.emulated.followers import replay as replay_calls
from bench.emulated.host_tier import (
    BLOCK_TOKENS,
    NUM_BANDS,
    NUM_DEVICE_BLOCKS,
    Cost,
    Request,
    Restore,
    replay,
)
from kvtiers.keys import BlockKey
from kvtiers.policy.eviction import ByValue, EvictionPolicy, Lru

# -- adapter_cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temper", TEMPERS)
def test_by_the_policy_that_serves_no_request_waits_longer_than_by_lru(temper: str) -> None:
    point = adapter_cache.Point(temper, 0.1, 600, seed=1)
    waits_ms = adapter_cache.serve(point)
    assert waits_ms["adaptive"] <= waits_ms["lru"]
    uses = adapter_cache.generated(temper, 1, 0.1, 600).uses
    assert len(uses) == 600 and uses == sorted(uses, key=lambda use: use.at_s)
    assert uses != adapter_cache.generated(temper, 2, 0.1, 600).uses


# -- followers ---------------------------------------------------------------------------------------------------------

SESSION = ("run", "agent")


@pytest.mark.parametrize(
    ("made", "calls", "outcomes"),
    [
        ([(0.8, 10, 0)], [(10, True)], [(0.8, True)]),
        ([(0.6, 20, 10)], [(21, False), (22, False)], [(0.6, False)]),
        ([(0.8, 10, 0), (0.9, 15, 5)], [(14, True)], [(0.8, True)]),
        ([(0.8, 10, 0), (0.9, 25, 20)], [], [(0.8, False), (0.9, False)]),
    ],
    ids=["kept while it lives", "not after", "renewed while it lives", "made again after it lapsed"],
)
def test_a_promise_comes_true_while_it_lives(made: Any, calls: Any, outcomes: Any) -> None:
    promises = Promises()
    for probability, until_s, now in made:
        promises.make(SESSION, probability, until_s=until_s, now=now)
    assert [(now, promises.keep(SESSION, now)) for now, _ in calls] == calls
    promises.end()
    assert promises.outcomes == outcomes


def test_calibration_is_off_by_what_was_said_too_much_or_too_little_in_each_bin() -> None:
    sure = [(0.95, True)] * 9 + [(0.95, False)]  # said 0.95, came 0.9
    doubtful = [(0.25, True)] * 5 + [(0.25, False)] * 5  # said 0.25, came 0.5
    assert calibration_error(sure) == pytest.approx(0.05)
    assert calibration_error(sure + doubtful) == pytest.approx(0.15) and calibration_error([]) == 0.0


def test_the_rule_foresees_the_agents_that_were_there_before() -> None:
    """A B A: of two later calls the second A is foreseen; of three promises one comes true."""
    run = [Call(2.0 * place, 2.0 * place + 1, agent) for place, agent in enumerate("ABA")]
    tally = replay_calls(events([run], random.Random(1), 1.0))
    result = tally.result()
    assert tally.num_calls == 2
    assert (result["trivial_precision"], result["trivial_recall"]) == (pytest.approx(1 / 3, abs=1e-4), 0.5)


@pytest.mark.parametrize("name", ["roles", "tools", "short", "drift", "strangers"])
def test_ours_is_no_worse_than_the_rule_and_means_what_it_says(name: str) -> None:
    """On seeds that nothing was chosen by; the bench itself takes more of them."""
    whole = Tally()
    for seed in (901, 902, 903):
        whole.add(serve(Point(name, seed=seed)))
    result = whole.result()
    assert 0 < whole.ours.num_foreseen <= whole.num_calls
    assert min(result["precision_vs_trivial"], result["recall_vs_trivial"]) >= 0.99
    assert result["calibration_error"] <= 0.12


# -- host_tier ---------------------------------------------------------------------------------------------------------

NUM_BLOCKS = NUM_DEVICE_BLOCKS // 3  # of a session: four of them overflow the device's cache


def turns_in_rotation(num_sessions: int, num_rounds: int) -> list[Request]:
    """Sessions that take turns; each prompt is NUM_BLOCKS of history and one new token."""
    return [
        Request(
            at_s=float(turn * num_sessions + session),
            session=f"s{session}",
            num_tokens=(1 + NUM_BLOCKS) * BLOCK_TOKENS + 1,
            keys=[BlockKey(b"%d-%d" % (session, block)) for block in range(NUM_BLOCKS)],
        )
        for turn in range(num_rounds)
        for session in range(num_sessions)
    ]


@pytest.mark.parametrize("policy", [Lru(), ByValue(), ByValue(band_weight=0.0)])
def test_what_does_not_fit_is_read_and_counted(policy: EvictionPolicy) -> None:
    restores = replay(turns_in_rotation(4, 3), policy, 2 * NUM_BLOCKS, NUM_DEVICE_BLOCKS)
    assert len(restores) == 8 and any(sum(restore.num_read) for restore in restores)
    assert all(restore.num_read[0] <= restore.num_read[-1] <= restore.num_blocks for restore in restores)
    whole = replay(turns_in_rotation(4, 3), policy, 4 * NUM_BLOCKS, NUM_DEVICE_BLOCKS)
    assert not any(sum(restore.num_read) for restore in whole), "where all fits"


@pytest.mark.parametrize(
    ("disk_bytes_per_s", "restore", "stall_s"),
    [
        (3e9, Restore(8, 0, (8,) * NUM_BANDS, num_new_tokens=1), 8 * 64 * 2**20 / 3e9),
        (3e9, Restore(8, 0, (0, 0, 0, 8), num_new_tokens=4096), 8 * 2 * 2**20 / 25e9),
        (1e8, Restore(8, 0, (8,) * NUM_BANDS, num_new_tokens=1), 8 * BLOCK_TOKENS / 10_000),
    ],
    ids=[
        "all read from disk",
        "only the first layer's copy is waited for",
        "a slow disk's KV is computed again",
    ],
)
def test_a_stall_is_what_a_restore_adds_to_computing(
    disk_bytes_per_s: float, restore: Restore, stall_s: float
) -> None:
    cost = Cost("test", prefill_tokens_per_s=10_000, disk_bytes_per_s=disk_bytes_per_s)
    assert cost.stall_s(restore) == pytest.approx(stall_s, rel=0.05)


# -- length ------------------------------------------------------------------------------------------------------------
