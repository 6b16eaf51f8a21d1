"""Adapters that are replaced, removed or pinned at the worst moment, and files whose weights are of another type than the engine's."""

from __future__ import annotations

import asyncio
import functools
import itertools
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from engine_bridge.adapters.watch import Folder
from engine_bridge.core.adapters.step_layouts import StepLayouts
from engine_bridge.driver.adapters import layouts
from engine_bridge.local_node import LocalNode
from engine_bridge.protocol.errors import EngineUnavailable, InvalidRequest
from engine_bridge.protocol.node import JsonReply
from tests.adapter_corpus import make_adapter

from . import nodes
from .conftest import engine_has, settle
from .facts import BODY, Patch
from .nodes import load, small, text, unload
from .test_engine_faults import break_next_step

POET_BYTES = 1_835_008  # its weights as float32; the file has them as bfloat16
CAPACITY = int(1.05 * POET_BYTES)
PROMPT = text(1, 40)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(small().adapters, tmp_path_factory.mktemp("found") / "adapters"))


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def node(folder: Path, state: Path) -> AsyncIterator[LocalNode]:
    """Host memory for the largest adapter, and beside it for none."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("engine_bridge.node_adapters.WATCH_EVERY_S", 0.05)
        patched.setattr("engine_bridge.adapters.follower.Folder", functools.partial(Folder, settle_s=0.2))
        settings = {"max_loras": 4, "num_kv_blocks": 100, "adapter_host_gib": CAPACITY / 1024**3}
        async with nodes.engine(adapters_dir=folder, state_dir=state, **settings) as node:
            yield node


async def ask(
    node: LocalNode, adapter: str = "", prompt: list[int] = PROMPT, num_tokens: int = 8, tenant: str = ""
) -> list[int]:
    async with asyncio.timeout(60):
        return await nodes.ask(node, prompt, num_tokens, adapter, tenant=tenant)


def names(node: LocalNode) -> set[str]:
    return {each.name for each in node.adapters()}


async def leave_all(node: LocalNode) -> None:
    """Every adapter is on disk, and nowhere else."""

    def put_back(driver: Any) -> bool:
        places = driver.adapters.places()
        driver.adapters.put_back(list(places), keeps_host=False)
        return set(places.values()) == {"disk"}

    while not await node.run_on_engine(put_back):
        await asyncio.sleep(0.01)


async def found(node: LocalNode, folder: Path, name: str) -> None:
    """Put an adapter of this name into the folder, and wait until it is listed."""
    await asyncio.to_thread(shutil.copytree, small().adapters / "shout", folder / name)
    await settle(lambda: name in names(node))


async def test_memory_is_reckoned_by_what_an_adapter_takes_once_it_is_loaded(node: LocalNode) -> None:
    """Twice the file's size here: who leaves for it has to give back so much, or it would wait for ever."""
    await leave_all(node)
    assert max(each.num_bytes for each in node.adapters()) == POET_BYTES
    for name in ("robot", "poet", "json", "poet", "robot"):
        assert await ask(node, name)
        await node.run_on_engine(lambda driver: driver.adapters.core.table.check(CAPACITY))


async def test_who_has_no_room_beside_the_pinned_ones_is_told(node: LocalNode) -> None:
    await leave_all(node)
    await node.pin_adapter("poet", True)
    assert await ask(node, "poet")
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="Unpin one"):
            await ask(node, "pirate")
    assert await ask(node), "all others are served"
    pinned = await node.pin_adapter("poet", False)
    assert pinned is not None and pinned.num_bytes == POET_BYTES
    assert await ask(node, "pirate")


async def test_a_draft_whose_adapter_goes_harms_nobody(node: LocalNode) -> None:
    """It waits until nobody else is being answered; the engine must not fail when its turn comes."""
    await load(node, "fleeting", small().adapters / "pirate")
    num_rebuilds = node.figures().num_rebuilds
    answer = asyncio.create_task(ask(node, "", text(2, 40), 900))
    await engine_has(node, 1)
    draft = nodes.request("hello there " * 30, 1, adapter="fleeting")
    prefill = asyncio.create_task(node.prefill(draft))
    while not await node.run_on_engine(lambda driver: bool(driver._background)):
        await asyncio.sleep(0.005)
    await unload(node, "fleeting")
    assert not answer.done() and not prefill.done()
    answer.cancel()
    with pytest.raises(EngineUnavailable, match="removed"):
        await asyncio.wait_for(prefill, 60)
    assert await ask(node, "", text(3, 40))
    assert node.figures().num_rebuilds == num_rebuilds


