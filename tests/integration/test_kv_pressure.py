"""Tokens stay the same whatever tier their KV came from: with too little memory everywhere, with adapters, with a disk that fails.

Runs before the shared engine starts (conftest), each engine after the one before it has gone.
"""

from __future__ import annotations

import asyncio
import errno
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine_bridge.core.kv import kv_transfers
from engine_bridge.driver.engine import building
from engine_bridge.driver.in_process import scheduler_of
from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig
from engine_bridge.driver.vllm_api import RequestStatus
from engine_bridge.local_node import LocalNode
from engine_bridge.protocol.node import Advisory, AdvisoryReport, KvSources
from kvtiers.io.files import Files
from kvtiers.policy.restore import Action, RestoreDecision, RestoreFacts

from .conftest import num_free_blocks, settle
from .nodes import NUM_LAYERS, WaitsForTheDisk, engine, generate, text

BLOCK_BYTES = NUM_LAYERS * 2 * 2 * 64 * 32 * 4  # layers, K and V, heads, head size, tokens, float32
ADAPTERS = (None, "pirate", "robot", "shout")
NUM_TURNS, NUM_SESSIONS, ANSWER_TOKENS = 3, 6, 10
NUM_DEVICE_BLOCKS, BLOCK_TOKENS = 27, 32
MAX_ROUNDS = 10


async def conversation(node: LocalNode, session: int) -> tuple[list[list[int]], list[KvSources]]:
    """Turns of one session: each prompt is all that went before and a new question."""
    history: list[int] = []
    answers, sources = [], []
    adapter = ADAPTERS[session % len(ADAPTERS)] or ""
    for turn in range(NUM_TURNS):
        history += text(100 * session + turn, 60 + 12 * session)
        said = await generate(node, history, ANSWER_TOKENS, session_id=f"s{session}", adapter=adapter)
        history += said.token_ids
        answers.append(said.token_ids)
        sources.append(said.kv)
    return answers, sources


async def rounds_until(
    is_enough: Callable[[list[KvSources]], bool], node: LocalNode, undisturbed: list[list[list[int]]]
) -> None:
    """Play all sessions until what they found of their KV is enough. None may ever say anything else than undisturbed."""
    for _ in range(MAX_ROUNDS):
        spoken = await asyncio.gather(*(conversation(node, session) for session in range(NUM_SESSIONS)))
        for session, (answers, _) in enumerate(spoken):
            assert answers == undisturbed[session], f"session {session} said something else"
        if is_enough([kv for _, kvs in spoken for kv in kvs]):
            return
    pytest.fail(f"{MAX_ROUNDS} rounds never came to use the tiers as this case wants it")


class Faults(Files):
    """A disk that fails, flips bits, runs full and stalls, each now and then, by a fixed sequence."""

    def __init__(self) -> None:
        self.chance = random.Random(7)

    def _strikes(self, share: float) -> bool:
        return self.chance.random() < share

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._strikes(0.1):
            raise OSError(errno.EIO, "bad sector")
        if self._strikes(0.1):
            time.sleep(0.1)
        num_bytes = super().preadv(fd, buffers, offset)
        if num_bytes and self._strikes(0.2):
            buffers[0][self.chance.randrange(len(buffers[0]))] ^= 0x10
        return num_bytes

    async def write(self, file: Any, data: memoryview) -> int:
        if self._strikes(0.02):
            raise OSError(errno.ENOSPC, "no space left")
        return await super().write(file, data)


class TrustsTheDisk:
    """Starts every restore at once, whether its layers are there or not: each late or damaged layer fails inside a step."""

    def decide(self, facts: RestoreFacts) -> RestoreDecision:
        return RestoreDecision(Action.LOAD, facts.num_blocks, "trust", 0.0)


