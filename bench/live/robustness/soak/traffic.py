"""What the clients of the soak bench do: honest ones that check every word, and ones that leave, lag, lie and flood."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from msgspec import UNSET, UnsetType
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from bench.live.robustness.soak.ledger import Expectation, Ledger
from bench.live.robustness.soak.server import CHANGES, CHANGING
from bench.live.shared.serving import HOST
from overture_client.chat import ChatClient
from overture_client.chat_frames import Accepted, ChatError, Delta, Done, Restarted

SHORT = {"temperature": 0, "max_tokens": 40}
LONG = {"temperature": 0, "max_tokens": 300, "ignore_eos": True}
SCRIPTS = (
    ("My secret word is Fezin. Hello!", "What is my secret word?", "Thank you, and good night."),
    ("Hello, how are you?", "What can you do?", "Tell me about the sea."),
    ("My name is Ada. I live by the harbour.", "What is my name?", "Tell me about old maps."),
    ("Please tell me a story.", "And how does it end?", "Tell me another one."),
)
LONG_QUESTIONS = ("Tell me a long story about the wind.", "Please tell me all about the sea and the harbour.")
ADAPTERS = (None, "pirate", "robot", "shout")
BASE_MODEL = "overture-demo"
PATIENCE_S = 150.0
"""How long a client tries for one answer, across rebuilds and restarts."""
ANSWER_S = 60.0
"""How long a call may take."""

Outage = (ConnectionClosed, InvalidHandshake, OSError, TimeoutError, aiohttp.ClientError)


class GaveUp(RuntimeError):
    """An answer did not come within PATIENCE_S."""


@dataclass
class World:
    """State that all clients share.

    Attributes:
        references: the right answers by (questions up to the one answered, adapter, whether the answer is long).
        counts: number of visits by kind.
    """

    port: int
    keys: tuple[str, ...]
    flood_key: str
    ledger: Ledger
    references: dict[tuple[tuple[str, ...], str | None, bool], str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def expected(self, questions: tuple[str, ...], adapter: str | None, is_long: bool = False) -> list[str]:
        """Return the texts of which the answer to the last of these questions must be one."""
        names = CHANGES if adapter == CHANGING else (adapter,)
        return [self.references[questions, name, is_long] for name in names]

    def http(self, key: str) -> aiohttp.ClientSession:
        """Return an HTTP session that sends this key on a separate connection for each call."""
        return aiohttp.ClientSession(
            f"http://{HOST}:{self.port}",
            headers={"Authorization": f"Bearer {key}"},
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=ANSWER_S),
        )

    async def socket(self, key: str) -> ClientConnection:
        """Return a new chat socket that has not said hello. Raises an error of Outage."""
        headers = {"Authorization": f"Bearer {key}"}
        return await connect(f"ws://{HOST}:{self.port}/ws", additional_headers=headers, compression=None)

    def note_error(self, what: str, status: int, code: str) -> None:
        """Note a call that failed now; status 0 for an error frame."""
        self.ledger.note_error(what, status, code, time.monotonic())


@dataclass
class Question:
    """One message, and how much of its answer has arrived."""

    content: str
    sampling: dict[str, Any]
    session_id: str | None = None
    adapter: str | None = None
    after: str | None | UnsetType = UNSET
    """The turn before, where this is an edit."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    text: str = ""
    finish_reason: str | None = None


OnDelta = Callable[[Question], Awaitable[None]]


