"""One model split over two ranks, which are processes: the tokens are those of one process, whatever was reused, and a rank may end."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

import psutil
import pytest
import pytest_asyncio

from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig
from engine_bridge.driver.ranks.starting import RankKilled
from engine_bridge.driver.vllm_api import start
from engine_bridge.local_node import LocalNode
from engine_bridge.protocol.errors import EngineUnavailable

from .conftest import settle
from .nodes import Said, WaitsForTheDisk, ask, engine, generate, text
from .test_promotion import advise

NUM_DEVICE_BLOCKS = 24
PROMPT, OTHER, QUESTION = text("a", 400), text("b", 300), "Tell me about the sea."
REUSABLE = 384  # of PROMPT: whole blocks of 32 tokens, before its last token
ADAPTERS = ("", "json", "pirate", "poet", "robot", "shout")
SETTINGS = {"num_kv_blocks": NUM_DEVICE_BLOCKS, "max_model_len": 640}


class Split(NamedTuple):
    node: LocalNode
    tiers: KvTiers
    pids: list[int]

    async def wash(self) -> None:
        """Overwrite all of the device's KV."""
        for number in range(2):
            await ask(self.node, text(("wash", number), 600), 1)

    async def say(self) -> Said:
        return await generate(self.node, PROMPT, session_id="s")


def ranks() -> list[int]:
    """The processes of the ranks that this process has started."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child.pid for child in alive if "Worker_TP" in " ".join(child.cmdline())]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def whole() -> dict[str, list[int]]:
    """What one process says: to the prompt, and to the question by adapter."""
    async with engine(**SETTINGS) as node:
        told = {name: await ask(node, QUESTION, 24, adapter=name) for name in ADAPTERS}
        return told | {"prompt": await ask(node, PROMPT)}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def split(whole: object, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Split]:
    folder = tmp_path_factory.mktemp("ranks")
    tiers = KvTiers(
        TiersConfig(host_bytes=64 << 20, disk_bytes=256 << 20, folder=folder), policy=WaitsForTheDisk()
    )
    start._moved.cache_clear()  # as in a process that has built no engine yet
    async with engine(tiers, tensor_parallel_size=2, max_loras=2, **SETTINGS) as node:
        pids = ranks()
        assert len(pids) == 2
        yield Split(node, tiers, pids)
        ending = [child for child in multiprocessing.active_children() if child.name.startswith("VllmWorker")]
    assert not ranks()
    assert [child.exitcode for child in ending] == [0, 0], (
        "they have ended in time, so that nothing killed them"
    )


async def test_what_starts_ranks_in_the_place_of_vllms_is_not_taken_for_a_vllm_that_has_moved(
    split: Split,
) -> None:
    assert not await split.node.run_on_engine(lambda driver: driver._off)


async def test_tokens_are_those_of_one_process_from_every_tier(
    split: Split, whole: dict[str, list[int]]
) -> None:
    said = await split.say()
    assert (said.token_ids, said.num_reused) == (whole["prompt"], 0)
    said = await split.say()
    assert (said.token_ids, said.kv.device) == (whole["prompt"], REUSABLE)
    await split.wash()
    said = await split.say()
    assert (said.token_ids, said.kv.host) == (whole["prompt"], REUSABLE)
    await split.wash()
    split.tiers.store.flush()
    split.tiers.store.drop_host()
    said = await split.say()
    assert (said.token_ids, said.kv.disk) == (whole["prompt"], REUSABLE)
    await split.wash()
    watch, _ = await advise(split.node, "s")
    await watch.until("warm")
    said = await split.say()
    assert (said.token_ids, said.kv.device) == (whole["prompt"], REUSABLE)
    split.tiers.store.check_invariants()
    assert not split.tiers._moving


async def test_adapters_beside_the_base_model_answer_as_in_one_process(
    split: Split, whole: dict[str, list[int]]
) -> None:
    """Asked for at once, cold and then from host memory, while they take turns in the slots."""
    expected = {name: whole[name] for name in ADAPTERS}
    assert len({tuple(each) for each in expected.values()}) == len(ADAPTERS)
    for _ in range(2):
        told = await asyncio.gather(*(ask(split.node, QUESTION, 24, adapter=name) for name in ADAPTERS))
        assert dict(zip(ADAPTERS, told, strict=True)) == expected
    stats = split.node.figures().adapter_stats
    assert stats is not None and stats.num_by_place["host"] > 0, "there is a slot for each of them"


async def test_a_tenants_kv_is_erased_from_every_rank(split: Split, whole: dict[str, list[int]]) -> None:
    said = await generate(split.node, PROMPT, session_id="s", tenant="ada")
    assert (await generate(split.node, PROMPT, session_id="s", tenant="ada")).num_reused == REUSABLE
    await split.node.erase_kv("ada")
    again = await generate(split.node, PROMPT, session_id="s", tenant="ada")
    assert again.num_reused == 0 and again.token_ids == said.token_ids == whole["prompt"]


async def test_a_rank_that_ends_fails_the_engine_and_host_memory_outlives_it(
    split: Split, whole: dict[str, list[int]]
) -> None:
    await split.say()
    answering = asyncio.create_task(ask(split.node, OTHER, 200))
    await settle(lambda: split.node.figures().scheduling_stats.num_running == 1)
    os.kill(ranks()[1], signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        await answering
    await settle(lambda: split.node.state == "ready", timeout_s=120)
    assert not set(ranks()) & set(split.pids)
    said = await split.say()
    assert (said.token_ids, said.kv.host) == (whole["prompt"], REUSABLE)
    assert await ask(split.node, QUESTION, 24, adapter="poet") == whole["poet"]


async def test_a_rank_killed_while_its_engine_starts_is_said_and_costs_no_mechanism() -> None:
    """What is started outlives a Ctrl-C of the terminal meanwhile, which its processes get as well."""
    told: list[str] = []
    before = _spawned()

    def kill() -> None:
        """Send a SIGINT to ranks that import, which they hold back, and kill one of them."""
        while len(young := [each for each in _spawned() if each not in before]) < 2:
            time.sleep(0.01)
        for each in young:
            each.send_signal(signal.SIGINT)
        time.sleep(0.5)
        told.extend(each.status() for each in young)
        young[1].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RankKilled, match="rank 1 of the model was killed"):
        async with engine(tensor_parallel_size=2, max_loras=2, **SETTINGS):
            raise AssertionError("it has started, without a rank")
    killer.join()
    assert len(told) == 2 and psutil.STATUS_ZOMBIE not in told
    assert _spawned() == before


def _spawned() -> list[psutil.Process]:
    """The ranks that this process has started, those included that have not named themselves yet."""
    children = sorted(multiprocessing.active_children(), key=lambda child: child.name)
    return [psutil.Process(child.pid) for child in children if child.name.startswith("VllmWorker")]
