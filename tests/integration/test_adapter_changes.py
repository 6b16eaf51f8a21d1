"""Adapters that are replaced, removed or pinned at the worst moment, and files whose weights are of another type than the engine's."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from engine_bridge.core.adapters.step_layouts import StepLayouts
from engine_bridge.driver.adapters import layouts
from engine_bridge.local_node import LocalNode
from engine_bridge.protocol.errors import EngineUnavailable, InvalidRequest
from engine_bridge.protocol.node import ChatMessage, GenerateRequest, JsonReply, RequestId, Sampling
from engine_bridge.protocol.request_context import RequestContext
from gateway.settings.config import DEMO_ADAPTERS_DIR
from tests.adapter_corpus import make_adapter

from .test_adapters import ask, engine, load, text

POET_BYTES = 3_670_016  # its weights as float32; the file has them as bfloat16
CAPACITY = int(1.05 * POET_BYTES)
PROMPT = text(1, 40)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(DEMO_ADAPTERS_DIR, tmp_path_factory.mktemp("found") / "adapters"))


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def node(folder: Path, state: Path) -> AsyncIterator[LocalNode]:
    """Host memory for the largest adapter, and beside it for none."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("engine_bridge.node_adapters.WATCH_EVERY_S", 0.2)
        options = {"max_num_seqs": 8, "num_kv_blocks": 160, "adapter_host_gib": CAPACITY / 1024**3}
        async with engine(folder, state_dir=state, **options) as node:
            yield node


async def leave_all(node: LocalNode) -> None:
    """Every adapter is on disk, and nowhere else."""
    while any(
        place != "disk"
        for place in (await node.run_on_engine(lambda driver: driver.adapters.places())).values()
    ):
        await node.run_on_engine(
            lambda driver: driver.adapters.put_back(list(driver.adapters.places()), keeps_host=False)
        )
        await asyncio.sleep(0.01)


async def found(node: LocalNode, folder: Path, name: str) -> None:
    """Put an adapter of this name into the folder, and wait until it is listed."""
    await asyncio.to_thread(shutil.copytree, DEMO_ADAPTERS_DIR / "shout", folder / name)
    async with asyncio.timeout(60):
        while name not in {each.name for each in node.adapters()}:
            await asyncio.sleep(0.02)


async def in_time(answer: Any) -> Any:
    return await asyncio.wait_for(answer, 60)


async def test_memory_is_reckoned_by_what_an_adapter_takes_once_it_is_loaded(node: LocalNode) -> None:
    """Twice the file's size here: who leaves for it has to give back so much, or it would wait for ever."""
    await leave_all(node)
    assert max(each.num_bytes for each in node.adapters()) == POET_BYTES
    for name in ("robot", "poet", "json", "poet", "robot"):
        assert await in_time(ask(node, name, PROMPT))
        await node.run_on_engine(lambda driver: driver.adapters.core.table.check(CAPACITY))


async def test_who_has_no_room_beside_the_pinned_ones_is_told(node: LocalNode) -> None:
    await leave_all(node)
    await node.pin_adapter("poet", True)
    assert await in_time(ask(node, "poet", PROMPT))
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="Unpin one"):
            await in_time(ask(node, "pirate", PROMPT))
    assert await in_time(ask(node, None, PROMPT)), "all others are served"
    pinned = await node.pin_adapter("poet", False)
    assert pinned is not None and pinned.num_bytes == POET_BYTES
    assert await in_time(ask(node, "pirate", PROMPT))


async def test_a_draft_whose_adapter_goes_harms_nobody(node: LocalNode) -> None:
    """It waits until others have been answered; the engine must not fail when its turn comes."""
    await load(node, "fleeting", DEMO_ADAPTERS_DIR / "pirate")
    num_rebuilds = node.num_rebuilds
    answer = asyncio.create_task(ask(node, None, text(2, 40), 300))
    while not (await node.stats()).num_running:
        await asyncio.sleep(0.005)
    draft = GenerateRequest(
        request_id=RequestId("draft"),
        messages=(ChatMessage("user", "hello there " * 30),),
        context=RequestContext(adapter="fleeting"),
        sampling=Sampling(temperature=0, max_tokens=1),
    )
    prefill = asyncio.create_task(node.prefill(draft))
    while not await node.run_on_engine(lambda driver: bool(driver._background)):
        await asyncio.sleep(0.005)
    assert not answer.done()
    assert (await node.unload_adapter({"lora_name": "fleeting"})).status == 200
    assert len(await in_time(answer)) == 300
    with pytest.raises(EngineUnavailable, match="removed"):
        await in_time(prefill)
    assert await in_time(ask(node, None, text(3, 40)))
    assert node.num_rebuilds == num_rebuilds


