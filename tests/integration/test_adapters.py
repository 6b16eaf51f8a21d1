"""Many adapters on a real engine with little memory: each answers as it would alone, and none harms another or the engine.

Runs before the shared engine starts (conftest), on two engines, one after the other.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine_bridge.core.adapters.step_layouts import PRIOR_BYTES_PER_S
from engine_bridge.driver.adapters.layouts import Layout
from engine_bridge.driver.adapters.slots import Slots
from engine_bridge.driver.adapters.weights import Loader
from engine_bridge.local_node import LocalNode
from engine_bridge.protocol.errors import BridgeError, InvalidRequest
from engine_bridge.protocol.figures import AdapterStats
from engine_bridge.protocol.node import Advisory, AdvisoryReport, JsonReply
from kvtiers.policy.rates import Rate
from tests.adapter_corpus import BAD, make_adapter

from . import nodes
from .conftest import engine_is_empty, engine_stats, num_free_blocks, settle
from .facts import Patch
from .nodes import load, text, unload

NUM_ADAPTERS = 40
RANKS = (8, 16, 32, 64, 128)
NUM_KV_BLOCKS = 80
ANSWER_TOKENS = 8
# The small model's attention modules.
SHAPES = {
    f"model.layers.{layer}.self_attn.{name}": (256, num_out)
    for layer in range(nodes.NUM_LAYERS)
    for name, num_out in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128), ("o_proj", 256))
}


def engine(folder: Path, **options: Any) -> AbstractAsyncContextManager[LocalNode]:
    usual = {"max_num_seqs": 6, "max_loras": 4, "num_kv_blocks": NUM_KV_BLOCKS}
    return nodes.engine(adapters_dir=folder, **usual | options)


async def ask(
    node: LocalNode, adapter: str | None, token_ids: Sequence[int], num_tokens: int = ANSWER_TOKENS
) -> list[int]:
    return await nodes.ask(node, token_ids, num_tokens, adapter)


def stats(node: LocalNode) -> AdapterStats:
    return node.figures().adapter_stats


def names(node: LocalNode) -> set[str]:
    return {info.name for info in node.adapters()}


@contextmanager
def held_up(monkeypatch: Patch, owner: type, name: str, thread: str = "") -> Iterator[threading.Event]:
    """Calls of this method wait until the event is set; each is made on the thread of that name."""
    is_open, stock = threading.Event(), getattr(owner, name)

    def wait(*args: Any) -> Any:
        assert threading.current_thread().name.startswith(thread)
        assert is_open.wait(60)
        return stock(*args)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, wait)
        try:
            yield is_open
        finally:
            is_open.set()


def slow_disk(monkeypatch: Patch) -> AbstractContextManager[threading.Event]:
    return held_up(monkeypatch, Loader, "load", "adapter-loader")


def late_layouts(monkeypatch: Patch) -> AbstractContextManager[threading.Event]:
    """The loader lays nothing out until the event is set."""
    return held_up(monkeypatch, Layout, "finish")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of mixed ranks."""
    root = tmp_path_factory.mktemp("adapters")
    for number in range(NUM_ADAPTERS):
        write_adapter(root / f"a{number:03}", RANKS[number % len(RANKS)], seed=number)
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def node(folder: Path) -> AsyncIterator[LocalNode]:
    """Host memory for a fifth of the adapters."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("engine_bridge.node_adapters.WATCH_EVERY_S", 0.2)
        async with engine(folder, adapter_host_gib=num_bytes(folder) / 5 / 1024**3) as node:
            yield node


def write_adapter(path: Path, rank: int, seed: int) -> None:
    """One that changes what the model says."""
    strong = {"lora_alpha": 25 * rank**0.5}
    make_adapter(path, modules=SHAPES, rank=rank, dtype="F32", seed=seed, config_overrides=strong)


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/adapter_model.safetensors"))


# -- an engine of its own (first: there is one at a time) ------------------------------------------------------------------------------


async def test_without_assist_a_request_waits_for_its_adapter(tmp_path: Path, monkeypatch: Patch) -> None:
    """A request waits for its slot, others do not; what is given up while it loads leaves nothing behind, and the node can be closed then."""
    for number in range(3):
        write_adapter(tmp_path / f"a{number}", 16, seed=number)
    # Host memory for one: none is loaded before it is asked for.
    async with engine(
        tmp_path, cpu_assist=False, adapter_host_gib=1.5 * num_bytes(tmp_path) / 3 / 1024**3
    ) as node:
        with late_layouts(monkeypatch) as is_open:
            asked = asyncio.create_task(ask(node, "a0", text(1, 40)))
            await ask(node, None, text(1, 40))
            assert not asked.done()
            is_open.set()
            await asked
        with slow_disk(monkeypatch) as is_open:
            asked = asyncio.create_task(ask(node, "a1", text(1, 40)))
            await ask(node, None, text(1, 40))
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            is_open.set()
        await settled(node)
        assert stats(node).num_waiting == 0
        with slow_disk(monkeypatch) as is_open:
            asked = asyncio.create_task(ask(node, "a2", text(1, 40)))
            await ask(node, None, text(1, 40))
            is_open.set()
            await node.close()
        with pytest.raises(BridgeError):
            await asked


async def test_worker_processes_compute_until_the_slot_is_ready(tmp_path: Path, monkeypatch: Patch) -> None:
    """With the loader held up, every delta of a prefill comes from a worker; when the slot is ready it takes over. No token is another."""
    write_adapter(tmp_path / "a0", 16, seed=0)
    prompt = text(5, 100)
    async with engine(tmp_path, cpu_assist_workers=1) as node:
        expected = await ask(node, "a0", prompt)
        await node.run_on_engine(forget_slots)
        before = stats(node).counts["worker_deltas"]
        with late_layouts(monkeypatch) as is_open:
            assert await ask(node, "a0", prompt, num_tokens=4) == expected[:4]
            assert stats(node).counts["worker_deltas"] > before
            is_open.set()
        await settled(node)
        assert await ask(node, "a0", prompt) == expected


class LateStacks(Slots):
    """Slots as a device of its own has them: filled beside the steps, here not before they are told to be."""

    fills_beside_steps = True
    is_open = False

    def is_filled(self, slot: int) -> bool:
        return self.is_open


async def test_cold_rows_come_from_the_host_path(tmp_path: Path, monkeypatch: Patch) -> None:
    """Rows of adapters that are still being copied get their deltas by the operator, beside the base model's; then the slots take over."""
    for number in range(2):
        write_adapter(tmp_path / f"a{number}", 16, seed=number)
    prompts = [text(5, 100), text(6, 40), text(7, 60)]
    monkeypatch.setattr("engine_bridge.driver.adapters.slots.make_slots", LateStacks)
    async with engine(tmp_path) as node:

        async def ask_all() -> list[list[int]]:
            return await asyncio.gather(
                *(
                    ask(node, adapter, prompt)
                    for adapter, prompt in zip(("a0", None, "a1"), prompts, strict=True)
                )
            )

        cold = await ask_all()
        deltas = stats(node).counts["host_path_deltas"]
        assert deltas > 0
        monkeypatch.setattr(LateStacks, "is_open", True)
        await node.run_on_engine(lambda driver: driver.engine.reset_prefix_cache())
        assert await ask_all() == cold
        assert stats(node).counts["host_path_deltas"] == deltas, "nothing is cold any more"