@pytest.mark.parametrize("where", ["when it is begun", "on the loader's thread", "in a step"])
async def test_an_adapter_that_cannot_be_laid_out_ends_its_own_requests_alone(
    node: LocalNode, tmp_path: Path, monkeypatch: Patch, where: str
) -> None:
    """The others' answers go on, the engine is not built again, and what the step left of its rows is never used."""
    contract = await node.run_on_engine(lambda driver: driver.adapters.contract)
    modules = {name: shape for name, shape in contract.modules.items() if "self_attn" in name}
    await load(node, "odd", make_adapter(tmp_path / "odd", modules=modules, rank=5))
    others = [("", text(5, 40)), ("pirate", text(6, 40))]
    wanted = [await ask(node, *other) for other in others]
    known = await ask(node, "odd", tenant="one")
    await leave_all(node)

    name = "packed_size" if where == "when it is begun" else "pack_slot"
    stock = getattr(layouts, name)

    def breaks(a_slices: Any, b_slices: Any, ranks: list[int], *rest: Any) -> Any:
        if 5 in ranks:
            raise MemoryError("made to fail")
        return stock(a_slices, b_slices, ranks, *rest)

    num_rebuilds = node.figures().num_rebuilds
    with monkeypatch.context() as patched:
        patched.setattr(layouts, name, breaks)
        if where == "in a step":  # the loader's thread does not get to it
            patched.setattr(StepLayouts, "allows", lambda *args: True)
            patched.setattr(layouts.Layout, "finish", lambda self: None)
        running = [asyncio.create_task(ask(node, *other, 120)) for other in others]
        await engine_has(node, len(others))
        for _ in range(2):
            with pytest.raises(EngineUnavailable, match="'odd' could not be made ready"):
                await ask(node, "odd", tenant="two")
            assert not any(task.done() for task in running)
        answers = await asyncio.gather(*running)
    assert [answer[: len(want)] for answer, want in zip(answers, wanted, strict=True)] == wanted
    assert node.figures().num_rebuilds == num_rebuilds
    assert await ask(node, "odd", tenant="two") == known
    await unload(node, "odd")


@pytest.mark.parametrize("is_removed", [False, True])
async def test_a_request_on_its_way_gets_the_adapter_that_took_the_place_of_its_own(
    node: LocalNode, monkeypatch: Patch, is_removed: bool
) -> None:
    """With KV of its own; where none did, it is refused as one for an unknown adapter."""
    new = await ask(node, "pirate")
    await load(node, "changing", small().adapters / "json")
    client, is_there, goes_on = node._client, asyncio.Event(), asyncio.Event()
    assert client is not None

    async def held(request: Any) -> None:
        is_there.set()
        await goes_on.wait()

    monkeypatch.setattr(client, "predict_length", held)
    asked = asyncio.create_task(ask(node, "changing"))
    await is_there.wait()
    if is_removed:
        await unload(node, "changing")
    else:
        await load(node, "changing", small().adapters / "pirate", load_inplace=True)
    goes_on.set()
    if is_removed:
        with pytest.raises(InvalidRequest, match="removed") as refused:
            await asked
        assert refused.value.code == "unknown_model"
    else:
        assert await asked == new
        await unload(node, "changing")


# -- files that change under a version that is served ------------------------------------------------------------------

FILES = ("adapter_config.json", "adapter_model.safetensors")


def overwrite(adapter: Path, other: str) -> None:
    """As a trainer does: in place, file by file."""
    for name in FILES:
        (adapter / name).write_bytes((small().adapters / other / name).read_bytes())