@pytest.mark.parametrize("where", ["when it is begun", "on the loader's thread", "in a step"])
async def test_an_adapter_that_cannot_be_laid_out_ends_its_own_requests_alone(
    node: LocalNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The others' answers go on, the engine is not built again, and what the step left of its rows is never used."""
    contract = await node.run_on_engine(lambda driver: driver.adapters.contract)
    modules = {name: shape for name, shape in contract.modules.items() if "self_attn" in name}
    await load(node, "odd", make_adapter(tmp_path / "odd", modules=modules, rank=5))
    others = [(None, text(5, 40)), ("pirate", text(6, 40))]
    wanted = [await in_time(ask(node, name, prompt)) for name, prompt in others]
    known = await in_time(ask(node, "odd", PROMPT, tenant="one"))
    await leave_all(node)

    name = "packed_size" if where == "when it is begun" else "pack_slot"
    stock = getattr(layouts, name)

    def breaks(a_slices: Any, b_slices: Any, ranks: list[int], *rest: Any) -> Any:
        if 5 in ranks:
            raise MemoryError("made to fail")
        return stock(a_slices, b_slices, ranks, *rest)

    num_rebuilds = node.num_rebuilds
    with monkeypatch.context() as patched:
        patched.setattr(layouts, name, breaks)
        if where == "in a step":  # the loader's thread does not get to it
            patched.setattr(StepLayouts, "allows", lambda *args: True)
            patched.setattr(layouts.Layout, "finish", lambda self: None)
        running = [asyncio.create_task(ask(node, name, prompt, 200)) for name, prompt in others]
        while (await node.stats()).num_running < len(others):
            await asyncio.sleep(0.005)
        for _ in range(2):
            with pytest.raises(EngineUnavailable, match="'odd' could not be made ready"):
                await in_time(ask(node, "odd", PROMPT, tenant="two"))
            assert not any(task.done() for task in running)
        answers = await in_time(asyncio.gather(*running))
    assert [answer[: len(want)] for answer, want in zip(answers, wanted, strict=True)] == wanted
    assert node.num_rebuilds == num_rebuilds
    assert await in_time(ask(node, "odd", PROMPT, tenant="two")) == known
    assert (await node.unload_adapter({"lora_name": "odd"})).status == 200


@pytest.mark.parametrize("is_removed", [False, True])
async def test_a_request_on_its_way_gets_the_adapter_that_took_the_place_of_its_own(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    """With KV of its own; where none did, it is refused as one for an unknown adapter."""
    new = await in_time(ask(node, "pirate", PROMPT))
    await load(node, "changing", DEMO_ADAPTERS_DIR / "json")
    client, is_there, goes_on = node._client, asyncio.Event(), asyncio.Event()
    assert client is not None

    async def held(request: Any) -> None:
        is_there.set()
        await goes_on.wait()

    with monkeypatch.context() as patched:
        patched.setattr(client, "predict_length", held)
        asked = asyncio.create_task(ask(node, "changing", PROMPT))
        await is_there.wait()
        if is_removed:
            assert (await node.unload_adapter({"lora_name": "changing"})).status == 200
        else:
            await load(node, "changing", DEMO_ADAPTERS_DIR / "pirate", load_inplace=True)
        goes_on.set()
        if is_removed:
            with pytest.raises(InvalidRequest, match="removed") as refused:
                await in_time(asked)
            assert refused.value.code == "unknown_model"
            return
        assert await in_time(asked) == new
    assert (await node.unload_adapter({"lora_name": "changing"})).status == 200


# -- files that change under a version that is served ------------------------------------------------------------------

FILES = ("adapter_config.json", "adapter_model.safetensors")


def overwrite(adapter: Path, other: Path) -> None:
    """As a trainer does: in place, file by file."""
    for name in FILES:
        (adapter / name).write_bytes((other / name).read_bytes())


def half_write(adapter: Path, other: Path) -> None:
    """What lies there after the first of the writes: new weights, not all of them, beside the old configuration."""
    raw = (other / FILES[1]).read_bytes()
    (adapter / FILES[1]).write_bytes(raw[: len(raw) // 2])


def no_copies(state: Path) -> None:
    """From now on there are none, nor can there be."""
    folder = state / "adapter-copies"
    while folder.is_dir():
        folder.rename(state / f"gone-{next(_numbers)}")
        with suppress(FileExistsError):  # it is being made again
            folder.touch(exist_ok=False)


async def until_answered(node: LocalNode, name: str, old: list[int], new: list[int]) -> None:
    """Ask until the new version answers. Until then the old one does: no answer is any other's, and none fails."""
    async with asyncio.timeout(60):
        while (answer := await ask(node, name, PROMPT)) != new:
            assert answer == old
            await leave_all(node)


async def answers_of(node: LocalNode, *names: str) -> list[list[int]]:
    found = [await in_time(ask(node, name, PROMPT)) for name in names]
    assert all(first != second for first, second in itertools.combinations(found, 2))
    return found


async def test_a_trainer_that_writes_over_what_is_served_fails_no_request(
    node: LocalNode, folder: Path
) -> None:
    """The version that is served answers until the next one is whole, whatever lies in its place meanwhile."""
    shout, pirate, json = await answers_of(node, "shout", "pirate", "json")
    await found(node, folder, "trained")
    await leave_all(node)
    half_write(folder / "trained", DEMO_ADAPTERS_DIR / "pirate")
    for _ in range(2):
        assert await in_time(ask(node, "trained", PROMPT)) == shout
        await leave_all(node)
    overwrite(folder / "trained", DEMO_ADAPTERS_DIR / "pirate")
    await until_answered(node, "trained", shout, pirate)
    await leave_all(node)
    for name in FILES:
        (folder / "trained" / name).unlink()
    assert await in_time(ask(node, "trained", PROMPT)) == pirate
    overwrite(folder / "trained", DEMO_ADAPTERS_DIR / "json")
    await until_answered(node, "trained", pirate, json)


async def test_weights_are_never_computed_with_another_versions_configuration(
    node: LocalNode, folder: Path, state: Path
) -> None:
    """The weights are the same to the byte; only what they are scaled by is not."""
    await found(node, folder, "scaled")
    old = await in_time(ask(node, "scaled", PROMPT))
    await leave_all(node)
    path = folder / "scaled" / FILES[0]
    config = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(config | {"lora_alpha": -3 * config["lora_alpha"]}))
    assert await in_time(ask(node, "scaled", PROMPT)) == old
    async with asyncio.timeout(60):
        while await ask(node, "scaled", PROMPT) == old:
            await leave_all(node)


async def test_without_a_copy_a_request_waits_for_the_next_version(
    node: LocalNode, folder: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "engine_bridge.driver.serving.adapter_waits.PATIENCE_S", 60.0
    )  # however slow this machine is
    shout, robot = await answers_of(node, "shout", "robot")
    await found(node, folder, "uncopied")
    assert await in_time(ask(node, "uncopied", PROMPT)) == shout
    await leave_all(node)
    no_copies(state)
    overwrite(folder / "uncopied", DEMO_ADAPTERS_DIR / "robot")
    assert await in_time(ask(node, "uncopied", PROMPT)) == robot


async def test_one_that_does_not_come_in_time_is_told_of_with_a_code_of_its_own(
    node: LocalNode, folder: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_bridge.driver.serving.adapter_waits.PATIENCE_S", 0.2)
    monkeypatch.setattr("engine_bridge.driver.serving.adapter_waits.READ_AGAIN_S", 0.05)
    await found(node, folder, "broken")
    await leave_all(node)
    no_copies(state)
    half_write(folder / "broken", DEMO_ADAPTERS_DIR / "robot")
    with pytest.raises(EngineUnavailable) as refused:
        await in_time(ask(node, "broken", PROMPT))
    assert refused.value.code == "adapter_changing"
    body = {"model": "broken", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    reply = await in_time(node.serve("chat", body, {}))
    assert isinstance(reply, JsonReply) and reply.status == 503
    assert msgspec.json.decode(reply.body)["error"]["code"] == "adapter_changing"
    shutil.rmtree(folder / "broken")


async def test_what_was_loaded_from_elsewhere_outlives_the_folder_of_its_name(
    node: LocalNode, folder: Path
) -> None:
    (pirate,) = await answers_of(node, "pirate")
    await found(node, folder, "twin")
    await load(node, "twin", DEMO_ADAPTERS_DIR / "pirate", load_inplace=True)
    shutil.rmtree(folder / "twin")
    await found(node, folder, "another")  # the folder was looked at
    assert await in_time(ask(node, "twin", PROMPT)) == pirate
    assert (await node.unload_adapter({"lora_name": "twin"})).status == 200


@pytest.mark.parametrize("name", ["x" * 3000, "line\nbreak", " space", "a/../b", "demo"])
async def test_a_name_that_nobody_could_use_is_refused(node: LocalNode, name: str) -> None:
    reply = await node.load_adapter({"lora_name": name, "lora_path": str(DEMO_ADAPTERS_DIR / "pirate")})
    assert reply.status == 400
    error = msgspec.json.decode(reply.body)["error"]
    assert error["code"] == "bad_name" and len(error["message"]) < 400


async def test_what_comes_and_goes_while_the_engine_is_built_again_is_served_as_listed(
    node: LocalNode, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await found(node, folder, "leaving")
    stock, loop = node._make_driver, asyncio.get_running_loop()

    def build_and_wait() -> Any:
        """What changes after the engine has read the list, and before it is up, is what it is not told of."""
        driver = stock()
        shutil.rmtree(folder / "leaving")
        asyncio.run_coroutine_threadsafe(found(node, folder, "late"), loop).result(60)
        assert "leaving" not in {each.name for each in node.adapters()}
        return driver

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("made to fail")

    def break_engine(driver: Any) -> None:
        driver.engine.engine_core.engine_core.model_executor.execute_model = broken

    monkeypatch.setattr(node._thread, "_make_driver", build_and_wait)
    await node.run_on_engine(break_engine)
    with pytest.raises(EngineUnavailable):
        await in_time(ask(node, None, text(4, 40)))
    async with asyncio.timeout(120):
        while node.state != "ready":
            await asyncio.sleep(0.05)
    assert await in_time(ask(node, "late", PROMPT)) == await in_time(ask(node, "shout", PROMPT))
    names = await node.run_on_engine(lambda driver: {each.name for each in driver.adapters._records.values()})
    assert names == {each.name for each in node.adapters()}