# -- many adapters -------------------------------------------------------------------------------------------------------------------


async def test_forty_adapters_answer_as_alone(node: LocalNode) -> None:
    """Random traffic over few slots, host memory for a fifth and KV blocks that requests need, too: no answer differs from its solo run."""
    chance = random.Random(3)
    wanted = [
        (f"a{chance.randrange(NUM_ADAPTERS):03}", text(seed, chance.randrange(20, 200)))
        for seed in range(NUM_ADAPTERS)
    ]
    assert len(node.adapters()) == NUM_ADAPTERS
    gate = asyncio.Semaphore(12)

    async def one(adapter: str, token_ids: list[int]) -> list[int]:
        async with gate:
            return await ask(node, adapter, token_ids)

    together = await asyncio.gather(*(one(*item) for item in wanted))
    seen = stats(node)
    assert seen.counts["evicted:host"] > 0 and seen.counts["evicted:slot"] > 0
    assert seen.host_bytes <= seen.host_capacity_bytes
    alone = [await ask(node, *item) for item in wanted[::3]]
    assert together[::3] == alone
    assert await ask(node, None, wanted[0][1]) != together[0], "or this test could not fail"
    # More than there are slots, one after the other: those that leave find free blocks, as no KV is worth more there.
    await node.run_on_engine(lambda driver: driver.engine.reset_prefix_cache())
    for item in wanted[:16]:
        await ask(node, *item)
    await settled(node)
    cached = {info.name for info in node.adapters() if info.place == "cached"}
    number = next(number for number, (adapter, _) in enumerate(wanted) if adapter in cached)
    before = stats(node).counts.get("loads:cached", 0)
    assert await ask(node, *wanted[number]) == together[number]
    assert stats(node).counts.get("loads:cached", 0) > before, "it came back from KV blocks"


