"""One node in a child process: a crash of native code, or the kernel's out-of-memory killer, ends the engine and not the gateway.

The two talk over a pair of sockets that nobody else can reach. The child reads its settings from its standard input, and ends when its socket does,
however the gateway ended; signals that a terminal or a service manager sends to all processes are the gateway's to obey.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress

from engine_bridge.cluster.link import NodeLink
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.protocol.errors import EngineUnavailable
from engine_bridge.protocol.figures import Progress

log = logging.getLogger(__name__)

# A child silent for this long is killed: the process or its loop is stopped. Chosen: 60 reports.
SILENT_S = 15.0
# The same while it starts: importing torch and vLLM from a slow disk, or beside others' work, lets it say nothing for tens of seconds. Chosen.
STARTING_SILENT_S = 120.0
# Between two starts after a crash: the first at once, then twice as long each time that the child did not live for HEALTHY_S. Chosen.
FIRST_PAUSE_S, MOST_PAUSE_S, HEALTHY_S = 0.5, 30.0, 60.0
# After the child was asked to end: its KV goes to disk meanwhile.
CLOSE_S = 30.0
LOOK_EVERY_S = 1.0
# A loop that looks this much later than planned was merely busy. Chosen: far above the delays of a busy loop.
LATE_S = 1.0


class Silence:
    """How long another process has said nothing, as far as this one can know.

    It counts only while this process runs: after a pause (SIGSTOP, a machine that swapped) messages of that time are yet to be read.

    Args:
        every_s: the longest time between two calls of `look`.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._looked_s: float | None = None
        self._awake_s = -math.inf

    def look(self, now: float) -> None:
        """Note that this process runs. now: seconds, monotonic."""
        if self._looked_s is not None and now - self._looked_s > self._every_s + LATE_S:
            self._awake_s = now
        self._looked_s = now

    def seconds(self, heard_s: float, now: float) -> float:
        """Return the seconds of silence since `heard_s`, when the other process was heard last."""
        return max(now - max(heard_s, self._awake_s), 0.0)


async def pause_before_restart(closing: asyncio.Event, pause_s: float, began_s: float) -> float:
    """Wait before a process is started again, or until `closing`. Returns the length of the pause.

    pause_s: the pause before. It doubles, up to MOST_PAUSE_S; after a life of HEALTHY_S the pauses begin anew. began_s: the start of the life that
    ended, on the monotonic clock.
    """
    pause_s = FIRST_PAUSE_S if time.monotonic() - began_s > HEALTHY_S else pause_s * 2
    with suppress(TimeoutError):
        await asyncio.wait_for(closing.wait(), min(pause_s, MOST_PAUSE_S))
    return pause_s


