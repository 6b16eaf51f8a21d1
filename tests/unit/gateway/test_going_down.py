"""The server goes down whatever fails on the way, and what is over is held by nobody."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_bridge.protocol.errors import EngineUnavailable
from gateway.advisories.advisories import AdvisoryRecord, AdvisoryRequest
from gateway.app import Server
from gateway.doors.chat.socket import ChatConnection
from gateway.sessions import SessionStore
from gateway.settings.config import Config
from gateway.turns.live_turn import LiveTurn
from gateway.turns.turns import KEEP_FINISHED_S

from .fake_node import PATIENCE_S
from .front import Gateway, Gateways
from .parts import passes, refused, until


class BrokenSocket:
    """One that cannot even be closed."""

    blocked_since = None
    is_given_up = False

    async def close(self, code: int, reason: str) -> None:
        raise RuntimeError("the transport is gone")


async def fails(*args: Any, **fields: Any) -> Any:
    raise RuntimeError("broken on purpose")


async def is_closed(store: SessionStore) -> bool:
    return (await refused(store.get_session("ann", "s"))).code == "draining"


@pytest.fixture
async def down(store: SessionStore, tmp_path: Any) -> Gateway:
    return Gateway(store, Config(port=0, data_dir=tmp_path, drain_timeout_s=0.1, kv_host_gib=0.25))


async def test_all_is_closed_though_all_fails(
    down: Gateway, store: SessionStore, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[str] = []

    async def closes_badly() -> None:
        closed.append("node")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async def cannot_cancel(request_id: Any) -> bool:
        raise EngineUnavailable("the engine's process has gone")

    async with asyncio.timeout(PATIENCE_S):
        async with Server(down.server.services, lambda: closed.append("drained")) as server:
            await down.ask("a")
            await down.node.asked()
            server.services.connections.add(BrokenSocket())  # type: ignore[arg-type]
            down.node.drain, down.node.close = fails, closes_badly  # type: ignore[method-assign]
            down.node.cancel = cannot_cancel  # type: ignore[method-assign]
            for part in ("maintenance", "drafts", "titles", "learned"):
                broken = getattr(server.services, part)
                setattr(broken, "save" if part == "learned" else "close", fails)
            down.node.answers[0].fail(EngineUnavailable("it ends with its process"))
    assert closed == ["drained", "node"]
    assert await is_closed(store)
    for what in ("the node's answers", "the node could", "the chat sockets", "titles", "drafts"):
        assert what in caplog.text


async def test_a_node_whose_drain_never_ends_holds_nobody_up(down: Gateway, store: SessionStore) -> None:
    async def hangs(timeout_s: float) -> bool:
        return await asyncio.Event().wait()

    async with asyncio.timeout(PATIENCE_S):
        async with down.server:
            down.node.drain = hangs  # type: ignore[method-assign]
    assert down.node.state == "closed" and await is_closed(store)


NumAlive = Callable[..., int]


@pytest.fixture
def num_alive() -> Iterator[NumAlive]:
    """Counts objects of some types, without those that other tests of the process have left behind."""
    gc.collect()
    kinds = (LiveTurn, ChatConnection, AdvisoryRecord, asyncio.TimerHandle)
    # They are held, so that no new object has the id of one.
    before = {id(each): each for each in gc.get_objects() if type(each) in kinds}

    def count(*wanted: type) -> int:
        gc.collect()
        return sum(type(each) in wanted and id(each) not in before for each in gc.get_objects())

    gc.freeze()  # so that the collector is quick; it does nothing where an engine has ended in this process (tests/integration/conftest.py)
    yield count
    gc.unfreeze()


async def visit(gateway: Gateway, number: int, session_id: str | None) -> str:
    """One question with all that can come with it; every third engine fails, every other socket vanishes."""
    async with gateway.socket(hello={}) as socket:
        await socket.send(type="typing", session_id=session_id, draft="What is the ")
        accepted = await socket.ask(f"m{number}", f"Question {number}", session_id=session_id)
        while accepted["type"] != "accepted":
            assert accepted["type"] == "advisory", accepted
            accepted = await socket.next()
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


@pytest.mark.virtual_time
async def test_nothing_is_left_of_turns_sockets_and_drafts(gateways: Gateways, num_alive: NumAlive) -> None:
    gateway, session_id = await gateways(draft_prefill=True), None
    for number in range(30):
        session_id = await visit(gateway, number, session_id)
    await until(lambda: not gateway.server.services.connections)
    await passes(KEEP_FINISHED_S + 61)
    gateway.node.answers.clear()
    gateway.node.prefills.clear()
    # A task that is on its last step holds its own for that long.
    await until(lambda: not num_alive(LiveTurn, ChatConnection))
    assert gateway.count("overture_sockets") == 0 and gateway.count("overture_turns_running") == 0


@pytest.mark.virtual_time
async def test_of_advisories_that_are_over_so_many_are_kept_and_no_more(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, num_alive: NumAlive
) -> None:
    monkeypatch.setattr("gateway.advisories.advisories.MAX_ENDED", 10)
    for number in range(100):
        gateway.advisories.submit("local", AdvisoryRequest(session_id=f"s{number}", ttl_s=1.0), "rest")
        (await gateway.node.told(number)).report("wasted", lead_s=1.0)
    gateway.node.advisories.clear()
    await passes(2.0)
    assert num_alive(AdvisoryRecord) <= 10 + 5, "a few more may be on their way out"
    assert num_alive(asyncio.TimerHandle) <= 20, "those of the server; none of an advisory that is over"