async def test_an_announced_adapter_waits_in_a_slot_for_its_request(node: LocalNode) -> None:
    """Without KV tiers, too: there is nothing to say of the session, and the adapter comes all the same."""
    name = next(info.name for info in node.adapters() if info.place == "disk")
    before = stats(node).counts
    reports: list[AdvisoryReport] = []
    await node.advise(Advisory(advisory_id="adv", session_id="new", adapter=name), reports.append)
    await settle(lambda: [info.place for info in node.adapters() if info.name == name] == ["slot"])
    await settled(node)
    assert [report.state for report in reports] == ["unknown"]
    await ask(node, name, text(1, 40))
    counts = stats(node).counts
    assert counts["found:slot"] == before.get("found:slot", 0) + 1
    assert counts["announced_bytes:used"] > 0 and "announced_bytes:in_vain" not in counts


async def test_kv_takes_lent_blocks_back_at_once(node: LocalNode) -> None:
    """Adapters fill what is free; long prompts that need every block are all answered as without adapters, and no block is missing after."""
    prompts = [text(seed, 900) for seed in range(5)]  # three of them need every block

    async def ask_all() -> list[list[int]]:
        return await asyncio.gather(*(ask(node, None, prompt) for prompt in prompts))

    await node.run_on_engine(forget_all)
    undisturbed = await ask_all()
    await node.run_on_engine(forget_all)
    num_free = await num_free_blocks(node)
    answers = {number: await ask(node, f"a{number:03}", text(number, 40)) for number in range(16)}
    await settled(node)
    lent, cached, given = stats(node).cached_bytes, await ids_in_blocks(node), num_given_way(node)
    assert lent > 0 and cached, "what left its slot lies in KV blocks"
    assert await num_free_blocks(node) == num_free, "they count as free"
    assert await ask_all() == undisturbed
    left = await ids_in_blocks(node)
    assert left < cached, "some went, and none came"
    assert num_given_way(node) - given == len(cached - left), "each that went is counted once"
    assert stats(node).cached_bytes < lent
    assert await num_free_blocks(node) == num_free
    for number, answer in answers.items():
        assert await ask(node, f"a{number:03}", text(number, 40)) == answer


async def ids_in_blocks(node: LocalNode) -> set[int]:
    return await node.run_on_engine(lambda driver: set(driver.adapters.copies.blocks.ids()))


def num_given_way(node: LocalNode) -> int:
    """Adapters whose blocks went to KV: it needed them, or the prefixes that it would have taken were worth more. Which of the two is a matter of
    measured speeds."""
    return sum(stats(node).counts.get(f"evicted:cached:{reason}", 0) for reason in ("kv", "value"))


async def settled(node: LocalNode) -> None:
    """Until nothing is on its way any more."""
    while await node.run_on_engine(lambda driver: driver.adapters.has_work()):
        await asyncio.sleep(0.01)


# -- nobody waits ----------------------------------------------------------------------------------------------------------------------


async def test_a_cold_adapter_stops_nobody(node: LocalNode, monkeypatch: Patch) -> None:
    """While a disk takes its time over one adapter, running streams and other adapters go on; ten requests for it load it once."""
    expected = await ask(node, "a003", text(1, 40))
    await node.run_on_engine(forget_all)
    await ask(node, "a001", text(1, 40))
    with slow_disk(monkeypatch) as is_open:
        cold = [asyncio.create_task(ask(node, "a003", text(1, 40))) for _ in range(10)]
        await ask(node, None, text(2, 40))
        await ask(node, "a001", text(2, 40))
        assert not any(task.done() for task in cold)
        before = stats(node).counts["loads:disk"]
        is_open.set()
        assert await asyncio.gather(*cold) == [expected] * 10
    assert stats(node).counts["loads:disk"] == before + 1


def forget_all(driver: Any) -> None:
    """Everything back to disk, and no prefix is known."""
    driver.engine.reset_prefix_cache()
    driver.adapters.put_back(driver.adapters.places(), keeps_host=False)


