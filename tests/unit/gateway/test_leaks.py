"""What is over is held by nobody: turns, sockets, drafts and advisories that came and went leave nothing behind."""

from __future__ import annotations

import asyncio
import gc

import pytest

from engine_bridge.protocol.errors import EngineUnavailable
from gateway.advisories.advisories import AdvisoryRecord, AdvisoryRequest
from gateway.advisories.drafts import _Work
from gateway.doors.chat.socket import ChatConnection
from gateway.turns.turns import KEEP_FINISHED_S, LiveTurn

from .front import Gateway, Gateways, Socket
from .parts import passes, settled


@pytest.fixture
async def gateway(gateways: Gateways) -> Gateway:
    return await gateways(draft_prefill=True)


def alive(*kinds: type) -> set[int]:
    """The objects of these kinds that there are, by identity. Other tests of the process may have left some behind."""
    gc.collect()
    return {id(each) for each in gc.get_objects() if type(each) in kinds}


async def visit(gateway: Gateway, number: int, session_id: str | None) -> str:
    """One question with all that can come with it; every third engine fails, every other socket vanishes."""
    async with gateway.socket(hello={}) as socket:
        await socket.send(type="typing", session_id=session_id, draft="What is the ")
        accepted = await first(socket, "accepted", name=f"m{number}", session_id=session_id)
        answer = await gateway.node.asked(number)
        answer.say("One ")
        if number % 3 == 0:
            answer.fail(EngineUnavailable("The engine is being rebuilt."))
        else:
            answer.finish("two.")
        turn = gateway.turns.find("local", f"m{number}")
        assert turn is not None
        await gateway.follow(turn).over()
        if number % 2:
            socket.raw.transport.abort()
    return str(accepted["session_id"])


async def first(socket: Socket, kind: str, *, name: str, session_id: str | None) -> dict[str, object]:
    await socket.send(type="message", id=name, content=f"Question {name}", session_id=session_id)
    while (frame := await socket.next())["type"] != kind:
        assert frame["type"] == "advisory", frame
    return frame


async def test_nothing_is_left_of_turns_sockets_and_drafts_that_are_over(gateway: Gateway) -> None:
    kinds = (LiveTurn, ChatConnection, _Work)
    before = alive(*kinds)
    session_id = None
    for number in range(30):
        session_id = await visit(gateway, number, session_id)
    async with asyncio.timeout(10):
        while gateway.server.services.connections:
            await asyncio.sleep(0)
    await passes(KEEP_FINISHED_S + 61)
    gateway.node.answers.clear()
    gateway.node.prefills.clear()
    async with asyncio.timeout(10):
        while alive(*kinds) - before:  # a task that is on its last step holds its own for that long
            await settled()
    assert gateway.count("overture_sockets") == 0 and gateway.count("overture_turns_running") == 0


async def test_of_advisories_that_are_over_so_many_are_kept_and_no_more(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.advisories.advisories.MAX_ENDED", 10)
    before, timers_before = alive(AdvisoryRecord), alive(asyncio.TimerHandle)
    for number in range(100):
        gateway.advisories.submit("local", AdvisoryRequest(session_id=f"s{number}", ttl_s=1.0), "rest")
        (await gateway.node.told(number)).report("wasted", lead_s=1.0)
    gateway.node.advisories.clear()
    await passes(2.0)
    assert len(alive(AdvisoryRecord) - before) <= 10 + 5, "a few more may be on their way out"
    assert len(alive(asyncio.TimerHandle) - timers_before) <= 20, (
        "those of the server; none of an advisory that is over"
    )
    assert len(gateway.advisories._scored) <= 10
