"""Every order of starting gives everybody the same answers, on a real engine with too little memory.

Runs before the shared engine starts (conftest), each engine after the one before it has gone.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from engine_bridge.core.scheduling.pauses import Pauses
from engine_bridge.driver.engine.engine import VllmDriver
from engine_bridge.driver.scheduling.scheduling import Scheduling
from engine_bridge.local_node import LocalNode, LocalNodeConfig
from engine_bridge.policy.scheduling.mlq import Mlq
from engine_bridge.predict.length import LengthFeatures, LengthGuess
from engine_bridge.protocol.node import GenerateRequest, RequestId, Sampling
from engine_bridge.protocol.request_context import RequestContext
from engine_bridge.settings.engine_config import EngineConfig
from gateway.settings.config import DEMO_ADAPTERS_DIR, DEMO_MODEL_DIR

from .conftest import WaitsForTheDisk, starts

NUM_REQUESTS = 20
ADAPTERS = (None, "pirate", "robot", "shout")

_ids = itertools.count()


@asynccontextmanager
async def engine(
    policy: str,
    num_kv_blocks: int = 60,
    max_num_seqs: int = 6,
    kv_host_gib: float = 0,
    lane_refit_s: float = 60.0,
) -> AsyncIterator[LocalNode]:
    config = EngineConfig(
        model=str(DEMO_MODEL_DIR),
        served_model_name="demo",
        dtype="float32",
        cpu_threads=1,
        max_model_len=1024,
        max_num_seqs=max_num_seqs,
        num_kv_blocks=num_kv_blocks,
        scheduling_policy=policy,
        kv_host_gib=kv_host_gib,
        lane_refit_s=lane_refit_s,
    )
    node = LocalNode(LocalNodeConfig(engine=config, adapters_dir=DEMO_ADAPTERS_DIR))
    await node.start()
    try:
        yield node
    finally:
        await node.close()


async def ask(
    node: LocalNode, token_ids: Sequence[int], num_tokens: int, adapter: str | None = None, priority: int = 0
) -> list[int]:
    request = GenerateRequest(
        request_id=RequestId(f"r{next(_ids)}"),
        prompt_token_ids=tuple(token_ids),
        context=RequestContext(adapter=adapter or "", priority=priority),
        sampling=Sampling(temperature=0, max_tokens=num_tokens, ignore_eos=True),
    )
    return [token async for delta in node.generate(request) for token in delta.token_ids]


def text(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(20, 900) for _ in range(length)]


def traffic() -> list[tuple[list[int], int, str | None]]:
    """Short and long ones, with and without adapters; a few of them fill the device."""
    chance = random.Random(11)
    return [
        (text(seed, chance.choice((20, 60, 300, 700))), chance.choice((4, 30, 120)), chance.choice(ADAPTERS))
        for seed in range(NUM_REQUESTS)
    ]


async def scheduling(node: LocalNode) -> Scheduling:
    found: Scheduling = await node.run_on_engine(lambda driver: driver.scheduling)
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed() -> list[list[int]]:
    """What each request is answered alone, by vLLM's own queue."""
    async with engine("vllm", num_kv_blocks=200) as node:
        return [await ask(node, *item) for item in traffic()]


class WrongByTenTimes:
    """A predictor that knows nothing and says it with confidence."""

    def predict(self, features: LengthFeatures) -> LengthGuess:
        guess = 300 if features.num_prompt_tokens % 2 else 2
        return LengthGuess(guess, guess, "made up")

    def observe(self, features: LengthFeatures, num_tokens: int) -> None: ...

    def refit(self) -> None: ...


async def crowd(node: LocalNode) -> list[list[int]]:
    """All of the traffic at once, beside some who give up when the first is answered."""
    given_up = [asyncio.create_task(ask(node, text(100 + seed, 200), 200)) for seed in range(4)]
    asked = [asyncio.create_task(ask(node, *item)) for item in traffic()]
    await asked[0]
    for task in given_up:
        task.cancel()
    answers = await asyncio.gather(*asked)
    await asyncio.gather(*given_up, return_exceptions=True)
    await until_idle(node)
    return answers


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def tight() -> AsyncIterator[LocalNode]:
    """One for all orders of starting: what each would build alone is the same but for its scheduling."""
    async with engine("fcfs") as node:
        yield node


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def with_host() -> AsyncIterator[LocalNode]:
    """Requests that are preempted find their KV in host memory."""
    async with engine("fcfs", num_kv_blocks=100, kv_host_gib=0.25) as node:
        assert node._tiers is not None
        node._tiers.policy = WaitsForTheDisk()
        yield node


async def use(node: LocalNode, policy: str) -> Scheduling:
    """Have the engine start requests in this order, and know nothing of those before."""

    def exchange(driver: VllmDriver) -> Scheduling:
        assert driver.scheduling is not None
        driver.scheduling.close()
        driver.scheduling = driver._make_scheduling(replace(node._config.engine, scheduling_policy=policy))
        driver.engine.reset_prefix_cache()
        return driver.scheduling

    return await node.run_on_engine(exchange)


