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
READY: Frame = {
    "type": "ready",
    "protocol": 1,
    "session": None,
    "models": [{"id": "base", "adapter": False}],
    "server": {},
}


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

    async def stay(self) -> None:
        await self.socket.wait_closed()


@contextlib.asynccontextmanager
async def gateway(script: Script) -> AsyncIterator[str]:
    """A server that runs `script(peer, number of the socket)` on each socket; a failed script fails the test."""
    num_sockets = 0
    problems: list[BaseException] = []

    async def handle(socket: ServerConnection) -> None:
        nonlocal num_sockets
        num_sockets += 1
        try:
            await script(Peer(socket), num_sockets)
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
    return {
        "type": "done",
        "id": turn,
        "session_id": "s1",
        "seq": seq,
        "finish_reason": reason,
        "usage": {},
        "timings": {},
    }


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
        await peer.stay()

    async with gateway(script) as url, ChatClient(url) as client:
        text, events = await answer(client, "a")
    assert text == "one two three"
    assert [type(event) for event in events] == [Accepted, Delta, Delta, Done]
    assert client.ready.models[0].id == "base"


async def test_a_dropped_socket_resumes_at_the_last_seq() -> None:
    resumed: list[Frame] = []

    async def script(peer: Peer, number: int) -> None:
        hello = await peer.greet()
        if number == 1:
            await peer.receive("message")
            await peer.send(accepted("a"), delta("a", 2, "one two "))
            await peer.drop()
        else:
            resumed.extend(hello["resume"])
            await peer.send(delta("a", 2, "one two "), delta("a", 3, "three"), done("a", 3))
            await peer.stay()

    async with gateway(script) as url, ChatClient(url) as client:
        text, events = await answer(client, "a")
    assert resumed == [{"id": "a", "seq": 2}]
    assert text == "one two three"
    assert isinstance(events[-1], Done)


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
            await peer.stay()

    async with gateway(script) as url, ChatClient(url) as client:
        text, events = await answer(client, "a")
    assert text == "".join(replay)
    assert sum(isinstance(event, Restarted) for event in events) == num_restarts
    assert sum(isinstance(event, Accepted) for event in events) == 1


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_a_question_asked_on_a_dead_connection_is_answered_on_the_next(is_noticed: bool) -> None:
    dropped = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        hello = await peer.greet()
        if number == 1:
            await peer.drop()
            if not is_noticed:
                dropped.set()
            return
        for turn in hello.get("resume", []):
            await peer.send(error("not_found", turn["id"]))
        await peer.receive("message")
        await peer.send(accepted("a"), delta("a", 1, "yes"), done("a", 1))
        await peer.stay()

    def note(status: str, detail: str) -> None:
        if status == "reconnecting":
            dropped.set()

    async with gateway(script) as url, ChatClient(url, on_status=note) as client:
        await dropped.wait()
        text, _ = await answer(client, "a")
    assert text == "yes"


async def test_it_waits_while_the_engine_starts() -> None:
    statuses: list[tuple[str, str]] = []

    async def script(peer: Peer, number: int) -> None:
        await peer.receive("hello")
        await peer.send(error("starting", retryable=True))
        await peer.greet()
        await peer.receive("message")
        await peer.send(error("starting", "a", retryable=True))
        await peer.receive("message")
        await peer.send(accepted("a"), delta("a", 1, "up"), done("a", 1))
        await peer.stay()

    def note(status: str, detail: str) -> None:
        statuses.append((status, detail))

    async with gateway(script) as url, ChatClient(url, on_status=note) as client:
        text, _ = await answer(client, "a")
    assert text == "up"
    assert statuses[:3] == [("connecting", ""), ("starting", "starting"), ("connected", "")]


async def test_many_questions_share_a_socket_in_any_order() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.greet()
        turns = [(await peer.receive("message"))["id"] for _ in range(100)]
        for turn in reversed(turns):
            await peer.send(accepted(turn), delta(turn, 1, f"for {turn}"))
        for turn in turns:
            await peer.send(done(turn, 1))
        await peer.stay()

    async with gateway(script) as url, ChatClient(url) as client:
        answers = await asyncio.gather(*(answer(client, f"t{number}") for number in range(100)))
    assert [text for text, _ in answers] == [f"for t{number}" for number in range(100)]


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
        await peer.stay()

    async with gateway(script) as url, ChatClient(url) as client:
        answers = await asyncio.gather(*(answer(client, f"t{number}") for number in range(70)))
    assert {text for text, _ in answers} == {"x"}


