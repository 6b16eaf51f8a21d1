import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from engine_bridge.cluster import process
from engine_bridge.cluster.host import serve
from engine_bridge.cluster.process import ProcessNode, Silence
from engine_bridge.protocol.errors import EngineUnavailable
from tests.unit.cluster.catalog_node import answer_of
from tests.unit.gateway.fake_node import PATIENCE_S, Breakable, FakeNode


def test_silence_counts_only_while_this_process_runs_itself() -> None:
    """A pause is longer than a loop may be late."""
    silence = Silence(0.5)
    for at_s in (0.0, 1.4, 2.8, 4.2, 5.6):
        silence.look(at_s)
    assert silence.seconds(0.0, 5.6) == 5.6 and silence.seconds(5.7, 5.6) == 0.0
    silence.look(40.0)
    assert silence.seconds(5.5, 40.0) == 0.0
    silence.look(40.5)
    assert silence.seconds(5.5, 40.5) == 0.5


def teller(*arguments: str) -> ProcessNode:
    """A node that says which process it is.

    arguments: how many seconds it says nothing at first, and the file where `Breakable` looks.
    """
    return ProcessNode([sys.executable, "-m", __name__, *arguments], b"", ("fake-model",))


async def test_a_child_that_is_started_again_or_has_died_comes_back_as_another_process() -> None:
    node = teller()
    async with asyncio.timeout(3 * PATIENCE_S):
        await node.start()
        first, before = await answer_of(node), node.incarnation
        assert await node.drain(1.0) and node.progress.state != "failed"
        await node.restart()
        assert (node.progress.state, node.figures().num_rebuilds) == ("ready", 1)
        second = await answer_of(node)
        assert second != first and node.incarnation != before != ""
        os.kill(int(second), signal.SIGKILL)
        while node.is_up:
            await asyncio.sleep(0)
        assert node.progress.state == "rebuilding"
        while node.progress.state != "ready":
            await asyncio.sleep(0.05)
        assert await answer_of(node) != second
        await node.close()
    assert node.incarnation == ""


async def test_a_process_may_say_nothing_for_longer_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it imports then may be gigabytes on a slow disk."""
    node = teller("1.5")
    monkeypatch.setattr(process, "LOOK_EVERY_S", 0.2)
    async with asyncio.timeout(4 * PATIENCE_S):
        with monkeypatch.context() as short:
            short.setattr(process, "SILENT_S", 0.7)
            await node.start()
        before = node.incarnation
        os.kill(int(await answer_of(node)), signal.SIGSTOP)
        with monkeypatch.context() as short:
            short.setattr(process, "SILENT_S", 0.7)
            while node.is_up:
                await asyncio.sleep(0.05)
        while node.progress.state != "ready":
            await asyncio.sleep(0.05)
        assert node.incarnation != before
        await node.close()


async def test_an_engine_that_cannot_be_built_any_more_gets_other_processes_until_one_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "FIRST_PAUSE_S", 0.01)
    file = tmp_path / "the model is away"
    node = teller("0", str(file))
    async with asyncio.timeout(3 * PATIENCE_S):
        await node.start()
        file.touch()
        first = await answer_of(node)
        await node.sleep("wait", 0)
        while node.figures().num_rebuilds < 2:
            await asyncio.sleep(0.05)
        with pytest.raises(EngineUnavailable, match="started again"):
            await node.restart()
        file.unlink()
        while node.progress.state != "ready":
            await asyncio.sleep(0.05)
        assert await answer_of(node) != first
        await node.close()


async def test_an_engine_that_has_never_run_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "there is no model").touch()
    node = teller("0", str(tmp_path / "there is no model"))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(EngineUnavailable):
            await node.start()
        assert (node.progress.state, node.figures().num_rebuilds) == ("failed", 0)
        await node.close()


@pytest.mark.parametrize("num_turns", [1, 2, 3, 5])
async def test_closing_ends_a_process_that_is_just_being_started(num_turns: int) -> None:
    """After so many turns of the loop."""
    node = teller()
    starting = asyncio.create_task(node.start())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await node.close()
        with pytest.raises(EngineUnavailable):
            await starting
    assert node.progress.state == "closed"


if __name__ == "__main__":
    time.sleep(float(sys.argv[1]) if len(sys.argv) > 2 else 0)
    me = [str(os.getpid())]
    serve(Breakable(me, Path(sys.argv[2])) if len(sys.argv) > 3 else FakeNode(me), int(sys.argv[-1]))