async def test_with_assist_a_request_starts_before_its_slot(node: LocalNode, monkeypatch: Patch) -> None:
    """The first steps compute with the host's weights while the loader is held up; then the slot takes over. No token is another."""
    prompt = text(5, 100)
    expected = await ask(node, "a004", prompt, num_tokens=30)
    await node.run_on_engine(forget_slots)
    with late_layouts(monkeypatch) as is_open:
        asked = asyncio.create_task(ask(node, "a004", prompt, num_tokens=30))
        assert await ask(node, "a004", prompt, num_tokens=4) == expected[:4]
        is_open.set()
        assert await asked == expected


@pytest.mark.parametrize("is_dear", [True, False])
async def test_with_assist_a_step_lays_an_adapter_out_only_where_it_costs_others_less_than_it_gains(
    node: LocalNode, monkeypatch: Patch, is_dear: bool
) -> None:
    """Until the stream has ended the loader, which is held up here, is to lay it out where that takes long; then the request's own step does it."""
    expected = await ask(node, "a005", text(5, 40))
    await settled(node)
    await node.run_on_engine(forget_slots)
    usual = await node.run_on_engine(
        lambda driver: lay_out_at(driver, Rate(1.0 if is_dear else PRIOR_BYTES_PER_S))
    )

    async def is_running() -> bool:
        return (await engine_stats(node)).num_running > 0

    with late_layouts(monkeypatch) as is_open:
        stream = asyncio.create_task(ask(node, None, text(6, 40), 40 if is_dear else 900))
        await settle(is_running)
        assert await ask(node, "a005", text(5, 40)) == expected
        assert stream.done() == is_dear
        stream.cancel()
        is_open.set()
    await engine_is_empty(node)
    await node.run_on_engine(lambda driver: lay_out_at(driver, usual))
    await settled(node)


async def test_an_adapter_is_laid_out_while_its_request_is_on_its_way(node: LocalNode) -> None:
    """While the engine is at work on something else, which here takes until then. No token is another."""
    expected = await ask(node, "a006", text(5, 40))
    await settled(node)
    before = stats(node).counts.get("laid_out_ahead", 0)
    is_held = threading.Event()

    def until_one_is_laid_out(driver: Any) -> None:
        """Or at least begun. The engine does nothing between what is forgotten here and the request."""
        forget_all(driver)
        driver.adapters.loader.drop_ahead(time.monotonic() + 60)  # of requests before this one
        is_held.set()
        ahead, until_s = driver.adapters.loader._layouts, time.monotonic() + 30
        while not ahead._layouts:
            assert time.monotonic() < until_s, "the loader lays nothing out"
            time.sleep(0.001)

    step = asyncio.create_task(node.run_on_engine(until_one_is_laid_out))
    assert await asyncio.to_thread(is_held.wait, 30), "or the engine may come to the request first"
    assert await ask(node, "a006", text(5, 40)) == expected
    await step
    assert stats(node).counts["laid_out_ahead"] == before + 1
    await settled(node)


def lay_out_at(driver: Any, rate: Rate) -> Rate:
    """Have layouts in steps be thought to take so long. Returns what they were thought to take."""
    layouts = driver.adapters._step_layouts
    before, layouts.rate = layouts.rate, rate
    return before


def forget_slots(driver: Any) -> None:
    driver.adapters.put_back(driver.adapters.places(), keeps_host=True)


# -- versions --------------------------------------------------------------------------------------------------------------------------


async def test_replacing_under_load(node: LocalNode, tmp_path: Path) -> None:
    """Requests run on while their adapter is replaced again and again; each answer is that of one version, and none fails."""
    path, prompt = tmp_path / "versioned", text(9, 60)
    versions = {}
    for number in range(3):
        write_adapter(tmp_path / f"v{number}", RANKS[number], seed=1000 + number)
        await load(node, f"v{number}", tmp_path / f"v{number}")
        versions[number] = await ask(node, f"v{number}", prompt)
    assert len({tuple(answer) for answer in versions.values()}) == 3, "or this test could not fail"
    replace(tmp_path / "v0", path)
    await load(node, "versioned", path)
    answers: list[list[int]] = []
    is_over = asyncio.Event()

    async def keep_asking() -> None:
        while not is_over.is_set():
            try:
                answers.append(await ask(node, "versioned", prompt))
            except BridgeError as error:
                assert "again" in str(error)

    askers = [asyncio.create_task(keep_asking()) for _ in range(4)]
    for round_ in range(1, 4):
        await ask(node, f"a{round_:03}", text(round_, 40))
        replace(tmp_path / f"v{round_ % 3}", path)
        await load(node, "versioned", path, load_inplace=True)
    is_over.set()
    await asyncio.gather(*askers)
    assert len(answers) > 3 and all(answer in versions.values() for answer in answers)
    assert await ask(node, "versioned", prompt) == versions[0]
    await settled(node)
    assert stats(node).num_adapters == NUM_ADAPTERS + 4, "no version is left behind"
    for name in ("versioned", *(f"v{number}" for number in versions)):
        await unload(node, name)


