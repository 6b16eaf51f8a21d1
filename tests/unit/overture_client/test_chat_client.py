"""The chat client against a server of our own that drops sockets, repeats frames and forgets turns."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from overture_client.chat import ChatClient, socket_url
from overture_client.chat_frames import Accepted, ChatError, Delta, Done, Restarted

Frame = dict[str, Any]
MODELS = [{"id": "base", "adapter": False}]
READY: Frame = {"type": "ready", "protocol": 1, "session": None, "models": MODELS, "server": {}}
GREETING = ("hello", READY)
DROP = 1006


class Server:
    """Plays one script on each socket, the last one on all further ones; a script that fails fails the test.

    A name in a script is the type of a frame to wait for, a frame is sent, and a number closes the socket; DROP cuts it off.

    Attributes:
        heard: all frames that came. is_over: a script was played to its end.
    """

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = scripts
        self.heard: list[Frame] = []
        self.num_sockets = 0
        self.is_over = asyncio.Event()
        self._problems: list[BaseException] = []

    @contextlib.asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[ChatClient]:
        async with serve(self._handle, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            async with ChatClient(f"http://127.0.0.1:{port}", **options) as client:
                yield client
        if self._problems:
            raise self._problems[0]

    async def _handle(self, socket: ServerConnection) -> None:
        script = self.scripts[min(self.num_sockets, len(self.scripts) - 1)]
        self.num_sockets += 1
        try:
            for step in script:
                if step == DROP:
                    socket.transport.abort()
                elif isinstance(step, int):
                    await socket.close(step)
                elif isinstance(step, dict):
                    await socket.send(json.dumps(step))
                else:
                    self.heard.append(json.loads(await socket.recv()))
                    assert self.heard[-1]["type"] == step, self.heard[-1]
            self.is_over.set()
            await socket.wait_closed()
        except BaseException as error:
            self._problems.append(error)
            raise


def accepted(turn: str, session: str = "s1") -> Frame:
    return {"type": "accepted", "id": turn, "session_id": session, "title": "t"}


def delta(turn: str, seq: int, text: str) -> Frame:
    return {"type": "delta", "id": turn, "seq": seq, "text": text}


def done(turn: str, seq: int, reason: str = "stop") -> Frame:
    over = {"finish_reason": reason, "usage": {}, "timings": {}}
    return {"type": "done", "id": turn, "session_id": "s1", "seq": seq} | over


def error(code: str, **fields: Any) -> Frame:
    return {"type": "error", "code": code, "message": code, "retryable": False} | fields


async def answer(client: ChatClient, turn: str) -> tuple[str, list[object]]:
    """The text that a caller ends up with, and the events."""
    text, events = "", []
    async for event in client.ask("question", turn_id=turn):
        events.append(event)
        if isinstance(event, Delta):
            text += event.text
        elif isinstance(event, Restarted):
            text = ""
    return text, events


async def test_an_answer_streams_and_repeated_frames_come_once() -> None:
    frames = [accepted("a"), accepted("a"), delta("a", 1, "one "), delta("a", 1, "one "), {"type": "new"}]
    frames += [delta("a", 3, "two three"), delta("a", 2, "two "), done("a", 3), done("a", 3)]
    async with Server([*GREETING, "message", *frames]).client() as client:
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
    pieces = [delta("a", seq, text) for seq, text in enumerate(replay, 1)]
    server = Server(
        [*GREETING, "message", accepted("a", "s9"), delta("a", 2, "one two "), DROP],
        [
            *GREETING,
            error("not_found", id="a"),
            "message",
            accepted("a", "s9"),
            *pieces,
            done("a", len(replay)),
        ],
    )
    async with server.client() as client:
        text, events = await answer(client, "a")
    again = server.heard[-1]
    assert (again["id"], again["content"], again["session_id"]) == ("a", "question", "s9")
    assert text == "".join(replay)
    assert sum(isinstance(event, Restarted) for event in events) == num_restarts
    assert sum(isinstance(event, Accepted) for event in events) == 1


async def test_more_turns_than_a_hello_holds_are_resumed_by_several() -> None:
    names = [f"t{number}" for number in range(70)]
    answers = [frame for name in names for frame in (delta(name, 1, "x"), done(name, 1))]
    server = Server([*GREETING, *["message"] * 70, DROP], [*GREETING, *GREETING, *answers])
    async with server.client() as client:
        said = await asyncio.gather(*(answer(client, name) for name in names))
    assert {text for text, _ in said} == {"x"}
    hellos = [frame for frame in server.heard if frame["type"] == "hello"]
    assert [len(hello.get("resume", ())) for hello in hellos] == [0, 64, 6]


async def test_half_a_character_is_a_question_mark() -> None:
    """As of an emoji that was cut in two, or of a terminal whose bytes are no UTF-8. It ended the client."""
    server = Server([*GREETING, "typing", "message", accepted("a"), done("a", 1)])
    async with server.client() as client:
        await client.typing("s1", draft="Hi \ud83d")
        async for _ in client.ask("Hi \ud83d \udcff \U0001f600", turn_id="a"):
            pass
    assert [frame.get("draft") or frame.get("content") for frame in server.heard[1:]] == [
        "Hi ?",
        "Hi ? ? \U0001f600",
    ]


async def test_a_stop_that_is_lost_with_its_connection_is_said_again() -> None:
    server = Server(
        [*GREETING, "message", accepted("a"), delta("a", 1, "long"), "stop", DROP],
        [*GREETING, "stop", done("a", 1, "stopped")],
    )
    async with server.client() as client:
        async for event in client.ask("question", turn_id="a"):
            if isinstance(event, Delta):
                await client.stop("a")
    hello, stop = server.heard[-2:]
    assert hello["resume"] == [{"id": "a", "seq": 1}] and stop["id"] == "a"
    assert isinstance(event, Done) and event.finish_reason == "stopped"


async def test_leaving_an_answer_early_stops_it() -> None:
    server = Server([*GREETING, "message", accepted("a"), "stop"])
    async with server.client() as client:
        async with contextlib.aclosing(client.ask("question", turn_id="a")) as events:
            async for _ in events:
                break
        assert await asyncio.wait_for(server.is_over.wait(), 60), "the server was never told to stop"


async def test_a_wrong_key_is_an_error_and_not_retried() -> None:
    server = Server(["hello", error("unauthorized"), 4401])
    with pytest.raises(ChatError, match="unauthorized"):
        async with server.client(api_key="wrong"):
            pass
    assert server.num_sockets == 1


async def test_a_session_is_opened_or_said_to_be_missing() -> None:
    session = {"id": "s1", "title": "Hi", "turns": [{"id": "a", "content": "q", "answer": "x"}]}
    server = Server([*GREETING, "hello", READY | {"session": session}, "hello", error("not_found")])
    async with server.client() as client:
        assert (await client.open_session("s1")).turns[0].answer == "x"
        with pytest.raises(ChatError, match="not_found"):
            await client.open_session("s2")


async def test_answers_fail_when_the_server_stays_away() -> None:
    async with Server([*GREETING, "message", accepted("a"), DROP], [DROP]).client(patience_s=0.3) as client:
        with pytest.raises(ChatError) as caught:
            await answer(client, "a")
        assert caught.value.code == "unreachable"
        with pytest.raises(ChatError):
            await answer(client, "b")


def test_the_socket_address_follows_from_the_server_address() -> None:
    for given, expected in {
        "http://127.0.0.1:8000": "ws://127.0.0.1:8000/ws",
        "https://chat.example.org/": "wss://chat.example.org/ws",
        "https://example.org/overture": "wss://example.org/overture/ws",
        "localhost:9000": "ws://localhost:9000/ws",
        "ws://[::1]:8000/ws": "ws://[::1]:8000/ws",
    }.items():
        assert socket_url(given) == expected
