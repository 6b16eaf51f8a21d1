"""What the tests of the gateway's parts share: the parts put together, a follower, and an event loop whose clock can be put forward."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.advisories.advisories import Advisories
from gateway.advisories.drafts import Drafts
from gateway.errors import GatewayError
from gateway.metrics.metrics import Metrics
from gateway.sessions import SessionStore
from gateway.settings.config import Config
from gateway.tools.toolbox import toolbox_of
from gateway.turns.live_turn import LiveTurn
from gateway.turns.protocol import Message
from gateway.turns.turns import Turns

from .fake_node import PATIENCE_S, FakeNode

NOW = 1_700_000_000.0
KEYS = KEY, OTHER = "ov-" + "k" * 43, "ov-" + "o" * 43
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop that can be told that time has passed: what was due in it fires at once, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self._skipped_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds


def skip(seconds: float) -> None:
    """Put the running loop's clock forward."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    loop.skip(seconds)


async def passes(seconds: float) -> None:
    """Let that much time pass, and everything that was due in it happen."""
    if seconds:
        skip(seconds)
    await settled()


class Clock:
    """Seconds that pass when told to."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


async def until(is_so: Callable[[], Any], step_s: float = 0.0) -> None:
    """Wait for what tells nobody that it has changed, and let `step_s` of the loop's time pass between two looks."""
    async with asyncio.timeout(PATIENCE_S + 1000 * step_s):
        while not is_so():
            await passes(step_s)
            await asyncio.sleep(0.001)  # what happens in threads takes a while


async def settled(rounds: int = 20) -> None:
    """Let the event loop go round as often as a chain of callbacks may need."""
    for _ in range(rounds):
        await asyncio.sleep(0)


class Listener:
    """A follower that takes pieces as a socket does: it keeps how many it has seen."""

    def __init__(self, turn: LiveTurn, seen: int = 0) -> None:
        self.turn = turn
        self.seen = seen
        self.texts: list[str] = []
        self._woken = asyncio.Event()

    def wake(self, turn: LiveTurn) -> None:
        assert turn is self.turn
        self._woken.set()

    def read(self) -> None:
        self.texts += [piece.text for piece in self.turn.pieces[self.seen :]]
        self.seen = len(self.turn.pieces)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self.read()
                if is_so():
                    return
                self._woken.clear()
                await self._woken.wait()

    async def has(self, text: str) -> None:
        await self.until(lambda: self.text == text)

    async def over(self) -> LiveTurn:
        await self.until(lambda: self.turn.is_over)
        return self.turn


class Parts:
    """Turns, advisories and drafts over one fake node and one real store."""

    def __init__(
        self,
        store: SessionStore,
        *,
        accepts_drafts: bool = True,
        now: Callable[[], float] = lambda: NOW,
        config: Config | None = None,
    ) -> None:
        self.node = FakeNode()
        self.store = store
        self.metrics = Metrics(CollectorRegistry())
        tools = toolbox_of(config, self.metrics) if config is not None else None
        self.drafts = Drafts(self.node, store, self.metrics, tools, accepts_drafts=accepts_drafts)
        loop = asyncio.get_running_loop()
        self.advisories = Advisories(self.node, store, self.metrics, self.drafts, clock=loop.time)
        self.turns = Turns(
            self.node, store, self.metrics, self.drafts, self.advisories, now=now, toolbox=tools
        )

    async def close(self) -> None:
        await self.drafts.close()
        await self.turns.drain(0.0)

    async def ask(self, name: str, content: str = "Hello!", owner: str = "ann", **fields: Any) -> LiveTurn:
        return await self.turns.ask(owner, Message(id=name, content=content, **fields))

    def follow(self, turn: LiveTurn, seen: int = 0) -> Listener:
        listener = Listener(turn, seen)
        self.turns.follow(turn, listener)
        return listener

    async def answered(
        self, name: str, *pieces: str, content: str = "Hello!", reason: str = "stop", **fields: Any
    ) -> LiveTurn:
        """A turn that was asked and answered to its end."""
        number = len(self.node.answers)
        turn = await self.ask(name, content, **fields)
        (await self.node.asked(number)).finish(*pieces, reason=reason)
        return await self.follow(turn).over()

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def key_file(folder: Path, *lines: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text("\n".join(lines) + "\n")
    path.chmod(mode)
    return path


def checkpoint(path: Path, how: str) -> None:
    """Write what the log holds into the file."""
    with closing(sqlite3.connect(path)) as conn:
        conn.execute(f"PRAGMA wal_checkpoint({how})").fetchall()


async def refused(asking: Any) -> GatewayError:
    """The error with which something that was asked is refused."""
    try:
        await asking
    except GatewayError as error:
        return error
    raise AssertionError("it was not refused")