def replace(source: Path, path: Path) -> None:
    fresh = path.with_name(f"{path.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source, fresh, copy_function=shutil.copyfile)
    shutil.rmtree(path, ignore_errors=True)
    fresh.rename(path)


async def test_files_that_went_behind_our_back(node: LocalNode, tmp_path: Path, monkeypatch: Patch) -> None:
    """An adapter that is read again and is another, or gone: its request fails with a reason; others and the engine do not notice."""
    monkeypatch.setattr("engine_bridge.driver.serving.adapter_waits.PATIENCE_S", 0.5)
    path = tmp_path / "fickle"
    write_adapter(path, 8, seed=77)
    await load(node, "fickle", path)
    expected = await ask(node, "fickle", text(1, 40))
    await node.run_on_engine(forget_all)
    write_adapter(path, 8, seed=78)
    with pytest.raises(BridgeError, match=r"(?i)again"):
        await ask(node, "fickle", text(1, 40))
    shutil.rmtree(path)
    with pytest.raises(BridgeError):
        await ask(node, "fickle", text(1, 40))
    assert await ask(node, "a000", text(1, 40)) != expected
    assert stats(node).num_waiting == 0


# -- bad adapters ----------------------------------------------------------------------------------------------------------------------


async def test_the_corpus_of_bad_adapters(node: LocalNode, tmp_path: Path) -> None:
    """Each is refused with a reason, and afterwards the engine, the base model and other adapters answer as before."""
    prompt = text(4, 80)
    fits = await node.run_on_engine(lambda driver: driver.adapters.contract)
    before = [await ask(node, adapter, prompt) for adapter in (None, "a002")]
    for name, case in BAD.items():
        path = tmp_path / name
        code = case(path, fits.modules, fits.max_rank)
        reply = await node.load_adapter({"lora_name": name, "lora_path": str(path)})
        assert 400 <= reply.status < 500, (name, code, reply.body)
        assert name not in names(node)
    assert [await ask(node, adapter, prompt) for adapter in (None, "a002")] == before
    assert node.figures().num_rebuilds == 0


async def test_an_adapter_that_overflows_is_at_fault_itself_and_nobody_is_told_to_try_again(
    node: LocalNode, tmp_path: Path, monkeypatch: Patch
) -> None:
    """One that an earlier release let in, which did not look at scaled weights: found when a request wants it."""
    path = tmp_path / "overflowing"
    fits = await node.run_on_engine(lambda driver: driver.adapters.contract)
    BAD["overflows_when_scaled"](path, fits.modules, fits.max_rank)
    with monkeypatch.context() as earlier:
        earlier.setattr("engine_bridge.adapters.catalog.check_finite", lambda *args: None)
        await load(node, "overflowing", path)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"overflow.*another"):
            await ask(node, "overflowing", text(1, 40))
    body = {"model": "overflowing", "prompt": "Hello", "max_tokens": 4}
    reply = await node.serve("completions", body, {})
    assert isinstance(reply, JsonReply) and reply.status == 400, reply
    assert b"overflow" in reply.body and b"again" not in reply.body
    assert await ask(node, "a000", text(1, 40))
    assert stats(node).num_waiting == 0


# -- the folder ------------------------------------------------------------------------------------------------------------------------


async def test_an_adapter_is_listed_once_it_is_usable(
    node: LocalNode, tmp_path: Path, monkeypatch: Patch
) -> None:
    client = node._client
    add_lora, listed = client.add_lora, []

    async def add_and_look(request: Any) -> bool:
        is_added = await add_lora(request)
        listed.append("late" in names(node))
        return is_added

    monkeypatch.setattr(client, "add_lora", add_and_look)
    write_adapter(tmp_path / "late", 16, seed=3)
    await load(node, "late", tmp_path / "late")
    assert listed == [False] and "late" in names(node)
    assert await ask(node, "late", text(1, 40))
    await unload(node, "late")
    assert "late" not in names(node)