def half_write(adapter: Path, other: str) -> None:
    """What lies there after the first of the writes: new weights, not all of them, beside the old configuration."""
    raw = (small().adapters / other / FILES[1]).read_bytes()
    (adapter / FILES[1]).write_bytes(raw[: len(raw) // 2])


def no_copies(state: Path) -> None:
    """From now on there are none, nor can there be."""
    folder = state / "adapter-copies"
    while folder.is_dir():
        folder.rename(state / f"gone-{next(_numbers)}")
        with suppress(FileExistsError):  # it is being made again
            folder.touch(exist_ok=False)


async def until_answered(node: LocalNode, name: str, old: list[int], new: list[int] | None = None) -> None:
    """Ask until the new version answers, whatever it says if that is not given. Until then the old one does: none fails."""
    async with asyncio.timeout(60):
        while (answer := await ask(node, name)) == old:
            await leave_all(node)
    assert new is None or answer == new


async def answers_of(node: LocalNode, *adapters: str) -> list[list[int]]:
    found = [await ask(node, name) for name in adapters]
    assert all(first != second for first, second in itertools.combinations(found, 2))
    return found


@contextmanager
def being_written(folder: Path) -> Iterator[None]:
    """A file grows in the folder all the while, as in a download: a folder that rests without an adapter is one that was taken away."""
    is_whole = threading.Event()

    def write() -> None:
        while not is_whole.wait(0.02):
            (folder / "weights.part").touch()

    (folder / "weights.part").touch()
    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        is_whole.set()
        writer.join()
        (folder / "weights.part").unlink()


async def test_a_trainer_writing_over_what_is_served_fails_no_request(node: LocalNode, folder: Path) -> None:
    """The version that is served answers until the next one is whole, whatever lies in its place meanwhile."""
    shout, pirate, json = await answers_of(node, "shout", "pirate", "json")
    await found(node, folder, "trained")
    await leave_all(node)
    half_write(folder / "trained", "pirate")
    for _ in range(2):
        assert await ask(node, "trained") == shout
        await leave_all(node)
    overwrite(folder / "trained", "pirate")
    await until_answered(node, "trained", shout, pirate)
    await leave_all(node)
    with being_written(folder / "trained"):
        for name in FILES:
            (folder / "trained" / name).unlink()
        assert await ask(node, "trained") == pirate
        overwrite(folder / "trained", "json")
    await until_answered(node, "trained", pirate, json)


async def test_weights_never_meet_another_versions_configuration(node: LocalNode, folder: Path) -> None:
    """The weights are the same to the byte; only what they are scaled by is not."""
    await found(node, folder, "scaled")
    old = await ask(node, "scaled")
    await leave_all(node)
    path = folder / "scaled" / FILES[0]
    config = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(config | {"lora_alpha": -3 * config["lora_alpha"]}))
    assert await ask(node, "scaled") == old
    await until_answered(node, "scaled", old)


async def test_without_a_copy_a_request_waits_for_the_next_version_and_is_told_if_it_does_not_come(
    node: LocalNode, folder: Path, state: Path, monkeypatch: Patch
) -> None:
    """With a code of its own."""
    waits = "engine_bridge.driver.serving.adapter_waits"
    monkeypatch.setattr(f"{waits}.PATIENCE_S", 60.0)  # however slow this machine is
    shout, robot = await answers_of(node, "shout", "robot")
    for name in ("uncopied", "broken"):
        await found(node, folder, name)
    assert await ask(node, "uncopied") == shout
    await leave_all(node)
    no_copies(state)
    overwrite(folder / "uncopied", "robot")
    assert await ask(node, "uncopied") == robot
    monkeypatch.setattr(f"{waits}.PATIENCE_S", 0.2)
    monkeypatch.setattr(f"{waits}.READ_AGAIN_S", 0.05)
    half_write(folder / "broken", "robot")
    with pytest.raises(EngineUnavailable) as refused:
        await ask(node, "broken")
    assert refused.value.code == "adapter_changing"
    reply = await asyncio.wait_for(node.serve("chat", BODY | {"model": "broken"}, {}), 60)
    assert isinstance(reply, JsonReply) and reply.status == 503
    assert msgspec.json.decode(reply.body)["error"]["code"] == "adapter_changing"
    shutil.rmtree(folder / "broken")


async def test_what_changes_while_the_engine_is_rebuilt_is_served(
    node: LocalNode, folder: Path, monkeypatch: Patch
) -> None:
    await found(node, folder, "leaving")
    stock, loop = node._make_driver, asyncio.get_running_loop()

    def build_and_wait() -> Any:
        """What changes after the engine has read the list, and before it is up, is what it is not told of."""
        driver = stock()
        shutil.rmtree(folder / "leaving")
        asyncio.run_coroutine_threadsafe(found(node, folder, "late"), loop).result(60)
        assert "leaving" not in names(node)
        return driver

    monkeypatch.setattr(node._thread, "_make_driver", build_and_wait)
    await break_next_step(node)
    with pytest.raises(EngineUnavailable):
        await ask(node, "", text(4, 40))
    await settle(lambda: node.state == "ready")
    assert await ask(node, "late") == await ask(node, "shout")
    known = await node.run_on_engine(lambda driver: {each.name for each in driver.adapters._records.values()})
    assert known == names(node)
