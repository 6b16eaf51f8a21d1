"""What the clients of the soak bench do: honest ones that check every word, and ones that leave, lag, lie and flood."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from bench.live.soak.ledger import Expectation, Ledger
from bench.live.soak.server import CHANGES, CHANGING, HOST

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
"""How long it waits for the next frame of an answer before it takes the socket for dead."""

Outage = (ConnectionClosed, InvalidHandshake, OSError, TimeoutError, aiohttp.ClientError)


class GaveUp(RuntimeError):
    """An answer did not come within PATIENCE_S."""


@dataclass
class World:
    """What all clients share. references: by (questions up to the one answered, adapter, is it a long one)."""

    url: str
    port: int
    keys: tuple[str, ...]
    flood_key: str
    ledger: Ledger
    references: dict[tuple[tuple[str, ...], str | None, bool], str] = field(default_factory=dict)
    is_resting: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    def expected(self, questions: tuple[str, ...], adapter: str | None, is_long: bool = False) -> list[str]:
        names = CHANGES if adapter == CHANGING else (adapter,)
        return [self.references[questions, name, is_long] for name in names]


@dataclass
class Question:
    """One message, with what is known of its answer so far."""

    content: str
    sampling: dict[str, Any]
    session_id: str | None = None
    adapter: str | None = None
    after: str | None | bool = False  # False: not an edit
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    text: str = ""
    seq: int = 0
    finish_reason: str | None = None
    is_over: bool = False

    def frame(self) -> dict[str, Any]:
        frame: dict[str, Any] = {
            "type": "message",
            "id": self.id,
            "content": self.content,
            "sampling": self.sampling,
        }
        frame |= {"session_id": self.session_id, "adapter": self.adapter}
        return frame if self.after is False else frame | {"after": self.after}


class Client:
    """One key's chat socket, opened again whenever it is gone. on_delta: called with each delta; may drop the socket."""

    def __init__(self, world: World, key: str) -> None:
        self.world = world
        self.key = key
        self.socket: ClientConnection | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.socket is not None:
            await self.socket.close()

    def drop(self) -> None:
        """Cut the connection as a network that fails would."""
        if self.socket is not None:
            self.socket.transport.abort()
            self.socket = None

    async def open(self, resume: Question | None = None) -> ClientConnection:
        if self.socket is not None:
            return self.socket
        deadline = time.monotonic() + PATIENCE_S
        headers = {"Authorization": f"Bearer {self.key}"}
        while True:
            try:
                opened = await connect(
                    f"ws://{HOST}:{self.world.port}/ws", additional_headers=headers, compression=None
                )
                if await self._hello(opened, resume):
                    self.socket = opened
                    return opened
                await opened.close()
            except Outage:
                pass
            if time.monotonic() > deadline:
                raise GaveUp("no socket could be opened")
            await asyncio.sleep(0.2)

    async def _hello(self, opened: ClientConnection, resume: Question | None) -> bool:
        hello: dict[str, Any] = {"type": "hello"}
        if resume is not None:
            hello["resume"] = [{"id": resume.id, "seq": resume.seq}]
        await opened.send(json.dumps(hello))
        async with asyncio.timeout(ANSWER_S):
            first = json.loads(await opened.recv())
        if first["type"] == "error":
            self._note(first, "hello")
        return bool(first["type"] == "ready")

    def _note(self, frame: dict[str, Any], what: str) -> None:
        self.world.ledger.note_error(what, 0, frame["code"], time.monotonic())

    async def ask(
        self,
        question: Question,
        on_delta: Callable[[Question], Awaitable[None]] | None = None,
    ) -> Question:
        """The answer to its end, whatever breaks meanwhile. Raises GaveUp."""
        deadline = time.monotonic() + PATIENCE_S
        is_sent = False
        while not question.is_over:
            if time.monotonic() > deadline:
                raise GaveUp(f"no answer to {question.id}")
            try:
                opened = await self.open(question if is_sent else None)
                if not is_sent:
                    await self._send(opened, question)
                    is_sent = True
                async with asyncio.timeout(ANSWER_S):
                    frame = json.loads(await opened.recv())
                is_sent = await self._on_frame(frame, question)
                if frame["type"] == "delta" and on_delta is not None and frame.get("id") == question.id:
                    await on_delta(question)
            except Outage:
                self.drop()
        return question

    async def _send(self, opened: ClientConnection, question: Question) -> None:
        question.text, question.seq = "", 0
        after = question.after if isinstance(question.after, str) else None
        self.world.ledger.asks(self.key, question.session_id, after, question.after is not False)
        await opened.send(json.dumps(question.frame()))

    async def _on_frame(self, frame: dict[str, Any], question: Question) -> bool:
        """Take a frame in; whether the question stands as sent (False: it is to be sent again)."""
        if frame.get("id") != question.id:
            if frame["type"] == "error":
                self._note(frame, "frame without an id")
            return True
        ledger = self.world.ledger
        if frame["type"] == "accepted":
            question.session_id = frame["session_id"]
            ledger.accepted(self.key, frame["session_id"], question.id, question.content)
        elif frame["type"] == "delta" and frame["seq"] > question.seq:
            question.seq = frame["seq"]
            question.text += frame["text"]
        elif frame["type"] == "done":
            question.is_over, question.finish_reason = True, frame["finish_reason"]
            ledger.done(self.key, frame["session_id"], question.id, question.text)
        elif frame["type"] == "error":
            if frame["code"] == "not_found" and question.session_id is None:
                return False
            if frame["code"] not in ("not_found", "busy"):
                self._note(frame, "a turn")
            await asyncio.sleep(0.3)
            return False
        return True