async def test_stop_reaches_the_server_and_the_answer_ends_as_stopped() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.greet()
        await peer.receive("message")
        await peer.send(accepted("a"), delta("a", 1, "long"))
        assert (await peer.receive("stop"))["id"] == "a"
        await peer.send(done("a", 1, "stopped"))
        await peer.stay()

    async with gateway(script) as url, ChatClient(url) as client:
        async for event in client.ask("question", turn_id="a"):
            if isinstance(event, Delta):
                await client.stop("a")
    assert isinstance(event, Done) and event.finish_reason == "stopped"


async def test_a_stop_that_is_lost_with_its_connection_is_said_again() -> None:
    async def script(peer: Peer, number: int) -> None:
        hello = await peer.greet()
        if number == 1:
            await peer.receive("message")
            await peer.send(accepted("a"), delta("a", 1, "long"))
            await peer.receive("stop")
            await peer.drop()
            return
        assert [item["id"] for item in hello["resume"]] == ["a"]
        assert (await peer.receive("stop"))["id"] == "a"
        await peer.send(done("a", 1, "stopped"))
        await peer.stay()

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
        await peer.stay()

    async with gateway(script) as url, ChatClient(url) as client:
        async with contextlib.aclosing(client.ask("question", turn_id="a")) as events:
            async for _ in events:
                break
        assert await asyncio.wait_for(stopped.wait(), 60), "the server was never told to stop"


@pytest.mark.parametrize("code", ["busy", "overloaded", "unknown_model"])
async def test_an_error_of_one_question_leaves_the_others_alone(code: str) -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.greet()
        await peer.receive("message")
        await peer.receive("message")
        await peer.send(error(code, "bad"), delta("good", 1, "fine"), done("good", 1))
        await peer.stay()

    async with gateway(script) as url, ChatClient(url) as client:
        bad, good = await asyncio.gather(
            answer(client, "bad"), answer(client, "good"), return_exceptions=True
        )
    assert isinstance(bad, ChatError) and bad.code == code
    assert not isinstance(good, BaseException) and good[0] == "fine"


async def test_an_error_says_when_to_come_back_where_the_server_knows() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.greet()
        await peer.receive("message")
        await peer.send(error("rate_limited", "busy", True) | {"retry_after_s": 2.5})
        await peer.stay()

    async with gateway(script) as url, ChatClient(url) as client:
        with pytest.raises(ChatError) as caught:
            await answer(client, "busy")
    assert (caught.value.code, caught.value.retryable, caught.value.retry_after_s) == (
        "rate_limited",
        True,
        2.5,
    )


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


async def test_the_key_goes_in_the_upgrade() -> None:
    async def script(peer: Peer, number: int) -> None:
        request = peer.socket.request
        assert request is not None and request.headers["Authorization"] == "Bearer secret"
        await peer.greet()
        await peer.stay()

    async with gateway(script) as url, ChatClient(url, api_key="secret"):
        pass


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
        await peer.stay()

    async with gateway(script) as url, ChatClient(url) as client:
        assert (await client.open_session("s1")).turns[0].answer == "x"
        with pytest.raises(ChatError, match="not_found"):
            await client.open_session("s2")


async def test_a_server_that_is_not_there_is_an_error_after_the_patience_ends() -> None:
    async with gateway(lambda peer, number: peer.stay()) as url:
        pass  # now nothing listens on that port
    with pytest.raises(ChatError, match="refused") as caught:
        async with ChatClient(url, patience_s=0.2):
            pass
    assert caught.value.code == "unreachable" and caught.value.retryable


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


async def test_patience_begins_when_the_connection_is_lost() -> None:
    """Not when the server was last heard: a long answer may be waited for in silence, and a chat may be idle for hours."""
    has_waited = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.greet()
        if number == 1:
            await peer.receive("message")
            await peer.send(accepted("a"))
            await has_waited.wait()
            await peer.drop()
        else:
            await peer.send(delta("a", 1, "Here."), done("a", 1))
            await peer.stay()

    async with gateway(script) as url, ChatClient(url, patience_s=5.0) as client:
        text = ""
        async for event in client.ask("question", turn_id="a"):
            if isinstance(event, Accepted):
                client._reached_at_s -= 3600
                has_waited.set()
            elif isinstance(event, Delta):
                text += event.text
        assert text == "Here."


async def test_closing_the_client_ends_its_answers() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.greet()
        await peer.stay()

    async with gateway(script) as url:
        async with ChatClient(url) as client:
            waiting = asyncio.create_task(answer(client, "a"))
            await asyncio.sleep(0)
        with pytest.raises(ChatError, match="closed"):
            await waiting


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


@pytest.mark.parametrize("given", ["", "ftp://example.org", "http://"])
def test_a_bad_address_is_a_value_error(given: str) -> None:
    with pytest.raises(ValueError, match="not the address"):
        socket_url(given)
