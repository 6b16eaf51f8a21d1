"""Adapters of an emulated node: their copies lie in vLLM's own block pool, and they come from where they are in the time that takes."""

import random

import pytest

from bench.emulated.core.adapters import AdapterMemory, EmulatedAdapters
from bench.emulated.core.arrivals import Arrival
from bench.emulated.core.assist import ColdStart
from bench.emulated.core.calibration import A40
from bench.emulated.core.clock import Clock
from bench.emulated.core.models import LLAMA2_7B
from bench.emulated.core.node import EmulatedNode, Engine, Job
from bench.emulated.core.plays import play_on_node
from bench.emulated.core.steps import StepCost
from bench.emulated.core.traffic import play
from engine_bridge.core.adapters.adapter_copies import USED_WRITE_S
from engine_bridge.policy.scheduling.policies import DEFAULT_POLICY, POLICIES

COST = StepCost(A40, LLAMA2_7B)
BLOCK_BYTES = 16 * LLAMA2_7B.kv_bytes_per_token
RANKS = (128, 64, 8, 8)
IN_KV = AdapterMemory(num_slots=1, policy="lru", in_kv=True)


def asks(
    *asked: tuple[float, int], num_prompt_tokens: int = 100, num_answer_tokens: int = 5
) -> list[Arrival]:
    """Requests that come so late each, by the adapter that they ask for."""
    return [
        Arrival(f"{at_s:09.3f}", at_s, num_prompt_tokens, num_answer_tokens, adapter)
        for at_s, adapter in asked
    ]


def blocks_of(rank: int) -> int:
    return -(-LLAMA2_7B.lora_bytes(rank) // BLOCK_BYTES)


def copies_of(adapters: EmulatedAdapters | None) -> list[int]:
    assert adapters is not None and adapters.blocks is not None
    return adapters.blocks.ids()


def test_an_adapter_takes_its_bytes_over_the_link_before_its_first_step() -> None:
    memory = AdapterMemory(8, "lru")
    jobs = play_on_node(
        "fcfs", asks((0, 0), (5, 0), (9, 1)), COST, Engine(2000), ranks=RANKS, memory=memory
    ).jobs
    assert [job.found_adapter for job in jobs] == ["host", "slot", "host"]
    for job, rank in zip(jobs, (128, 128, 64), strict=True):
        copy_s = LLAMA2_7B.lora_bytes(rank) / A40.achieved_link_bytes_per_s
        waited_s = 0.0 if job.found_adapter == "slot" else copy_s
        assert job.ttft_s == pytest.approx(waited_s + COST.prefill_s(100, rank))


def test_an_adapter_that_leaves_its_slot_comes_back_from_kv_blocks_within_the_device() -> None:
    played = play_on_node(
        "fcfs", asks((0, 0), (5, 1), (10, 0)), COST, Engine(2000), ranks=RANKS, memory=IN_KV
    )
    assert [job.found_adapter for job in played.jobs] == ["host", "host", "cached"]
    in_device_s = 2 * LLAMA2_7B.lora_bytes(128) / A40.achieved_bytes_per_s
    # Meanwhile the thread writes a slice of the other one.
    assert played.jobs[2].ttft_s == pytest.approx(
        max(in_device_s, USED_WRITE_S) + COST.prefill_s(100, 128), rel=1e-3
    )
    assert played.counts["most_copied_blocks"] >= blocks_of(128)


def test_kv_takes_the_adapter_that_the_policy_holds_for_worth_the_least() -> None:
    """Of two equal ones the first was asked for often, the second last."""
    kept = {}
    for policy in ("lru", "chameleon"):
        clock = Clock()
        memory = AdapterMemory(num_slots=1, policy=policy, in_kv=True)
        node = EmulatedNode(
            clock, COST, Engine(60, has_prefix_cache=False), "fcfs", ranks=(64, 64, 8), memory=memory
        )
        # The first is asked for often, then the second once; the third one's request puts both out of the slot.
        often = [(2.0 * at, at % 2 * 2) for at in range(10)]
        play(clock, [*asks(*often, (30, 1), (35, 2)), *_large(40.0)], node.submit)
        kept[policy] = copies_of(node.adapters)
        node.close()
    assert 1 not in kept["lru"] and 2 in kept["lru"]
    assert 1 in kept["chameleon"] and 2 not in kept["chameleon"]


def _large(at_s: float) -> list[Arrival]:
    """It needs more than is left beside all three adapters, and no more than is left beside one of rank 64 and that of rank 8."""
    return [Arrival("large", at_s, (60 - blocks_of(64) - blocks_of(8) - 2) * 16, 2, 2)]


TWO_BUSY = [(0.5 * at, at % 2) for at in range(24)]
LATE = (5.1, 2)


@pytest.mark.parametrize(
    ("policy", "cold_start"),
    [*((policy, "step waits") for policy in ("vllm", *POLICIES)), (DEFAULT_POLICY, "request waits")],
)
def test_a_third_adapter_gets_its_turn_between_two_that_are_asked_for_without_a_pause(
    policy: str, cold_start: ColdStart
) -> None:
    """Room for two; of each of the two some request always runs."""
    memory, engine = AdapterMemory(num_slots=2, cold_start=cold_start), Engine(3000)

    def jobs(*asked: tuple[float, int]) -> list[Job]:
        requests = asks(*sorted(asked), num_prompt_tokens=200, num_answer_tokens=50)
        return play_on_node(policy, requests, COST, engine, ranks=(16, 16, 16), memory=memory).jobs

    (alone,) = jobs(LATE)
    without, crowd = jobs(*TWO_BUSY), jobs(*TWO_BUSY, LATE)
    (third,) = (job for job in crowd if job.arrival.adapter_id == LATE[1])
    assert third.ttft_s <= max(2.0, 3 * alone.e2e_s)
    last_s = max(job.ended_s for job in crowd if job is not third)
    assert last_s <= 1.05 * max(job.ended_s for job in without)


@pytest.mark.parametrize("seed", range(2))
def test_adapters_that_take_turns_do_so_alike_in_vllms_own_queue_and_in_the_default_order(seed: int) -> None:
    """Four on two slots, waits too short for overtaking: any difference is one of when a turn begins."""
    chance = random.Random(seed)
    asked = asks(*((0.2 * number, chance.randrange(4)) for number in range(80)), num_answer_tokens=20)
    memory, engine = AdapterMemory(num_slots=2), Engine(2000, has_prefix_cache=False)
    theirs, ours = (
        play_on_node(policy, asked, COST, engine, ranks=RANKS, memory=memory).times
        for policy in ("vllm", DEFAULT_POLICY)
    )
    assert ours == theirs