class Traffic:
    """Every kind of client, one call a visit. chance: what is different from visit to visit."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world = world
        self.chance = chance

    @property
    def visits(self) -> list[tuple[int, Callable[[], Awaitable[None]]]]:
        """Kinds of visit with how often each comes, in parts."""
        return [
            (5, self.talk),
            (3, self.edit),
            (4, self.drop_and_resume),
            (2, self.stop),
            (2, self.come_and_go),
            (2, self.read_slowly),
            (3, self.call_api),
            (3, self.leave_stream),
            (2, self.lie),
            (1, self.flood),
            (1, self.tidy_up),
            (2, self.use_changing_adapter),
        ]

    async def visit(self) -> None:
        weights, kinds = zip(*self.visits, strict=True)
        kind = self.chance.choices(kinds, weights)[0]
        name = kind.__name__
        await kind()
        self.world.counts[name] = self.world.counts.get(name, 0) + 1

    def client(self) -> Client:
        return Client(self.world, self.chance.choice(self.world.keys))

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
                    typing = {"type": "typing", "session_id": session_id, "adapter": adapter}
                    opened = await client.open()
                    try:
                        await opened.send(json.dumps(typing))
                    except Outage:
                        client.drop()
                question = await client.ask(Question(content, SHORT, session_id, adapter))
                session_id = question.session_id
                self._check("talk", question, script[: number + 1])

    async def edit(self) -> None:
        """Ask, ask on, take the second question back, ask it anew, then take everything back."""
        script, other = self.chance.sample(SCRIPTS, 2)
        adapter = self.chance.choice(ADAPTERS)
        async with self.client() as client:
            first = await client.ask(Question(script[0], SHORT, None, adapter))
            second = await client.ask(Question(script[1], SHORT, first.session_id, adapter))
            again = await client.ask(Question(script[1], SHORT, first.session_id, adapter, after=first.id))
            anew = await client.ask(Question(other[0], SHORT, first.session_id, adapter, after=None))
            for question, questions in ((first, script[:1]), (second, script[:2]), (again, script[:2])):
                self._check("edit", question, questions)
            self._check("edit of all", anew, other[:1])

    async def drop_and_resume(self) -> None:
        content, num_drops = self.chance.choice(LONG_QUESTIONS), self.chance.randint(1, 3)
        left = num_drops

        async def drop(question: Question) -> None:
            nonlocal left
            if left and self.chance.random() < 0.4:
                left -= 1
                client.drop()
                await asyncio.sleep(self.chance.choice((0.0, 0.05, 0.5)))

        async with self.client() as client:
            question = await client.ask(Question(content, LONG), drop)
            self._check("resumed", question, (content,), is_long=True)

    async def stop(self) -> None:
        content = self.chance.choice(LONG_QUESTIONS)

        async def stop(question: Question) -> None:
            if client.socket is not None and self.chance.random() < 0.5:
                await client.socket.send(json.dumps({"type": "stop", "id": question.id}))

        async with self.client() as client:
            question = await client.ask(Question(content, LONG), stop)
            self._check("stopped", question, (content,), is_long=True)

    async def call_api(self) -> None:
        await self._ask_api("API call", self.chance.choice(ADAPTERS))

    async def use_changing_adapter(self) -> None:
        """Its answer is that of one version or of the other, never a mixture."""
        await self._ask_api("changing adapter", CHANGING)

    async def _ask_api(self, what: str, adapter: str | None) -> None:
        script = self.chance.choice(SCRIPTS)
        body = {"model": adapter or BASE_MODEL, "messages": [{"role": "user", "content": script[0]}]} | SHORT
        status, reply = await self._post("/v1/chat/completions", body)
        if status == 200:
            text = reply["choices"][0]["message"]["content"]
            self.world.ledger.check_answer(what, text, self.world.expected(script[:1], adapter))

    # -- others ------------------------------------------------------------------------------------------------------

    async def leave_stream(self) -> None:
        """Read the beginning of an API stream, then close the connection."""
        content = self.chance.choice(LONG_QUESTIONS)
        body = {
            "model": BASE_MODEL,
            "messages": [{"role": "user", "content": content}],
            "stream": True,
        } | LONG
        text, left = "", self.chance.randint(1, 6)
        try:
            async with (
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http,
                http.post(
                    f"{self.world.url}/v1/chat/completions", json=body, headers=self._headers()
                ) as reply,
            ):
                if reply.status != 200:
                    await self._note(reply, "API stream")
                    return
                async for line in reply.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.world.ledger.note_error(
                            "API stream",
                            0,
                            str(event["error"].get("code") or "engine_failed"),
                            time.monotonic(),
                        )
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
            try:
                opened = await connect(
                    f"ws://{HOST}:{self.world.port}/ws", additional_headers=self._headers(), compression=None
                )
                manner = self.chance.randrange(4)
                if manner == 0:
                    await opened.send('{"type":"hello"}')
                    await opened.recv()
                    await opened.close()
                elif manner == 1:
                    await opened.send("nonsense")
                    await opened.recv()
                    opened.transport.abort()
                elif manner == 2:
                    opened.transport.abort()
                else:
                    await opened.close()
            except Outage:
                return

    async def read_slowly(self) -> None:
        """A peer that takes nothing for a while, then reads on; or that never does and is cut off."""
        script = self.chance.choice(SCRIPTS)
        async with self.client() as client:
            opened = await client.open()
            try:
                raw = opened.transport.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                for _ in range(self.chance.choice((0, 20))):
                    await opened.send(json.dumps({"type": "ping", "t": "x" * 30_000}))
                await asyncio.sleep(self.chance.random() * 3)
            except Outage:
                client.drop()
                return
            question = await client.ask(Question(script[0], SHORT))
            self._check("slow reader", question, script[:1])

    async def lie(self) -> None:
        """Advisories of sessions that nobody goes on with, of adapters that do not exist, taken back and repeated."""
        known = [session for key, session in self.world.ledger.sessions if key in self.world.keys][-50:]
        for _ in range(self.chance.randint(1, 10)):
            session_id = self.chance.choice([*known, uuid.uuid4().hex])
            body = {"session_id": session_id, "ttl_s": self.chance.choice((0.2, 5.0))}
            if self.chance.random() < 0.3:
                body["model"] = self.chance.choice(("pirate", "nobody", CHANGING))
            status, reply = await self._post("/v1/advisories", body)
            if status == 202 and self.chance.random() < 0.3:
                await self.call("DELETE", f"/v1/advisories/{reply['id']}")

    async def flood(self) -> None:
        """One key far over every limit: refusals are what should come."""
        body = {"model": BASE_MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        calls = [self._post("/v1/chat/completions", body, self.world.flood_key) for _ in range(20)]
        advice = [
            self._post("/v1/advisories", {"session_id": uuid.uuid4().hex, "ttl_s": 1.0}, self.world.flood_key)
            for _ in range(250)
        ]
        for start in range(0, len(advice), 50):
            await asyncio.gather(*advice[start : start + 50])
        await asyncio.gather(*calls)

    async def tidy_up(self) -> None:
        """Delete a session, bring it back, search, list; delete another for good."""
        mine = [each for each in self.world.ledger.sessions if each[0] == self.chance.choice(self.world.keys)]
        if len(mine) < 5:
            return
        key, session_id = self.chance.choice(mine)
        status, _ = await self.call("DELETE", f"/api/sessions/{session_id}", key)
        if status != 204:
            return
        status, _ = await self.call("POST", f"/api/sessions/{session_id}/restore", key)
        if (
            status != 200
        ):  # the disk was full, or the server went away: it is to be found as deleted or as restored
            self.world.ledger.forget(key, session_id)
        await self.call("GET", "/api/sessions?q=secret", key)

    # -- calls -------------------------------------------------------------------------------------------------------

    def _headers(self, key: str | None = None) -> dict[str, str]:
        return {"Authorization": f"Bearer {key or self.chance.choice(self.world.keys)}"}

    async def _post(self, path: str, body: Any, key: str | None = None) -> tuple[int, Any]:
        return await self.call("POST", path, key, body)

    async def call(self, method: str, path: str, key: str | None = None, body: Any = None) -> tuple[int, Any]:
        """Status and JSON; 0 where the server is away. Statuses of 5xx are noted."""
        try:
            timeout = aiohttp.ClientTimeout(total=ANSWER_S)
            async with (
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(force_close=True), timeout=timeout
                ) as http,
                http.request(
                    method, f"{self.world.url}{path}", json=body, headers=self._headers(key)
                ) as reply,
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
        self.world.ledger.note_error(what, reply.status, code, time.monotonic())


async def read_back(world: World, key: str, session_id: str) -> list[dict[str, Any]] | None:
    """A session's turns as REST gives them; None if there is no such session. Raises an error of OUTAGE."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http,
        http.get(
            f"{world.url}/api/sessions/{session_id}", headers={"Authorization": f"Bearer {key}"}
        ) as reply,
    ):
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
                    question = await client.ask(Question(content, SHORT, session_id, adapter))
                    session_id = question.session_id
                    world.references[script[: number + 1], adapter, False] = question.text
        for content in LONG_QUESTIONS:
            question = await client.ask(Question(content, LONG))
            world.references[(content,), None, True] = question.text
