import asyncio
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from engine_bridge.cluster.orders import ClusterSettings, NodeToStart
from engine_bridge.cluster.ray_placement import RayPlacement
from engine_bridge.cluster.trust import Trust
from engine_bridge.protocol.errors import EngineUnavailable
from tests.unit.cluster.catalog_node import PATIENCE_S, answer_of, until
from tests.unit.cluster.fake_driver import AWAY

DRIVER = (sys.executable, "-m", "tests.unit.cluster.fake_driver")


@asynccontextmanager
async def placement_of(
    folder: Path, *, follows_all: bool = False, **nodes: bytes
) -> AsyncIterator[tuple[RayPlacement, list[tuple[str, str]]]]:
    """With what it said of its progress. nodes: by name, how each fares (`fake_driver`)."""
    said: list[tuple[str, str]] = []
    for name in nodes:
        (folder / name).mkdir()
    to_start = tuple(
        NodeToStart(node_id=name, settings=how, folder=str(folder / name), turns=str(folder / "turns"))
        for name, how in nodes.items()
    )
    given = {"address": "", "host": "127.0.0.1", "folder": "", "make_node": "", "nodes": to_start}
    settings = ClusterSettings(**given, trust=Trust(token=b"of this cluster"), follows_all=follows_all)
    placement = RayPlacement(DRIVER, settings, ("fake-model",), lambda *stage: said.append(stage))
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield placement, said
    finally:
        await placement.close()


def below(others: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """All processes that were started here, and theirs; without those of tests before."""
    return [each for each in psutil.Process().children(recursive=True) if each not in others]


async def still_there(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; the kernel may take a moment to let go of one that was killed."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, PATIENCE_S)
    return alive


def process_of(module: str) -> psutil.Process:
    """The one that runs it."""
    return next(process for process in below() if process.cmdline()[1:3] == ["-m", module])


async def test_nodes_answer_come_again_when_they_are_restarted_and_leave(tmp_path: Path) -> None:
    """One says that it is closed before it ends, one is told later where it is, and one is of others."""
    others = below()
    nodes = {"a": b"takes its time to close", "b": b"names no place at first"}
    async with placement_of(tmp_path, **nodes, follows_all=True) as (placement, said):
        await placement.start()
        await until(lambda: len(placement.nodes) == 3)
        await until(lambda: all(node.is_up for node in placement.nodes.values()))
        answers = {name: await answer_of(node) for name, node in placement.nodes.items()}
        assert answers == {name: f"I am {name}" for name in ("a", "b", "of-others")}
        assert ("", "starting the stand-in") in said

        node, before = placement.nodes["a"], placement.nodes["a"].last_incarnation
        await placement.restart("a")
        assert placement.nodes["a"] is node and node.last_incarnation != before
        assert await answer_of(node) == "I am a" and node.progress.state == "ready"

        await placement.remove("of-others")
        await placement.remove("a")
        assert list(placement.nodes) == ["b"] and node.progress.state == "closed"
        with pytest.raises(KeyError):
            await placement.remove("a")
        ours = below(others)
        await placement.close()
        assert await still_there(ours) == []


@pytest.mark.parametrize("victim", ["tests.unit.cluster.fake_driver", "engine_bridge.cluster.guard"])
async def test_when_the_driver_or_its_guard_dies_all_is_started_again(tmp_path: Path, victim: str) -> None:
    async with placement_of(tmp_path, a=b"") as (placement, _):
        await placement.start()
        node, before = placement.nodes["a"], placement.nodes["a"].last_incarnation
        process_of(victim).kill()
        await until(lambda: not node.is_up)
        assert node.progress.state == "rebuilding"
        with pytest.raises(EngineUnavailable):
            await answer_of(node)
        await until(lambda: node.is_up)
        assert node.last_incarnation != before and node.figures().num_rebuilds == 1
        assert await answer_of(node) == "I am a"


async def test_a_node_whose_engine_cannot_be_built_any_more_is_started_again_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_bridge.cluster.placed_node.LOOK_EVERY_S", 0.1)
    monkeypatch.setattr("engine_bridge.cluster.placed_node.FAILED_S", 0.2)
    async with placement_of(tmp_path, a=b"") as (placement, _):
        await placement.start()
        node = placement.nodes["a"]
        (tmp_path / "a" / AWAY).touch()
        await node.sleep("wait", 0)
        await until(lambda: node.figures().num_rebuilds > 1)
        await until(lambda: node.progress.state == "failed")
        (tmp_path / "a" / AWAY).unlink()
        await until(lambda: node.progress.state == "ready")
        assert await answer_of(node) == "I am a"


async def test_a_failed_node_that_is_restarted_by_hand_is_told_of_when_it_is_there(tmp_path: Path) -> None:
    async with placement_of(tmp_path, a=b"") as (placement, _):
        await placement.start()
        node, before = placement.nodes["a"], placement.nodes["a"].last_incarnation
        (tmp_path / "a" / AWAY).touch()
        await node.sleep("wait", 0)
        await until(lambda: node.progress.state == "failed")
        with pytest.raises(EngineUnavailable, match="did not come up again"):
            await placement.restart("a")
        assert node.last_incarnation != before
        (tmp_path / "a" / AWAY).unlink()
        await placement.restart("a")
        assert await answer_of(node) == "I am a"


@pytest.mark.parametrize(
    ("how", "reason"),
    [(b"no cluster", "there is no cluster"), (b"cannot be made", "a: it has no model; b: it has no model")],
)
async def test_what_ails_all_nodes_is_raised(tmp_path: Path, how: bytes, reason: str) -> None:
    async with placement_of(tmp_path, a=how, b=how) as (placement, _):
        with pytest.raises(EngineUnavailable, match=reason):
            await placement.start()


async def test_one_ready_node_is_enough_and_others_are_named(tmp_path: Path) -> None:
    errors = {"a": "it has no model", "b": "it serves another-model"}
    nodes = {"a": b"cannot be made", "b": b"another model", "c": b""}
    async with placement_of(tmp_path, **nodes) as (placement, _):
        await placement.start()
        for name, error in errors.items():
            node = placement.nodes[name]
            await until(lambda node=node: node.progress.state == "failed")  # type: ignore[misc]
            assert node.progress.error is not None and error in node.progress.error
            with pytest.raises(EngineUnavailable):
                await answer_of(node)


async def test_a_placement_that_is_closed_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    others = below()
    async with placement_of(tmp_path, a=b"never comes up", follows_all=False) as (placement, said):
        starting = asyncio.create_task(placement.start())
        await until(lambda: bool(said))
        ours = below(others)
        await placement.close()
        assert await still_there(ours) == []
        with pytest.raises(EngineUnavailable, match="closed"):
            await starting


async def test_a_node_that_hangs_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_bridge.cluster.placed_node.SILENT_S", 1.2)
    monkeypatch.setattr("engine_bridge.cluster.placed_node.LOOK_EVERY_S", 0.3)
    async with placement_of(tmp_path, a=b"") as (placement, _):
        await placement.start()
        node = placement.nodes["a"]
        driver, before = process_of(DRIVER[-1]), node.last_incarnation
        driver.suspend()
        await until(lambda: not node.is_up)
        driver.resume()
        await until(lambda: node.is_up and node.last_incarnation != before)