class Client(ChatClient):
    """The chat client of one key, on a line that can be cut."""

    def __init__(self, world: World, key: str) -> None:
        super().__init__(f"http://{HOST}:{world.port}", api_key=key, patience_s=PATIENCE_S)
        self.world, self.key = world, key
        self._socket: ClientConnection | None = None

    async def _serve(self, socket: ClientConnection) -> None:
        self._socket = socket
        await super()._serve(socket)

    def cut(self) -> None:
        """Cut the connection as a network that fails would."""
        if self._socket is not None:
            self._socket.transport.abort()

    async def answered(self, question: Question, on_delta: OnDelta | None = None) -> Question:
        """Return the question with its whole answer, whatever breaks meanwhile. Raises GaveUp after PATIENCE_S.

        on_delta: called after each delta; it may cut the line.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            after = question.after if isinstance(question.after, str) else None
            self.world.ledger.asks(self.key, question.session_id, after, question.after is not UNSET)
            try:
                await self._ask_once(question, on_delta)
                return question
            except ChatError as error:
                if error.code not in ("not_found", "busy"):
                    self.world.note_error("a turn", 0, error.code)
                if time.monotonic() > deadline_s:
                    raise GaveUp(f"no answer to {question.id}") from error
                await asyncio.sleep(0.3)

    async def _ask_once(self, question: Question, on_delta: OnDelta | None) -> None:
        ledger, question.text = self.world.ledger, ""
        fields = {"session_id": question.session_id, "adapter": question.adapter, "after": question.after}
        async for event in self.ask(
            question.content, sampling=question.sampling, turn_id=question.id, **fields
        ):
            match event:
                case Accepted(session_id=session_id):
                    question.session_id = session_id
                    ledger.accepted(self.key, session_id, question.id, question.content)
                case Restarted():
                    question.text = ""
                case Delta(text=text):
                    question.text += text
                    if on_delta is not None:
                        await on_delta(question)
                case Done(session_id=session_id, finish_reason=reason):
                    question.finish_reason = reason
                    ledger.done(self.key, session_id, question.id, question.text)


class Traffic:
    """Every kind of client; each visit is of one kind, drawn by `chance`."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world = world
        self.chance = chance

    async def visit(self) -> None:
        """Make one visit of a kind that is drawn. Raises GaveUp."""
        name = self.chance.choices(list(VISITS), list(VISITS.values()))[0]
        await getattr(self, name)()
        self.world.counts[name] += 1

    def key(self) -> str:
        """Return one of the keys."""
        return self.chance.choice(self.world.keys)

    def client(self) -> Client:
        """Return a new chat socket with one of the keys."""
        return Client(self.world, self.key())

    def _check(
        self, what: str, question: Question, questions: tuple[str, ...], is_long: bool = False
    ) -> None:
        extent: Expectation = "beginning" if question.finish_reason == "stopped" else "whole"
        expected = self.world.expected(questions, question.adapter, is_long)
        self.world.ledger.check_answer(what, question.text, expected, extent)

    # -- honest ones -------------------------------------------------------------------------------------------------

    async def talk(self) -> None:
        """A conversation, announced by typing now and then."""
        script, adapter = self.chance.choice(SCRIPTS), self.chance.choice(ADAPTERS)
        async with self.client() as client:
            session_id = None
            for number, content in enumerate(script):
                if session_id is not None and self.chance.random() < 0.5:
                    await client.typing(session_id, adapter=adapter)
                question = await client.answered(Question(content, SHORT, session_id, adapter))
                session_id = question.session_id
                self._check("talk", question, script[: number + 1])

    async def edit(self) -> None:
        """Ask, ask on, take the second question back, ask it anew, then take everything back."""
        script, other = self.chance.sample(SCRIPTS, 2)
        adapter = self.chance.choice(ADAPTERS)
        async with self.client() as client:
            first = await client.answered(Question(script[0], SHORT, None, adapter))
            second = await client.answered(Question(script[1], SHORT, first.session_id, adapter))
            again = await client.answered(
                Question(script[1], SHORT, first.session_id, adapter, after=first.id)
            )
            anew = await client.answered(Question(other[0], SHORT, first.session_id, adapter, after=None))
            for question, questions in ((first, script[:1]), (second, script[:2]), (again, script[:2])):
                self._check("edit", question, questions)
            self._check("edit of all", anew, other[:1])

    async def drop_and_resume(self) -> None:
        """Drop the socket in the middle of an answer and resume it, up to three times."""
        left = self.chance.randint(1, 3)

        async def drop(question: Question) -> None:
            """Drop the socket now and then."""
            nonlocal left
            if left and self.chance.random() < 0.4:
                left -= 1
                client.cut()
                await asyncio.sleep(self.chance.choice((0.0, 0.05, 0.5)))

        async with self.client() as client:
            await self._ask_long(client, "resumed", drop)

    async def stop(self) -> None:
        """Stop a long answer; what arrived must be the beginning of the right one."""

        async def stop(question: Question) -> None:
            """Send a stop with a chance of one half after each delta."""
            if self.chance.random() < 0.5:
                await client.stop(question.id)

        async with self.client() as client:
            await self._ask_long(client, "stopped", stop)

    async def _ask_long(self, client: Client, what: str, on_delta: OnDelta) -> None:
        content = self.chance.choice(LONG_QUESTIONS)
        self._check(what, await client.answered(Question(content, LONG), on_delta), (content,), is_long=True)

    async def call_api(self) -> None:
        """Ask over the chat API."""
        await self._ask_api("API call", self.chance.choice(ADAPTERS))

    async def use_changing_adapter(self) -> None:
        """Ask an adapter that is being replaced: its answer is that of one version, never a mixture."""
        await self._ask_api("changing adapter", CHANGING)

    async def _ask_api(self, what: str, adapter: str | None) -> None:
        script = self.chance.choice(SCRIPTS)
        status, reply = await self.call("POST", *chat(script[0], adapter or BASE_MODEL, SHORT))
        if status == 200:
            text = reply["choices"][0]["message"]["content"]
            self.world.ledger.check_answer(what, text, self.world.expected(script[:1], adapter))

    # -- others ------------------------------------------------------------------------------------------------------

    async def leave_stream(self) -> None:
        """Read the beginning of an API stream, then close the connection."""
        content, left, text = self.chance.choice(LONG_QUESTIONS), self.chance.randint(1, 6), ""
        path, body = chat(content, BASE_MODEL, LONG | {"stream": True})
        try:
            async with self.world.http(self.key()) as http, http.post(path, json=body) as reply:
                if reply.status != 200:
                    await self._note(reply, "API stream")
                    return
                async for line in reply.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.world.note_error("API stream", 0, event["error"].get("code") or "engine_failed")
                        return
                    text += event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
                    left -= 1
                    if not left:
                        break
        except Outage:
            return
        expected = self.world.expected((content,), None, True)
        self.world.ledger.check_answer("API stream", text, expected, "beginning")

    async def come_and_go(self) -> None:
        """Sockets that say hello and go, that say nothing, that send nonsense, that vanish."""
        for _ in range(self.chance.randint(3, 12)):
            said = self.chance.choice(('{"type":"hello"}', "nonsense", ""))
            try:
                opened = await self.world.socket(self.key())
                if said:
                    await opened.send(said)
                    await opened.recv()
                if self.chance.random() < 0.5:
                    opened.transport.abort()
                else:
                    await opened.close()
            except Outage:
                return

    async def read_slowly(self) -> None:
        """A peer that takes nothing for a while, then reads on; or that is cut off by then."""
        content, text, is_done = self.chance.choice(SCRIPTS)[0], "", False
        message = {"type": "message", "id": uuid.uuid4().hex, "content": content, "sampling": SHORT}
        try:
            opened = await self.world.socket(self.key())
            opened.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            for frame in (
                {"type": "hello"},
                *[{"type": "ping", "t": "x" * 30_000}] * self.chance.choice((0, 20)),
            ):
                await opened.send(json.dumps(frame))
            await asyncio.sleep(self.chance.random() * 3)
            await opened.send(json.dumps(message))
            async for data in opened:
                frame = json.loads(data)
                if frame["type"] == "error":
                    self.world.note_error("slow reader", 0, frame["code"])
                is_done = frame["type"] == "done"
                if is_done or frame["type"] == "error":
                    break
                text += frame["text"] if frame["type"] == "delta" else ""
            await opened.close()
        except Outage:
            return
        if is_done:
            self.world.ledger.check_answer("slow reader", text, self.world.expected((content,), None))

    async def lie(self) -> None:
        """Send advisories for sessions that are never continued and for adapters that do not exist; take some back."""
        known = [session for key, session in self.world.ledger.sessions if key in self.world.keys][-50:]
        for _ in range(self.chance.randint(1, 10)):
            session_id = self.chance.choice([*known, uuid.uuid4().hex])
            body = {"session_id": session_id, "ttl_s": self.chance.choice((0.2, 5.0))}
            if self.chance.random() < 0.3:
                body["model"] = self.chance.choice(("pirate", "nobody", CHANGING))
            status, reply = await self.call("POST", "/v1/advisories", body)
            if status == 202 and self.chance.random() < 0.3:
                await self.call("DELETE", f"/v1/advisories/{reply['id']}")

    async def flood(self) -> None:
        """One key far over every limit: refusals are what should come."""
        flood_key = self.world.flood_key
        for _ in range(5):
            advice = ({"session_id": uuid.uuid4().hex, "ttl_s": 1.0} for _ in range(50))
            await asyncio.gather(*(self.call("POST", "/v1/advisories", each, flood_key) for each in advice))
        path, body = chat("Hi", BASE_MODEL, {"max_tokens": 1})
        await asyncio.gather(*(self.call("POST", path, body, flood_key) for _ in range(20)))

    async def tidy_up(self) -> None:
        """Delete a session, bring it back, and search."""
        key = self.key()
        mine = [session_id for owner, session_id in self.world.ledger.sessions if owner == key]
        if len(mine) < 5:
            return
        session_id = self.chance.choice(mine)
        status, _ = await self.call("DELETE", f"/api/sessions/{session_id}", key=key)
        if status != 204:
            return
        status, _ = await self.call("POST", f"/api/sessions/{session_id}/restore", key=key)
        if status != 200:
            # The disk was full, or the server went away: the session is to be found as deleted or as restored.
            self.world.ledger.forget(key, session_id)
        await self.call("GET", "/api/sessions?q=secret", key=key)

    # -- calls -------------------------------------------------------------------------------------------------------

    async def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        """Status and JSON; 0 where the server is away. Statuses of 5xx are noted."""
        try:
            async with (
                self.world.http(key or self.key()) as http,
                http.request(method, path, json=body) as reply,
            ):
                if reply.status >= 429:
                    await self._note(reply, f"{method} {path.split('?')[0]}")
                    return reply.status, None
                return reply.status, await reply.json() if reply.status in (200, 201, 202) else None
        except Outage:
            return 0, None

    async def _note(self, reply: aiohttp.ClientResponse, what: str) -> None:
        try:
            code = str((await reply.json())["error"]["code"])
        except (aiohttp.ClientError, ValueError, KeyError, TypeError):
            code = "no code"
        self.world.note_error(what, reply.status, code)


