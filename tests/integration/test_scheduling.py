"""Every order of starting gives everybody the same answers, on a real engine with too little memory.

Runs before the shared engine starts (conftest), each engine after the one before it has gone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from engine_bridge.core.scheduling.pauses import Pauses
from engine_bridge.driver.engine.building import CPU_BLOCK_SIZE_TOKENS
from engine_bridge.driver.engine.engine import VllmDriver
from engine_bridge.driver.in_process import scheduler_of
from engine_bridge.driver.scheduling.scheduling import Scheduling
from engine_bridge.local_node import LocalNode
from engine_bridge.policy.scheduling.mlq import Mlq

from .conftest import engine_is_empty, engine_stats
from .nodes import Expects, WaitsForTheDisk, ask, engine, text

ADAPTERS = (None, "pirate", "robot", "shout")


def traffic() -> list[tuple[list[int], int, str | None]]:
    """Short and long ones, with and without adapters; a few of them fill the device."""
    chance = random.Random(11)
    return [
        (text(seed, chance.choice((20, 60, 120, 200))), chance.choice((4, 12, 40)), chance.choice(ADAPTERS))
        for seed in range(12)
    ]


async def crowd(node: LocalNode) -> list[list[int]]:
    """All of the traffic at once, beside some who give up when the first is answered."""
    given_up = [asyncio.create_task(ask(node, text(100 + seed, 120), 100)) for seed in range(3)]
    asked = [asyncio.create_task(ask(node, *item)) for item in traffic()]
    await asked[0]
    for task in given_up:
        task.cancel()
    answers = await asyncio.gather(*asked)
    await asyncio.gather(*given_up, return_exceptions=True)
    await engine_is_empty(node)
    return answers


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    """What each request is answered alone; the first engine fills it in."""
    return []


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def tight(undisturbed: list[list[int]]) -> AsyncIterator[LocalNode]:
    """One for all orders of starting: what each would build alone is the same but for its scheduling."""
    async with engine(scheduling_policy="fcfs", num_kv_blocks=16, max_model_len=256, max_num_seqs=6) as node:
        undisturbed[:] = [await ask(node, *item) for item in traffic()]
        yield node


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def with_host() -> AsyncIterator[LocalNode]:
    """Requests that are preempted find their KV in host memory."""
    async with engine(
        scheduling_policy="fcfs", num_kv_blocks=20, max_model_len=256, max_num_seqs=6, kv_host_gib=0.25
    ) as node:
        node._tiers.policy = WaitsForTheDisk()
        # Without costs victims come back from host memory: on a busy machine computing them again may be predicted to be cheaper.
        node._tiers._prefill = None
        yield node


async def use(node: LocalNode, policy: str, **settings: Any) -> Scheduling:
    """Have the engine start requests in this order, and know nothing of those before."""

    def exchange(driver: VllmDriver) -> Scheduling:
        driver.scheduling.close()
        config = replace(node._config.engine, scheduling_policy=policy, **settings)
        driver.scheduling = driver._make_scheduling(config)
        driver.engine.reset_prefix_cache()
        return driver.scheduling

    return await node.run_on_engine(exchange)


class TestWithoutTiers:
    @pytest.mark.parametrize("policy", ["sjf", "fair", "mlq", "bounded"])
    async def test_no_order_changes_an_answer(
        self, policy: str, tight: LocalNode, undisturbed: list[list[int]]
    ) -> None:
        """Everybody at once on a device for a few: requests are preempted, predictions are wrong, some are aborted; nothing is lost or left."""
        own = await use(tight, policy)
        if policy == "mlq":
            # Wrong by ten times.
            own.predictor = Expects(lambda request: 100 if request.num_prompt_tokens % 2 else 2)
        for _ in range(5):  # who meets whom depends on the machine's speed
            assert await crowd(tight) == undisturbed
            core = own.dispatcher
            assert core.policy.name == policy
            assert core.num_waiting == core.num_running == 0
            # Under `mlq` quotas may leave nobody to be preempted.
            if policy == "mlq" or core.counts["preempted"] > 0:
                break
        else:
            pytest.fail("the device was too large, and this test could not fail")
        if isinstance(own.dispatcher.policy, Mlq):
            own.dispatcher.policy.check_invariants()
            assert own.dispatcher.policy.ledger.num_used == 0, "every quota has come back"
        counts = await engine_stats(tight)
        assert counts.num_free_kv_blocks == counts.num_kv_blocks - 1


class TestWithHostMemory:
    async def test_preempted_ones_come_back_from_it_and_go_on_as_they_began(
        self, with_host: LocalNode, undisturbed: list[list[int]]
    ) -> None:
        """Requests are squashed again and again."""

        def squash_last(driver: Any) -> None:
            scheduler = scheduler_of(driver.engine)
            running = scheduler.running
            # Of one with less than a block nothing could come back.
            if len(running) > 1 and running[-1].num_computed_tokens > CPU_BLOCK_SIZE_TOKENS:
                driver.scheduling.squash(scheduler, running[-1].request_id)

        own = await use(with_host, "fcfs")

        def came_back() -> bool:
            ways = own.all_counts()
            return ways.get("preempted:swap", 0) + ways.get("preempted:split", 0) > 0

        for _ in range(
            10
        ):  # whether others take the blocks of a squashed one before it goes on depends on the machine's speed
            asked = [asyncio.create_task(ask(with_host, *item)) for item in traffic()]
            while not all(task.done() for task in asked):
                await asyncio.sleep(0.05)
                if own.dispatcher.counts["squashed"] < 20 or not came_back():
                    await with_host.run_on_engine(squash_last)
            assert await asyncio.gather(*asked) == undisturbed
            if came_back():
                break
        else:
            pytest.fail("none came back from there")
        assert own.dispatcher.counts["preempted"] > 0 and own.dispatcher.counts["squashed"] > 0

    @pytest.mark.parametrize("policy", ["fair", "mlq"])
    async def test_answers_that_stood_for_urgent_ones_go_on_as_they_began(
        self, policy: str, undisturbed: list[list[int]], with_host: LocalNode
    ) -> None:
        """Every fourth request is urgent, and a step is said to be fast enough for two alone."""
        own = await use(with_host, policy)
        own.dispatcher.pauses = Pauses(lambda num_requests, num_tokens: 0.1 * num_requests, 0.25)
        asked: dict[int, asyncio.Task[list[int]]] = {}
        for is_urgent in (False, True):
            for at, item in enumerate(traffic()):
                if (at % 4 == 0) is is_urgent:
                    asked[at] = asyncio.create_task(ask(with_host, *item, priority=-is_urgent))
            while not is_urgent and own.dispatcher.num_running < 3:
                await asyncio.sleep(0.005)
        assert [await asked[at] for at in sorted(asked)] == undisturbed
        await engine_is_empty(with_host)
        counts = own.dispatcher.counts
        assert counts["paused"] > 0, "nobody was paused, and this test could not fail"
        assert counts["paused"] == counts["resumed"] and not own.dispatcher.pauses.is_on
        own.dispatcher.check_invariants()
