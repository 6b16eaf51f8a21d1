"""Turns in any order of asking, answering, failing, leaving, coming back and waiting: nobody reads a text that was never written."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from engine_bridge.protocol.errors import EngineUnavailable
from gateway.errors import GatewayError
from gateway.sessions import SessionStore
from gateway.turns.live_turn import LiveTurn

from .fake_node import Answer
from .machine import Machine, action
from .parts import IN_MEMORY, NOW, Parts, SkippingLoop, passes, settled

READERS = st.integers(0, 1)


class Reader:
    """A client that keeps what it read of a turn, and comes back with the last `seq` that it saw."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turn: LiveTurn | None = None
        self.text = ""
        self.seq = 0

    def wake(self, turn: LiveTurn) -> None:
        pass

    def read(self) -> None:
        if self.turn is not None:
            self.text += self.turn.after(self.seq).text
            self.seq = self.turn.seq


class TurnsMachine(Machine):
    """One message at a time, two windows that ask and follow it, one node. Text is unique to each try, so a mixture of two shows.

    The more messages at once, the seldomer do the few steps meet that a fault takes.
    """

    loop_factory = SkippingLoop

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        self.written: dict[str, list[str]] = {}  # by request id: what the node has said in that try
        self.all_readers = [Reader("a"), Reader("a")]
        self.names = ["a"]

    @initialize()
    def start(self) -> None:
        self.runner.run(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        store = await SessionStore.open(Path(self.folder.name) / "sessions.sqlite3")
        self.parts = Parts(store, now=lambda: NOW + loop.time())

    @property
    def running(self) -> list[Answer]:
        return [a for a in self.parts.node.answers if not (a.is_over or a.is_closed or a.is_cancelled)]

    @action(often=2, number=READERS)
    async def asks(self, number: int) -> None:
        """A message, or its repetition by the same or another client, which then reads from the first piece."""
        reader = self.all_readers[number]
        self._drop(reader)
        try:
            reader.turn = await self.parts.ask(reader.name, f"question {reader.name}")
        except GatewayError as error:
            assert error.code == "overloaded", error
            return
        reader.text, reader.seq = "", 0
        self.parts.turns.follow(reader.turn, reader)
        await settled()
        reader.read()

    @action(when=lambda self: any(reader.turn for reader in self.all_readers), number=READERS)
    async def drops(self, number: int) -> None:
        self._drop(self.all_readers[number])

    def _drop(self, reader: Reader) -> None:
        if reader.turn is not None:
            reader.read()
            self.parts.turns.unfollow(reader.turn, reader)
            reader.turn = None

    @action(when=lambda self: any(reader.seq for reader in self.all_readers), number=READERS)
    async def comes_back(self, number: int) -> None:
        """As a socket does: from the last `seq`; what is not under way any more is read from the start."""
        reader = self.all_readers[number]
        self._drop(reader)
        live = self.parts.turns.find("ann", reader.name)
        if live is None or not live.can_resume(reader.seq):
            reader.text, reader.seq = "", 0
            return
        reader.text = reader.text if reader.seq else ""
        reader.turn = live
        self.parts.turns.follow(live, reader)
        reader.read()

    @action(
        when=lambda self: self.running,
        often=3,
        pieces=st.integers(0, 3),
        end=st.sampled_from([None, "fail", "stop"]),
    )
    async def says_and_may_end(self, pieces: int, end: str | None) -> None:
        (answer,) = self.running
        said = self.written.setdefault(answer.request.request_id, [])
        for _ in range(pieces):
            said.append(f"<{answer.request.request_id[-6:]} {len(said)}>")
            answer.say(said[-1])
        if end == "stop":
            answer.finish()
        elif end == "fail":
            answer.fail(EngineUnavailable("The engine is being rebuilt."))
        await self._caught_up()

    @action(when=lambda self: self.running)
    async def stops(self) -> None:
        await self.parts.turns.stop("ann", self.all_readers[0].name)
        await self._caught_up()

    @action(when=lambda self: self.parts.node.answers, seconds=st.sampled_from([5.0, 31.0, 121.0]))
    async def time_passes(self, seconds: float) -> None:
        await passes(seconds)
        await self._caught_up()

    @action(when=lambda self: self.parts.node.answers and not self.running)
    async def another_message(self) -> None:
        for reader in self.all_readers:
            self._drop(reader)
        self.names.append(self.names[-1] + "a")
        self.all_readers = [Reader(self.names[-1]), Reader(self.names[-1])]

    @action(when=lambda self: self.running)
    async def server_is_started_again(self) -> None:
        """All that was under way is lost; readers come back with what they saw in the server's last life."""
        for reader in self.all_readers:
            self._drop(reader)
        for answer in self.parts.node.answers:
            if not (answer.is_over or answer.is_closed):
                answer.fail(EngineUnavailable("The server died."))
        await self._caught_up()
        await self.parts.close()
        await self.parts.store.close()
        await self._open()

    async def _caught_up(self) -> None:
        """Wait until the node's words have arrived and what ended is stored."""
        async with asyncio.timeout(10_000):
            while any(
                (a.is_over or a.is_cancelled or not a.is_read) and not self._is_told(a.request.request_id)
                for a in self.parts.node.answers
            ):
                await asyncio.sleep(0.0005)  # the store answers from a thread
        for reader in self.all_readers:
            reader.read()

    def _is_told(self, request_id: str) -> bool:
        for name in self.names:
            live = self.parts.turns.find("ann", name)
            if live is not None and live.request_id == request_id:
                answer = next(a for a in self.parts.node.answers if a.request.request_id == request_id)
                return live.is_over or (answer.is_read and not answer.is_over)
        return True

    @invariant()
    def nobody_read_what_was_never_written(self) -> None:
        for reader in self.all_readers:
            is_beginning_of_one_try = any(
                "".join(said).startswith(reader.text) for said in (*self.written.values(), [])
            )
            assert is_beginning_of_one_try, f"{reader.text!r} is a mixture or has a gap"

    @invariant()
    def who_follows_has_all_of_it(self) -> None:
        for reader in self.all_readers:
            if reader.turn is not None:
                assert reader.seq == reader.turn.seq
                assert reader.text == reader.turn.whole.text

    def teardown(self) -> None:
        self.runner.run(self._end())
        self.runner.close()
        self.folder.cleanup()

    async def _end(self) -> None:
        """Whatever happened: drained, every turn is over on disk, and what is stored was written in one try."""
        await self.parts.close()
        summaries, _ = await self.parts.store.list_sessions("ann")
        for summary in summaries:
            for turn in (await self.parts.store.get_session("ann", summary.id)).turns:
                assert turn.status != "running"
                assert any(turn.answer == "".join(said) for said in (*self.written.values(), []))
        await self.parts.store.close()


TestTurns = TurnsMachine.TestCase
TestTurns.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