VISITS = {
    "talk": 5,
    "edit": 3,
    "drop_and_resume": 4,
    "stop": 2,
    "come_and_go": 2,
    "read_slowly": 2,
    "call_api": 3,
    "leave_stream": 3,
    "lie": 2,
    "flood": 1,
    "tidy_up": 1,
    "use_changing_adapter": 2,
}
"""Kinds of visit, methods of Traffic, with how often each comes, in parts."""


def chat(content: str, model: str, sampling: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a question to the chat API."""
    return "/v1/chat/completions", {
        "model": model,
        "messages": [{"role": "user", "content": content}],
    } | sampling


async def read_back(world: World, key: str, session_id: str) -> list[dict[str, Any]] | None:
    """A session's turns as REST gives them; None if there is no such session. Raises an error of Outage."""
    async with world.http(key) as http, http.get(f"/api/sessions/{session_id}") as reply:
        if reply.status == 404:
            return None
        reply.raise_for_status()
        turns: list[dict[str, Any]] = (await reply.json())["turns"]
        return turns


async def learn_references(world: World) -> None:
    """Ask everything once, one after the other, of the server while nothing else runs."""
    async with Client(world, world.keys[0]) as client:
        for adapter in ADAPTERS:
            for script in SCRIPTS:
                session_id = None
                for number, content in enumerate(script):
                    question = await client.answered(Question(content, SHORT, session_id, adapter))
                    session_id = question.session_id
                    world.references[script[: number + 1], adapter, False] = question.text
        for content in LONG_QUESTIONS:
            question = await client.answered(Question(content, LONG))
            world.references[(content,), None, True] = question.text
