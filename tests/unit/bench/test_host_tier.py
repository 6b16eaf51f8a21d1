"""The replay of host memory's eviction: who is a session, what a request finds, what that costs."""

from __future__ import annotations

import random
import statistics

import pytest

from bench.sim.host_tier import (
    BLOCK_TOKENS,
    NUM_BANDS,
    NUM_DEVICE_BLOCKS,
    Clairvoyant,
    Cost,
    Prompt,
    Request,
    Restore,
    StrictA6,
    generate,
    hit_share,
    replay,
    requests_of,
    vs_lru,
)
from kvtiers.keys import BlockKey
from kvtiers.policy.eviction import ByValue, EvictionPolicy, Lru

NUM_BLOCKS = NUM_DEVICE_BLOCKS // 3  # of a session: four of them overflow the device's cache
COST = Cost("test", prefill_tokens_per_s=10_000, disk_bytes_per_s=3e9)


def prompt(*block_ids: int) -> Prompt:
    """The last block is partial."""
    return Prompt(0.0, len(block_ids) * BLOCK_TOKENS - 1, block_ids)


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


def test_a_prompt_that_extends_a_whole_earlier_one_continues_its_session() -> None:
    prompts = [prompt(0, 1, 2, 9), prompt(0, 5, 6, 7), prompt(0, 1, 2, 3, 4), prompt(0, 1, 2, 8)]
    sessions = [request.session for request in requests_of(prompts, random.Random(0))]
    assert sessions == [
        "s0",
        "s1",
        "s0",
        "s3",
    ]  # the last one shares blocks with s0, which has gone on without it


def test_the_generator_has_the_traces_rates() -> None:
    prompts = generate(random.Random(0))
    requests = requests_of(prompts, random.Random(0))
    num_follow_ups = len(requests) - len({request.session for request in requests})
    assert len(prompts) == pytest.approx(12_031, rel=0.1)
    assert num_follow_ups == pytest.approx(3_894, rel=0.1)
    assert statistics.median(prompt.num_tokens for prompt in prompts) == pytest.approx(6_909, rel=0.15)


def test_a_host_tier_that_holds_everything_never_reads() -> None:
    restores = replay(turns_in_rotation(4, 3), ByValue(), 4 * NUM_BLOCKS)
    assert len(restores) == 8
    assert hit_share(restores, NUM_BANDS) == 1


@pytest.mark.parametrize("policy", [Lru(), ByValue(), StrictA6(), ByValue(band_weight=0.0)])
def test_what_does_not_fit_is_read_and_counted(policy: EvictionPolicy) -> None:
    restores = replay(turns_in_rotation(4, 3), policy, 2 * NUM_BLOCKS)
    assert len(restores) == 8
    assert hit_share(restores, NUM_BANDS) < 1
    assert hit_share(restores, NUM_BANDS // 2) >= hit_share(restores, NUM_BANDS)


def test_knowing_the_future_beats_lru() -> None:
    requests = turns_in_rotation(4, 5)
    known = replay(requests, Clairvoyant.of(requests), 3 * NUM_BLOCKS)
    assert hit_share(known, NUM_BANDS) > hit_share(replay(requests, Lru(), 3 * NUM_BLOCKS), NUM_BANDS)


def test_a_stall_is_what_reading_adds_to_computing() -> None:
    on_disk = Restore(8, 0, (8,) * NUM_BANDS, num_new_tokens=1)
    last_band_on_disk = Restore(8, 0, (0, 0, 0, 8), num_new_tokens=4096)
    assert COST.stall_s(on_disk) == pytest.approx(8 * 64 * 2**20 / 3e9, rel=0.05)
    assert COST.stall_s(last_band_on_disk) == pytest.approx(
        8 * 2 * 2**20 / 25e9
    )  # only the first layer's copy


def test_what_a_slow_disk_holds_is_computed_again() -> None:
    slow = Cost("test", prefill_tokens_per_s=10_000, disk_bytes_per_s=1e8)
    assert slow.stall_s(Restore(8, 0, (8,) * NUM_BANDS, 1)) == pytest.approx(8 * BLOCK_TOKENS / 10_000)


def test_a_policys_stall_is_compared_with_lru_of_as_much_memory_where_it_does_worst() -> None:
    def run(policy: str, share: float, **stall_mean_ms: float) -> dict[str, object]:
        return {"policy": policy, "host_share": share, "stall_mean_ms": stall_mean_ms}

    runs = [
        run("ByValue", 0.03, fast=50.0, slow=90.0),
        run("Lru", 0.03, fast=100.0, slow=100.0),
        run("Lru", 0.1, fast=10.0, slow=20.0),
        run("ByValue", 0.1, fast=12.0, slow=20.0),
        run("ByValue", 0.3, fast=1.0, slow=1.0),
    ]
    assert vs_lru(runs) == {"ByValue": {"3%": 0.9, "10%": 1.2}}