class ProcessNode(RemoteNode):
    """Keeps a child process running from `start` to `close`.

    Args:
        command: the child's; the number of its socket is put behind it.
        settings: the bytes that it reads from its standard input.
        environ: its environment; None for this process's own.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: bytes,
        model_names: tuple[str, ...],
        what: str = "the engine's process",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(model_names)
        self._what, self._environ = what, environ
        self._command, self._settings = command, settings
        self._process: Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._is_end_wanted = False
        self._first_start: asyncio.Future[None] | None = None

    @property
    def progress(self) -> Progress:
        """The node's progress. Clients see one engine that is rebuilt, however many processes it takes."""
        if self._closing.is_set():
            return self._so("closed", "closed")
        # The connection ends before the process does: the last report is out of date.
        if not self.is_up and (self._num_deaths or self._report is not None):
            return self._so("rebuilding", "starting the engine's process again")
        if not self.is_up:
            return self._so("starting", "starting the engine's process")
        told = super().progress
        # Clients already know this engine as running: report a restart as `rebuilding`, not `starting`.
        return (
            Progress("rebuilding", told.stage, told.elapsed_s)
            if told.state == "starting" and self._num_deaths
            else told
        )

    async def start(self) -> None:
        """Start the child. Raises EngineUnavailable with the child's reason if its engine cannot be started the first time."""
        self._first_start = asyncio.get_running_loop().create_future()
        self._keeping = asyncio.create_task(self._keep(), name="engine process")
        await self._first_start

    async def restart(self) -> None:
        """End the child, which was drained, and start it again. Returns when its engine is ready; raises EngineUnavailable if that fails."""
        before, num_deaths = self._link, self._num_deaths
        if before is not None and before.is_up:
            self._is_end_wanted = True
            before.notice("close")
        while self._link in (before, None) or self.progress.state != "ready":
            if self._closing.is_set() or self._num_deaths > num_deaths + 1:
                raise EngineUnavailable(
                    f"{self._what} could not be started again; the server's log says why, and it is tried on"
                )
            await asyncio.sleep(LOOK_EVERY_S / 4)

    async def close(self) -> None:
        """Ask the child to end, and kill it after CLOSE_S."""
        self._closing.set()
        if self._keeping is None:
            return
        if self._link is not None and self._link.is_up:
            self._link.notice("close")
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._keeping), CLOSE_S)
        self._kill()
        await asyncio.gather(self._keeping, return_exceptions=True)
        if self._process is not None:
            await self._process.wait()

    # -- the child -----------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Keep a child running until `close`. A `start` that waits is answered, however this ends."""
        try:
            await self._keep_alive()
        finally:
            if self._first_start is not None and not self._first_start.done():
                self._first_start.set_exception(EngineUnavailable(f"{self._what} is closed"))

    async def _keep_alive(self) -> None:
        """Start it, look after it, and start it again when it has died."""
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            began_s = time.monotonic()
            try:
                why = await self._live()
            except Exception:
                log.exception("%s could not be looked after", self._what)
                why = "could not be started"
            self.detach()
            self._kill()
            if self._closing.is_set():
                break
            self._num_deaths += 1
            self._since_s = time.monotonic()
            if self._is_end_wanted:
                self._is_end_wanted = False
                log.info("%s is started again, as was asked", self._what)
                continue
            if self._first_start is not None and not self._first_start.done():
                # It never served, so the next start would fail in the same way.
                self._first_start.set_exception(EngineUnavailable(f"{self._what} {why}"))
                return
            log.error("%s %s; it is started again", self._what, why)
            pause_s = await pause_before_restart(self._closing, pause_s, began_s)

    async def _live(self) -> str:
        """One life of the child; returns what ended it."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=self._environ,
            )
            theirs.close()
            if self._closing.is_set():
                self._kill()  # `close` came while it was being started, and found nothing to end
            lost = asyncio.Event()
            loop = asyncio.get_running_loop()
            _, link = await loop.create_connection(
                lambda: NodeLink(on_report=self.take_report, on_lost=lost.set), sock=ours
            )
            assert process.stdin is not None
            process.stdin.write(self._settings)
            process.stdin.close()
            looking = asyncio.create_task(self._look_after(link))
            try:
                with suppress(ConnectionError):
                    await link.greeted
                    self.attach(link)
                await lost.wait()
            finally:
                looking.cancel()
            with suppress(TimeoutError):
                # EOF comes before the end of the process.
                await asyncio.wait_for(process.wait(), LOOK_EVERY_S)
            return _way_out(process.returncode)

    async def _look_after(self, link: NodeLink) -> None:
        loop = asyncio.get_running_loop()
        silence = Silence(LOOK_EVERY_S / 4)
        while True:
            await asyncio.sleep(LOOK_EVERY_S / 4)
            self._note_start(link)
            silence.look(loop.time())
            silent_s = silence.seconds(link.reported_s, loop.time())
            if silent_s > (STARTING_SILENT_S if self.is_starting else SILENT_S):
                log.error("%s has said nothing for %.0f s: it is killed", self._what, silent_s)
                self._kill()
                return
            told = super().progress
            if told.state == "failed" and self._has_served:
                # The next process may fare better: a device's error can last as long as its process, a file may be there again.
                log.error("%s has an engine that cannot be built (%s): it is killed", self._what, told.error)
                self._kill()
                return

    @property
    def _has_served(self) -> bool:
        """Whether the first start is over and has worked."""
        start = self._first_start
        return start is not None and start.done() and start.exception() is None

    def _note_start(self, link: NodeLink) -> None:
        """The first start ends when the engine is ready, or has failed for good."""
        if self._first_start is None or self._first_start.done() or not link.is_up:
            return
        progress = super().progress
        if progress.state == "ready":
            self._first_start.set_result(None)
        elif progress.state == "failed":
            self._first_start.set_exception(EngineUnavailable(progress.error or "the engine has failed"))

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()


def _way_out(returncode: int | None) -> str:
    """Describe how a process ended, for the log."""
    if returncode is None:
        return "has closed its connection"
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"has ended with status {returncode}"
