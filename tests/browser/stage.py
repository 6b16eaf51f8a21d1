"""A gateway in a thread of its own, in front of a node whose answers the test writes, and the line to it, which can be frozen or cut."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from engine_bridge.protocol.engine_request import CalledTool
from engine_bridge.protocol.errors import EngineUnavailable
from gateway.access.auth import LOCAL
from gateway.access.key_file import key_file_line, owner_of
from gateway.sessions import SessionStore
from gateway.settings.config import Config
from tests.unit.gateway.fake_node import Answer
from tests.unit.gateway.front import Gateway

T = TypeVar("T")
Direction = Literal["up", "down"]
PATIENCE_S = 30.0
SCRIPT = ("Well, ", "**hello**.")


class Site(NamedTuple):
    """Where pages are opened, and the key that they have in their storage."""

    url: str
    key: str | None = None


class Line:
    """Passes bytes between pages and a server. `up` is towards the server. Bytes that come while a direction is frozen wait there."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._flows = {"up": asyncio.Event(), "down": asyncio.Event()}
        for flow in self._flows.values():
            flow.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def freeze(self, *directions: Direction) -> None:
        """Let no byte pass any more. Connections still open, as they do at a stopped process."""
        for direction in directions:
            self._flows[direction].clear()

    def thaw(self) -> None:
        for flow in self._flows.values():
            flow.set()

    def cut(self) -> None:
        """Reset every connection; what waited on the way is lost."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        self._server.close()
        self.thaw()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        to_server = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, to_server[1]}
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(reader, to_server[1], "up"))
                both.create_task(self._pass_on(to_server[0], writer, "down"))
        finally:
            self._writers -= {writer, to_server[1]}

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self._flows[direction].wait()
                writer.write(data)
                await writer.drain()
        writer.close()


class Stage:
    """Use as a context manager. keys: names of the keys in its key file, none: it asks for no key."""

    def __init__(self, folder: Path, *keys: str) -> None:
        self.folder = folder
        self.keys = {name: f"ov-key-of-{name}-for-tests-only" for name in keys}
        self.key_file = folder / "keys"
        self.operators: set[str] = set()
        self.settings: dict[str, Any] = {}
        """Of `Config`, beside those that each stage has."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._ended = contextlib.AsyncExitStack()

    def __enter__(self) -> Stage:
        self._thread.start()
        self.write_keys(*self.keys)
        self._wait(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._ended.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        self.store = await SessionStore.open(self.folder / "sessions.sqlite3")
        self._ended.push_async_callback(self.store.close)
        config = Config(
            port=0,
            data_dir=self.folder,
            drain_timeout_s=1,
            kv_host_gib=0.25,
            api_key_file=self.key_file if self.keys else None,
            **self.settings,
        )
        self.gateway = Gateway(self.store, config)
        self.gateway.node.script = SCRIPT
        await self._ended.enter_async_context(self.gateway.server)
        self._ended.callback(self.gateway.node.cut_off)
        self.line = Line(int(self.gateway.server.url.rsplit(":", 1)[1]))
        await self.line.open()
        self._ended.push_async_callback(self.line.close)

    @property
    def url(self) -> str:
        """Of the line, not of the server behind it."""
        return f"http://127.0.0.1:{self.line.port}"

    @property
    def num_asked(self) -> int:
        """Questions that the node was given."""
        return len(self.gateway.node.answers)

    def write_keys(self, *names: str) -> None:
        """Make these the keys that the server accepts, and let it look at once."""
        if not self.keys:
            return
        new = self.key_file.with_suffix(".new")
        lines = [key_file_line(name, self.keys[name], is_operator=name in self.operators) for name in names]
        new.write_text("".join(line + "\n" for line in lines))
        new.chmod(0o600)
        new.rename(self.key_file)
        if hasattr(self, "gateway"):
            self.do(lambda: self.gateway.server.services.look_at_keys.set())

    def do(self, act: Callable[[], T]) -> T:
        """Do something in the gateway's thread."""

        async def done() -> T:
            return act()

        return self._wait(done())

    @contextlib.contextmanager
    def by_hand(self) -> Iterator[Callable[[], Writer]]:
        """Let the test write each answer; gives a function that waits for the next question."""
        numbers = itertools.count(self.num_asked)
        self.gateway.node.script, script = None, self.gateway.node.script
        try:
            yield lambda: self.answer(next(numbers))
        finally:
            self.gateway.node.script = script

    def answer(self, number: int) -> Writer:
        """The answer to the question of that number, once it was asked."""
        return Writer(self, self._wait(self.gateway.node.asked(number)))

    def turns(self, session_id: str) -> list[Any]:
        """What is stored of a conversation of the first key."""
        owner = next((owner_of(key) for key in self.keys.values()), LOCAL.owner)
        return list(self._wait(self.store.get_session(owner, session_id)).turns)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)


class Writer:
    """Writes one answer."""

    def __init__(self, stage: Stage, answer: Answer) -> None:
        self._stage = stage
        self.answer = answer

    def say(self, *pieces: str) -> None:
        self._stage.do(lambda: self.answer.say(*pieces))

    def think(self, *pieces: str) -> None:
        self._stage.do(lambda: self.answer.think(*pieces))

    def finish(self, *pieces: str, reason: str = "stop") -> None:
        self._stage.do(lambda: self.answer.finish(*pieces, reason=reason))

    def call(self, name: str, arguments: str, call_id: str = "c1") -> None:
        self._stage.do(lambda: self.answer.call(CalledTool(call_id, name, arguments)))

    def fail(self) -> None:
        self._stage.do(lambda: self.answer.fail(EngineUnavailable("The engine is being rebuilt.")))