class SlowDevice:
    """In place of a CPU's copier: as on a GPU, copies are made long after the call, unless the next kernels wait for them."""

    overlaps = True

    def __init__(self, copier: Any) -> None:
        self._copier = copier
        self._device = ThreadPoolExecutor(1)
        self._gathered: list[tuple[Any, ...]] = []
        self.out, self.back = copier.out, copier.back

    def to_host(self, *copied: Any) -> None:
        self._gathered.append((self._copier.to_host, *copied))

    def to_device(self, *copied: Any) -> None:
        self._gathered.append((self._copier.to_device, *copied))

    def flush(self) -> None:
        self._make(self._take())

    def end_step(self, then: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        self._device.submit(self._make_later, self._take(), then)

    def ask(self) -> None:
        pass

    def rest(self) -> None:
        self._device.submit(lambda: None).result()

    def _take(self) -> list[tuple[Any, ...]]:
        gathered, self._gathered = self._gathered, []
        return gathered

    def _make(self, copies: list[tuple[Any, ...]]) -> None:
        for copy, *copied in copies:
            copy(*copied)

    def _make_later(self, copies: list[tuple[Any, ...]], then: Callable[[], None]) -> None:
        time.sleep(0.2)  # many steps
        self._make(copies)
        then()


class OnSlowDevice(KvTiers):
    """The tiers of an engine whose copies run beside its steps."""

    def attach(self, *args: Any) -> None:
        super().attach(*args)
        self.loads_must_hold = True
        self.copier = SlowDevice(self.copier)


@pytest.fixture
def slow_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines copy as on a GPU, and what they restore beside the steps however little it is."""
    stock = building.connector_config

    def connector_config(name: str, *, by_layer: bool, has_ranks: bool) -> Any:
        return stock(name, by_layer=False, has_ranks=has_ranks)

    monkeypatch.setattr(building, "connector_config", connector_config)
    monkeypatch.setattr(kv_transfers, "STEP_WAIT_S", 0.0)


async def what_is_promoted_is_found_once_it_has_come(node: LocalNode, answers: list[list[int]]) -> None:
    """Of the first session, which has said this: its last turn is asked again."""
    assert await node.run_on_engine(lambda driver: driver.engine.reset_prefix_cache())
    reports: list[AdvisoryReport] = []
    await node.advise(Advisory(advisory_id="again", session_id="s0"), reports.append)
    await settle(lambda: reports and reports[-1].state == "warm")
    prompt = [token for turn in range(NUM_TURNS) for token in (*text(turn, 60), *answers[turn])]
    said = await generate(node, prompt[: -len(answers[-1])], ANSWER_TOKENS, session_id="s0")
    assert said.token_ids == answers[-1] and said.kv.device > 0 and said.kv.host == 0
    await settle(lambda: reports[-1].state == "hit")


@pytest.mark.parametrize(
    "host_blocks", [pytest.param(200, id="for all"), pytest.param(44, id="with the device's")]
)
async def test_tokens_are_the_same_though_no_step_waits_for_copies(
    undisturbed: list[list[list[int]]], slow_device: None, host_blocks: int
) -> None:
    """Blocks that are still being saved or filled are given to no request, though there are hardly any others."""
    config = TiersConfig(host_bytes=host_blocks * BLOCK_BYTES)
    tiers = OnSlowDevice(config, policy=WaitsForTheDisk())
    async with engine(tiers, num_kv_blocks=NUM_DEVICE_BLOCKS, max_model_len=512) as node:
        await rounds_until(
            lambda kvs: tiers.num_carried > 0 and any(kv.host for kv in kvs), node, undisturbed
        )
        if host_blocks == 200:
            await what_is_promoted_is_found_once_it_has_come(node, undisturbed[0])
        assert await node.run_on_engine(lambda driver: driver.engine.reset_prefix_cache())
        assert await num_free_blocks(node) == NUM_DEVICE_BLOCKS - 1
        await asyncio.to_thread(
            tiers.copier.rest
        )  # copies that hold no blocks of the device, but of host memory
        assert tiers.store.check_invariants() == 0


async def test_what_device_and_host_memory_hold_together_is_computed_once(
    undisturbed: list[list[list[int]]],
) -> None:
    """Neither holds the six conversations alone, and there is no disk."""
    tiers = KvTiers(TiersConfig(host_bytes=52 * BLOCK_BYTES), policy=WaitsForTheDisk())
    async with engine(tiers, num_kv_blocks=NUM_DEVICE_BLOCKS, max_model_len=512) as node:
        for number in range(3):
            for session in range(NUM_SESSIONS):
                answers, sources = await conversation(node, session)
                assert answers == undisturbed[session]
                if number:
                    assert max(kv.recomputed for kv in sources) <= BLOCK_TOKENS, (number, session, sources)
        assert tiers.stats().host.num_evicted > 0
        tiers.store.check_invariants()


def is_shown(kind: str, tiers: KvTiers, sources: list[KvSources]) -> bool:
    """Whether KV came from the tier in question, or a fault met a read: never sure, as what is slower than computing is not restored. With the
    default policy, whether memory was short and the disk in use; what serves then is its own choice."""
    stats = tiers.stats()
    if kind == "default":
        return stats.host.num_evicted + stats.host.num_trimmed > 0 and stats.disk.bytes_written > 0
    if kind == "host":
        return any(kv.host for kv in sources)
    has_failed = stats.disk.num_corrupt + stats.disk.num_read_errors > 0 and tiers.num_failed_loads > 0
    return has_failed and any(kv.disk for kv in sources)


@pytest.fixture(scope="module")
async def undisturbed() -> list[list[list[int]]]:
    """What each conversation says alone, with all the memory it wants and no tiers."""
    async with engine() as node:
        return [(await conversation(node, session))[0] for session in range(NUM_SESSIONS)]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("host", id="host memory only"),
        pytest.param("blind", id="restores that begin before anything is read, of a disk that fails"),
        pytest.param("default", id="host memory for one session, and disk, by the default policy"),
    ],
)
async def test_tokens_are_the_same_under_memory_pressure(
    kind: str, undisturbed: list[list[list[int]]], tmp_path: Path
) -> None:
    # The device holds two of the six conversations, so requests are preempted and prefixes overwritten all the time.
    host_blocks = 100 if kind == "host" else 12
    # None: by cost, as in any server, so which tier serves is up to the machine's speed.
    policy = {"host": WaitsForTheDisk(), "default": None}.get(kind, TrustsTheDisk())
    disk_bytes = 0 if kind == "host" else 256 << 20
    config = TiersConfig(host_bytes=host_blocks * BLOCK_BYTES, disk_bytes=disk_bytes, folder=tmp_path)
    tiers = KvTiers(config, files=Faults() if kind == "blind" else None, policy=policy)
    async with engine(tiers, num_kv_blocks=NUM_DEVICE_BLOCKS, max_model_len=512) as node:
        await rounds_until(lambda kvs: is_shown(kind, tiers, kvs), node, undisturbed)
        tiers.store.check_invariants()
        if kind == "default":
            await a_way_back_is_chosen_at_the_preemption_and_gone(node, tiers)
        assert await num_free_blocks(node) == NUM_DEVICE_BLOCKS - 1


async def a_way_back_is_chosen_at_the_preemption_and_gone(node: LocalNode, tiers: KvTiers) -> None:
    prompt = text(4711, 200)
    whole = await generate(node, prompt, 40, session_id="whole")
    chosen, resumed = sum(tiers.chosen.values()), sum(tiers.resumed.values())
    broken = asyncio.create_task(generate(node, prompt, 40, session_id="broken"))

    def preempt(driver: Any) -> bool:
        scheduler = scheduler_of(driver.engine)
        if not scheduler.running or scheduler.running[0].num_computed_tokens < len(prompt) + 5:
            return False
        scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
        return True

    while not await node.run_on_engine(preempt):
        assert not broken.done(), "it ended before it could be preempted"
    assert (await broken).token_ids == whole.token_ids
    assert sum(tiers.chosen.values()) == chosen + 1
    assert sum(tiers.resumed.values()) == resumed + 1


def fail(*_: Any) -> None:
    raise RuntimeError("broken on purpose")


def break_a_step(driver: Any, tiers: KvTiers, when: str) -> None:
    """Have the next step fail, at whatever point."""
    driver.engine.reset_prefix_cache()
    copier = tiers.copier
    to_host = copier.to_host

    def save_half(layer: int, *copied: Any) -> None:
        fail() if layer > 0 else to_host(layer, *copied)

    if when == "loads":
        copier.to_device = fail
    else:
        copier.to_host = save_half


async def test_the_store_outlives_a_rebuild_of_the_engine(tmp_path: Path) -> None:
    """Of which a step fails that saves what was computed, and then one that loads it."""
    config = TiersConfig(host_bytes=64 << 20, disk_bytes=64 << 20, folder=tmp_path)
    tiers, prompt = KvTiers(config, policy=WaitsForTheDisk()), text(1, 300)
    async with engine(tiers) as node:
        tiers.is_paused = True  # so that it is saved in the step that fails
        before = await generate(node, prompt, session_id="s")
        tiers.is_paused = False
        for num_rebuilds, (when, num_found) in enumerate((("saves", 0), ("loads", 288)), 1):
            await node.run_on_engine(lambda driver, when=when: break_a_step(driver, tiers, when))
            with pytest.raises(Exception, match="rebuil"):
                await generate(node, prompt, session_id="s")
            await settle(
                lambda num=num_rebuilds: node.figures().num_rebuilds == num and node.state == "ready"
            )
            assert tiers.store.check_invariants() == 0, "held by a step that is gone"
            after = await generate(node, prompt, session_id="s")
            assert after.token_ids == before.token_ids
            assert (after.kv.host, after.kv.recomputed) == (num_found, 300 - num_found)


class DamagedOnce(Files):
    """A disk of which the next read has wrong bits, and does not come before a step waits for it."""

    def __init__(self) -> None:
        self.is_due = False
        self.is_awaited = threading.Event()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        num_bytes, is_due = super().preadv(fd, buffers, offset), self.is_due
        if is_due:
            self.is_awaited.wait(10)
            self.is_due, buffers[0][0] = False, buffers[0][0] ^ 0x10
        return num_bytes

    def watch(self, store: Any) -> None:
        """Note when a step of this store's engine waits for a layer."""
        wait_for_layer = store.wait_for_layer

        def noted(*args: Any) -> int:
            self.is_awaited.set()
            found: int = wait_for_layer(*args)
            return found

        store.wait_for_layer = noted


async def test_what_is_computed_again_because_a_step_s_load_failed_is_kept(tmp_path: Path) -> None:
    config = TiersConfig(host_bytes=64 << 20, disk_bytes=64 << 20, folder=tmp_path)
    files, prompt = DamagedOnce(), text(1, 300)
    tiers = KvTiers(config, files=files, policy=TrustsTheDisk())
    async with engine(tiers) as node:
        files.watch(tiers.store)
        before = await generate(node, prompt, session_id="s")
        assert await asyncio.to_thread(tiers.store.flush)
        tiers.store.drop_host()
        for files.is_due, num_found in ((True, 0), (False, 288)):
            assert await node.run_on_engine(lambda driver: driver.engine.reset_prefix_cache())
            after = await generate(node, prompt, session_id="s")
            assert after.token_ids == before.token_ids
            assert after.kv.host + after.kv.disk == num_found
        assert tiers.num_failed_loads


async def test_of_two_that_share_a_load_that_failed_neither_relies_on_the_other(tmp_path: Path) -> None:
    """The first of them is gone before it has computed again what did not come."""
    config = TiersConfig(host_bytes=64 << 20, disk_bytes=64 << 20, folder=tmp_path)
    files, prompt = DamagedOnce(), text(1, 300)
    tiers = KvTiers(config, files=files, policy=TrustsTheDisk())

    def drop_the_first(driver: Any) -> None:
        scheduler = scheduler_of(driver.engine)
        handle = scheduler._handle_invalid_blocks

        def handle_and_drop(*args: Any) -> set[str]:
            found: set[str] = handle(*args)
            assert len(found) == 2, "they share no load, and this test could not fail"
            scheduler.finish_requests(scheduler.running[0].request_id, RequestStatus.FINISHED_ABORTED)
            return found

        scheduler._handle_invalid_blocks = handle_and_drop
        time.sleep(0.5)  # both are asked meanwhile, so that one step starts both

    async with engine(tiers) as node:
        files.watch(tiers.store)
        before = await generate(node, prompt, session_id="s")
        for other in range(8):  # the device's blocks hold other words then
            await generate(node, text(50 + other, 600))
        assert await asyncio.to_thread(tiers.store.flush)
        tiers.store.drop_host()
        assert await node.run_on_engine(lambda driver: driver.engine.reset_prefix_cache())
        dropping = asyncio.create_task(node.run_on_engine(drop_the_first))
        await asyncio.sleep(0.1)
        files.is_due = True
        asked = {asyncio.create_task(generate(node, prompt, session_id=name)) for name in ("s", "t")}
        await dropping
        ended, left = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        assert [task.result().token_ids for task in ended] == [before.token_ids]
        assert tiers.num_failed_loads
