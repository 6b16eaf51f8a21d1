"""The chat client against a server of our own that drops sockets, repeats frames and forgets turns."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from overture_client.chat import ChatClient, socket_url
from overture_client.chat_frames import Accepted, ChatError, Delta, Done, Restarted

Frame = dict[str, Any]
Script = Callable[["Peer", int], Awaitable[None]]
MODELS = [{"id": "base", "adapter": False}]
READY: Frame = {"type": "ready", "protocol": 1, "session": None, "models": MODELS, "server": {}}


class Peer:
    """The server's end of one socket, as scripts see it."""

    def __init__(self, socket: ServerConnection) -> None:
        self.socket = socket

    async def send(self, *frames: Frame) -> None:
        for frame in frames:
            await self.socket.send(json.dumps(frame))

    async def receive(self, kind: str) -> Frame:
        frame: Frame = json.loads(await self.socket.recv())
        assert frame["type"] == kind, frame
        return frame

    async def greet(self) -> Frame:
        hello = await self.receive("hello")
        await self.send(READY)
        return hello

    async def drop(self) -> None:
        self.socket.transport.abort()
        await self.socket.wait_closed()


@contextlib.asynccontextmanager
async def gateway(script: Script) -> AsyncIterator[str]:
    """A server that runs `script(peer, number of the socket)` on each socket and keeps it; a failed script fails the test."""
    num_sockets = 0
    problems: list[BaseException] = []

    async def handle(socket: ServerConnection) -> None:
        nonlocal num_sockets
        num_sockets += 1
        try:
            await script(Peer(socket), num_sockets)
            await socket.wait_closed()
        except BaseException as error:
            problems.append(error)
            raise

    async with serve(handle, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    if problems:
        raise problems[0]


def accepted(turn: str, session: str = "s1") -> Frame:
    return {"type": "accepted", "id": turn, "session_id": session, "title": "t"}


def delta(turn: str, seq: int, text: str) -> Frame:
    return {"type": "delta", "id": turn, "seq": seq, "text": text}


def done(turn: str, seq: int, reason: str = "stop") -> Frame:
    over = {"finish_reason": reason, "usage": {}, "timings": {}}
    return {"type": "done", "id": turn, "session_id": "s1", "seq": seq} | over


def error(code: str, turn: str | None = None, retryable: bool = False) -> Frame:
    return {"type": "error", "code": code, "message": code, "retryable": retryable} | (
        {"id": turn} if turn else {}
    )


async def answer(client: ChatClient, turn: str, **options: Any) -> tuple[str, list[object]]:
    """The text that a caller ends up with, and the events."""
    text, events = "", []
    async for event in client.ask("question", turn_id=turn, **options):
        events.append(event)
        if isinstance(event, Delta):
            text += event.text
        elif isinstance(event, Restarted):
            text = ""
    return text, events


async def test_an_answer_streams_and_repeated_frames_come_once() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.greet()
        await peer.receive("message")
        await peer.send(
            accepted("a"), accepted("a"), delta("a", 1, "one "), delta("a", 1, "one "), {"type": "brand-new"}
        )
        await peer.send(delta("a", 3, "two three"), delta("a", 2, "two "), done("a", 3), done("a", 3))

    async with gateway(script) as url, ChatClient(url) as client:
        text, events = await answer(client, "a")
    assert text == "one two three"
    assert [type(event) for event in events] == [Accepted, Delta, Delta, Done]
    assert client.ready.models[0].id == "base"


@pytest.mark.parametrize(
    ("replay", "num_restarts"),
    [(["one ", "two three"], 0), (["one two "], 0), (["one"], 1), (["another answer"], 1)],
)
async def test_a_forgotten_turn_is_asked_again_and_its_text_comes_once(
    replay: list[str], num_restarts: int
) -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.greet()
        if number == 1:
            await peer.receive("message")
            await peer.send(accepted("a", "s9"), delta("a", 2, "one two "))
            await peer.drop()
        else:
            await peer.send(error("not_found", "a"))
            again = await peer.receive("message")
            assert (again["id"], again["content"], again["session_id"]) == ("a", "question", "s9")
            pieces = [delta("a", seq, text) for seq, text in enumerate(replay, 1)]
            await peer.send(accepted("a", "s9"), *pieces, done("a", len(replay)))

    async with gateway(script) as url, ChatClient(url) as client:
        text, events = await answer(client, "a")
    assert text == "".join(replay)
    assert sum(isinstance(event, Restarted) for event in events) == num_restarts
    assert sum(isinstance(event, Accepted) for event in events) == 1


async def test_more_turns_than_a_hello_holds_are_resumed_by_several() -> None:
    async def script(peer: Peer, number: int) -> None:
        hello = await peer.greet()
        if number == 1:
            for _ in range(70):
                await peer.receive("message")
            await peer.drop()
            return
        resumed = hello["resume"] + (await peer.greet())["resume"]
        assert len(hello["resume"]) == 64
        for item in resumed:
            await peer.send(delta(item["id"], 1, "x"), done(item["id"], 1))

    async with gateway(script) as url, ChatClient(url) as client:
        answers = await asyncio.gather(*(answer(client, f"t{number}") for number in range(70)))
    assert {text for text, _ in answers} == {"x"}


async def test_a_stop_that_is_lost_with_its_connection_is_said_again() -> None:
    async def script(peer: Peer, number: int) -> None:
        hello = await peer.greet()
        if number == 1:
            await peer.receive("message")
            await peer.send(accepted("a"), delta("a", 1, "long"))
            await peer.receive("stop")
            await peer.drop()
            return
        assert hello["resume"] == [{"id": "a", "seq": 1}]
        assert (await peer.receive("stop"))["id"] == "a"
        await peer.send(done("a", 1, "stopped"))

    async with gateway(script) as url, ChatClient(url) as client:
        async for event in client.ask("question", turn_id="a"):
            if isinstance(event, Delta):
                await client.stop("a")
    assert isinstance(event, Done) and event.finish_reason == "stopped"


async def test_leaving_an_answer_early_stops_it() -> None:
    stopped = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.greet()
        await peer.receive("message")
        await peer.send(accepted("a"))
        await peer.receive("stop")
        stopped.set()

    async with gateway(script) as url, ChatClient(url) as client:
        async with contextlib.aclosing(client.ask("question", turn_id="a")) as events:
            async for _ in events:
                break
        assert await asyncio.wait_for(stopped.wait(), 60), "the server was never told to stop"


async def test_a_wrong_key_is_an_error_and_not_retried() -> None:
    num_sockets = 0

    async def script(peer: Peer, number: int) -> None:
        nonlocal num_sockets
        num_sockets += 1
        await peer.receive("hello")
        await peer.send(error("unauthorized"))
        await peer.socket.close(4401)

    async with gateway(script) as url:
        with pytest.raises(ChatError, match="unauthorized"):
            async with ChatClient(url, api_key="wrong"):
                pass
    assert num_sockets == 1


async def test_a_session_is_opened_or_said_to_be_missing() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.greet()
        await peer.receive("hello")
        await peer.send(
            READY
            | {"session": {"id": "s1", "title": "Hi", "turns": [{"id": "a", "content": "q", "answer": "x"}]}}
        )
        await peer.receive("hello")
        await peer.send(error("not_found"))

    async with gateway(script) as url, ChatClient(url) as client:
        assert (await client.open_session("s1")).turns[0].answer == "x"
        with pytest.raises(ChatError, match="not_found"):
            await client.open_session("s2")


async def test_answers_fail_when_the_server_stays_away() -> None:
    async def script(peer: Peer, number: int) -> None:
        if number > 1:
            await peer.drop()
            return
        await peer.greet()
        await peer.receive("message")
        await peer.send(accepted("a"))
        await peer.drop()

    async with gateway(script) as url, ChatClient(url, patience_s=0.3) as client:
        with pytest.raises(ChatError) as caught:
            await answer(client, "a")
        assert caught.value.code == "unreachable"
        with pytest.raises(ChatError):
            await answer(client, "b")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://127.0.0.1:8000", "ws://127.0.0.1:8000/ws"),
        ("https://chat.example.org/", "wss://chat.example.org/ws"),
        ("https://example.org/overture", "wss://example.org/overture/ws"),
        ("localhost:9000", "ws://localhost:9000/ws"),
        ("ws://[::1]:8000/ws", "ws://[::1]:8000/ws"),
    ],
)
def test_the_socket_address_follows_from_the_server_address(given: str, expected: str) -> None:
    assert socket_url(given) == expected
