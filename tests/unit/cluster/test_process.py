"""A node in a child process, without a model: started again when somebody asks for it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import pytest

from engine_bridge.cluster import process
from engine_bridge.cluster.child import serve
from engine_bridge.cluster.process import ProcessNode
from engine_bridge.protocol.errors import EngineUnavailable
from engine_bridge.protocol.node import ChatMessage, GenerateRequest, RequestId
from tests.unit.gateway.fake_node import PATIENCE_S, FakeNode


class Teller(FakeNode):
    """Says which process it is."""

    def __init__(self) -> None:
        super().__init__([str(os.getpid())])


async def answer_of(node: ProcessNode) -> str:
    request = GenerateRequest(request_id=RequestId("a"), messages=(ChatMessage("user", "Who are you?"),))
    return "".join([delta.text async for delta in node.generate(request)])


async def test_a_child_that_is_started_again_is_another_process_and_takes_requests() -> None:
    node = ProcessNode([sys.executable, "-m", __name__], b"", "fake-model")
    async with asyncio.timeout(3 * PATIENCE_S):
        await node.start()
        first, before = await answer_of(node), node.incarnation
        assert await node.drain(1.0) and node.progress.state != "failed"
        await node.restart()
        assert (node.progress.state, node.num_rebuilds) == ("ready", 1)
        assert await answer_of(node) != first and node.incarnation != before != ""
        await node.close()
    assert node.incarnation == ""


async def test_a_node_whose_process_has_died_does_not_say_that_it_is_ready() -> None:
    node = ProcessNode([sys.executable, "-m", __name__], b"", "fake-model")
    async with asyncio.timeout(3 * PATIENCE_S):
        await node.start()
        os.kill(int(await answer_of(node)), signal.SIGKILL)
        while node.is_up:
            await asyncio.sleep(0)
        assert node.progress.state == "rebuilding"
        while node.progress.state != "ready":
            await asyncio.sleep(0.05)
        assert await answer_of(node)
        await node.close()


async def test_a_process_may_say_nothing_for_longer_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it imports then may be gigabytes on a slow disk."""
    node = ProcessNode([sys.executable, "-m", __name__, "3"], b"", "fake-model")
    monkeypatch.setattr(process, "SILENT_S", 1.5)
    async with asyncio.timeout(4 * PATIENCE_S):
        await node.start()
        monkeypatch.undo()
        before = node.incarnation
        os.kill(int(await answer_of(node)), signal.SIGSTOP)
        monkeypatch.setattr(process, "SILENT_S", 1.5)
        while node.is_up:
            await asyncio.sleep(0.05)
        monkeypatch.undo()
        while node.progress.state != "ready":
            await asyncio.sleep(0.05)
        assert node.incarnation != before
        await node.close()


@pytest.mark.parametrize("num_turns", range(1, 7))
async def test_closing_ends_a_process_that_is_just_being_started(num_turns: int) -> None:
    """After so many turns of the loop."""
    node = ProcessNode([sys.executable, "-m", __name__], b"", "fake-model")
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
    serve(Teller(), int(sys.argv[-1]))