class TestEveryOrder:
    @pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority", "fair", "mlq", "bounded"])
    async def test_no_order_changes_an_answer(
        self, policy: str, tight: LocalNode, undisturbed: list[list[int]]
    ) -> None:
        """Everybody at once on a device for a few: requests are preempted, predictions are wrong, some are aborted; nothing is lost or left."""
        own = await use(tight, policy)
        if policy == "mlq":
            own.predictor = WrongByTenTimes()
        for _ in range(5):  # who meets whom depends on the machine's speed
            assert await crowd(tight) == undisturbed
            state = own.state()
            assert state["policy"] == policy
            assert state["num_waiting"] == state["num_running"] == 0
            # Under `mlq` quotas may leave nobody to be preempted.
            if policy == "mlq" or state["counts"].get("preempted", 0) > 0:
                break
        else:
            pytest.fail("the device was too large, and this test could not fail")
        if isinstance(own.dispatcher.policy, Mlq):
            own.dispatcher.policy.check_invariants()
            assert own.dispatcher.policy.ledger.num_used == 0, "every quota has come back"
        counts = await tight.run_on_engine(lambda driver: driver.counts())
        assert counts.num_free_kv_blocks == counts.num_kv_blocks - 1


async def test_preempted_ones_come_back_from_host_memory_and_go_on_as_they_began(
    undisturbed: list[list[int]],
) -> None:
    """On a device for two, whose requests are squashed again and again."""

    def squash_last(driver: Any) -> None:
        running = driver._scheduler.running
        if len(running) > 1:
            driver.scheduling.squash(driver._scheduler, running[-1].request_id)

    async with engine("fcfs", num_kv_blocks=40, kv_host_gib=0.25) as node:
        assert node._tiers is not None
        node._tiers.policy = WaitsForTheDisk()
        own = await scheduling(node)
        asked = [asyncio.create_task(ask(node, *item)) for item in traffic()]
        while not all(task.done() for task in asked):
            await asyncio.sleep(0.1)
            if own.dispatcher.counts["squashed"] < 20:
                await node.run_on_engine(squash_last)
        assert await asyncio.gather(*asked) == undisturbed
        ways = own.all_counts()
        assert ways["preempted"] > 0 and ways["squashed"] > 0
        assert ways.get("preempted:swap", 0) + ways.get("preempted:split", 0) > 0, "none came back from there"


class TestPauses:
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
        await until_idle(with_host)
        counts = own.dispatcher.counts
        assert counts["paused"] > 0, "nobody was paused, and this test could not fail"
        assert counts["paused"] == counts["resumed"] and not own.dispatcher.pauses.is_on
        own.dispatcher.check_invariants()


async def until_idle(node: LocalNode) -> None:
    while sum(await node.run_on_engine(lambda driver: driver._scheduler.get_request_counts())):
        await asyncio.sleep(0.01)


async def test_short_questions_pass_long_ones_and_lanes_are_fitted() -> None:
    """With lanes fitted to what came, short questions behind a row of long jobs are answered before those have run; all are answered."""
    async with engine("mlq", num_kv_blocks=100, max_num_seqs=2, lane_refit_s=0.2) as node:
        own = await scheduling(node)
        for seed in range(24):
            await ask(node, text(seed, 20 if seed % 2 else 400), 2 if seed % 2 else 30)
        while own.dispatcher.counts["refits"] < 2:
            await ask(node, text(7, 20), 2)
            await asyncio.sleep(0.05)
        assert isinstance(own.dispatcher.policy, Mlq) and own.dispatcher.policy.lanes.num_lanes > 1
        ended: list[str] = []

        async def one(name: str, *args: Any, **options: Any) -> None:
            await ask(node, *args, **options)
            ended.append(name)

        long = [asyncio.create_task(one("long", text(50 + n, 400), 100)) for n in range(8)]
        await asyncio.sleep(0.05)
        short = [asyncio.create_task(one("short", text(80 + n, 20), 2)) for n in range(4)]
        await asyncio.gather(*long, *short)
        assert ended.index("short") < 4 and ended[-1] == "long"
        assert (
            sum(name == "long" for name in ended[: max(i for i, n in enumerate(ended) if n == "short")]) < 6
        )


async def test_priority_is_respected() -> None:
    """One at a time: who has the lower number starts first, whoever came first."""
    async with engine("priority", max_num_seqs=1) as node, starts(node) as started:
        holds = asyncio.create_task(ask(node, text(99, 40), 400))
        while not started:
            await asyncio.sleep(0.005)
        waiting = [asyncio.create_task(ask(node, text(n, 40), 8, priority=n)) for n in (3, 1, 2)]
        while (await node.stats()).num_waiting < 3:
            assert not holds.done(), "the slot was free before all of them waited"
            await asyncio.sleep(0.005)
        await asyncio.gather(holds, *waiting)
        assert started == [0, 1, 2, 3]
