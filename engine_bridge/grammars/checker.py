"""Asks helper processes about grammars, replaces those that die, and remembers what they said."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import msgspec
from msgspec import Struct

from engine_bridge.grammars.worker import HEAD_BYTES, Setup, Verdict
from engine_bridge.protocol.errors import EngineUnavailable
from engine_bridge.protocol.node import GrammarStats

log = logging.getLogger(__name__)

NUM_PROCESSES = 2  # so that one client's slow grammar does not hold up another's
START_TIMEOUT_S = (
    60.0  # a tokenizer of 150,000 tokens takes about a second; a machine that swaps takes longer
)
# Verdicts that are remembered of each tenant, and tenants. Chosen: an agent has some dozens of schemas.
MAX_REMEMBERED, MAX_TENANTS = 256, 4096
LEAST_WAIT_S = 0.001  # a socket whose timeout is 0 does not wait at all
# A check that took too long, or was ended from outside, may have been the machine's fault: so long it is not tried again. Chosen.
UNSURE_S = 60.0
MIB = 1 << 20


class GrammarTokenizer(Struct, frozen=True):
    """What helper processes need of the model's tokenizer. See `engine_bridge.grammars.worker.Setup`."""

    definition: str
    num_tokens: int | None = None
    eos_token_id: int | None = None


class HelperDied(Exception):
    """A helper process ended. was_slow: it was ended for taking too long. was_crash: by its own doing, as it will be again."""

    def __init__(self, *, was_slow: bool, was_crash: bool) -> None:
        super().__init__()
        self.was_slow = was_slow
        self.was_crash = was_crash


class HelperProcess:
    """One helper process and the socket to it. Its methods block, for no longer than they say; one thread uses it at a time.

    Attributes:
        has_worked: whether the process has been asked anything.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.has_worked = False

    def ask(self, grammar: bytes, timeout_s: float) -> str:
        """What is wrong with a grammar, "" if nothing is.

        Raises HelperDied (the next call begins with a new process), EngineUnavailable where no process can be had.
        """
        self.start()
        self.has_worked = True
        try:
            return msgspec.json.decode(self._exchange(grammar, timeout_s), type=Verdict).reason
        except msgspec.DecodeError as error:
            self.close()
            raise HelperDied(was_slow=False, was_crash=False) from error

    def start(self) -> None:
        """Have a process, a new one if the last has ended. Raises EngineUnavailable."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        try:
            self._process, self._socket = _helper()
            self._exchange(msgspec.json.encode(self._setup), START_TIMEOUT_S)
        except (OSError, HelperDied) as error:
            self.close()
            log.error("the helper process for grammars cannot be started", exc_info=error)
            raise EngineUnavailable(
                "Structured output cannot be checked now. Try again in a moment."
            ) from error

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        connection, self._socket = self._socket, None
        self.has_worked = False
        if process is not None:
            process.kill()
            process.wait()
        if connection is not None:
            connection.close()

    def _exchange(self, frame: bytes, timeout_s: float) -> bytes:
        """The reply to a frame. A process that neither reads nor answers is ended when its time is over."""
        process, connection = self._process, self._socket
        assert process is not None and connection is not None
        deadline_s = time.monotonic() + timeout_s
        is_slow = False
        try:
            connection.settimeout(max(timeout_s, LEAST_WAIT_S))
            connection.sendall(len(frame).to_bytes(HEAD_BYTES, "big") + frame)
            reply = _reply(connection, deadline_s)
        except TimeoutError:
            reply, is_slow = None, True
        except OSError:
            reply = None
        if reply is None:
            was_crash = not is_slow and _exit_status(process) in (-signal.SIGSEGV, -signal.SIGABRT)
            self.close()
            raise HelperDied(was_slow=is_slow, was_crash=was_crash)
        return reply


def _helper() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A new process, and our end of the socket that is its standard input and output."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            # Ctrl-C in the server's terminal is for the server to handle; the helper ends when its stdin does. In the server's session, as in one
            # of its own Linux would not let answers go before checks, however nice it is (sched(7), "autogroup").
            process = subprocess.Popen(
                [sys.executable, "-m", "engine_bridge.grammars.worker"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                process_group=0,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def _reply(connection: socket.socket, deadline_s: float) -> bytes | None:
    """The next frame; None where the other end has closed. Raises TimeoutError."""
    received, size = bytearray(), HEAD_BYTES
    while len(received) < size:
        connection.settimeout(max(deadline_s - time.monotonic(), LEAST_WAIT_S))
        part = connection.recv(size - len(received))
        if not part:
            return None
        received += part
        if len(received) == HEAD_BYTES:
            size = HEAD_BYTES + int.from_bytes(received, "big")
    return bytes(received[HEAD_BYTES:])


def _exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """Of a process whose socket has ended; None if it lives on."""
    try:
        return process.wait(1.0)
    except subprocess.TimeoutExpired:
        return None


class _Known(NamedTuple):
    """A verdict, and until when it holds on the monotonic clock."""

    reason: str
    until_s: float


class _Tenant:
    """One tenant's checks: whose turn it is, and what is known. What one tenant has asked shows in nothing that another one is told."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_users = 0
        self._verdicts: OrderedDict[bytes, _Known] = OrderedDict()

    def known(self, key: bytes) -> _Known | None:
        found = self._verdicts.get(key)
        return found if found is not None and found.until_s > time.monotonic() else None

    def remember(self, key: bytes, known: _Known) -> None:
        self._verdicts[key] = known
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > MAX_REMEMBERED:
            self._verdicts.popitem(last=False)


class NoChecker:
    """Before there is a tokenizer to check grammars by."""

    def stats(self) -> GrammarStats | None:
        return None

    def close(self) -> None: ...


class GrammarChecker:
    """Verdicts on grammars, each reached once for a tenant and remembered by content.

    Args:
        tokenizer: the model's.
        timeout_s: how long checking one grammar may take.
        memory_mib: how much memory it may take.

    Attributes:
        num_checked, num_refused: grammars given to helper processes; those of them that must not be used.
        num_deaths: those that ended one, by a crash or by their time.
        seconds: that helper processes worked.
    """

    def __init__(self, tokenizer: GrammarTokenizer, *, timeout_s: float, memory_mib: int) -> None:
        self._timeout_s = timeout_s
        setup = Setup(
            tokenizer.definition,
            tokenizer.num_tokens,
            tokenizer.eos_token_id,
            memory_mib * MIB,
            cpu_s=2 * timeout_s,
        )
        self._processes = [HelperProcess(setup) for _ in range(NUM_PROCESSES)]
        self._free: queue.SimpleQueue[HelperProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="grammars")
        self._checking: set[asyncio.Task[str]] = set()
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self.num_checked = 0
        self.num_refused = 0
        self.num_deaths = 0
        self.seconds = 0.0

    def stats(self) -> GrammarStats | None:
        return GrammarStats(self.num_checked, self.num_refused, self.num_deaths, self.seconds)

    def warm_up(self) -> None:
        """Start the processes now, so that the first grammar need not wait for them. Returns at once."""
        for _ in self._processes:
            self._threads.submit(self._start_one)

    def _start_one(self) -> None:
        process = self._free.get()
        try:
            process.start()
        finally:
            self._free.put(process)

    async def check(self, grammar: str, tenant: str) -> str:
        """What is wrong with a grammar (in llguidance's own form), "" if nothing is. Raises EngineUnavailable.

        A tenant's are checked one after the other, so that none keeps all processes busy.
        """
        try:
            text = grammar.encode()
        except UnicodeEncodeError:
            return "it holds half a character (a lone surrogate)"
        # A task of its own, which keeps the turn until the helper is done: who leaves and comes again must not have two at work.
        checking = asyncio.create_task(self._check(text, tenant))
        self._checking.add(checking)
        checking.add_done_callback(self._checking.discard)
        return await asyncio.shield(checking)

    async def _check(self, text: bytes, tenant: str) -> str:
        key = hashlib.sha256(text).digest()
        async with self._turn_of(
            tenant
        ) as own:  # also where it is known: another request may be asking the same
            known = own.known(key)
            if known is None:
                known = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, text)
            own.remember(key, known)
        return known.reason

    @asynccontextmanager
    async def _turn_of(self, tenant: str) -> AsyncIterator[_Tenant]:
        own = self._tenants.setdefault(tenant, _Tenant())
        self._tenants.move_to_end(tenant)
        own.num_users += 1
        try:
            async with own.lock:
                yield own
        finally:
            own.num_users -= 1
            self._forget_tenants()

    def _forget_tenants(self) -> None:
        """Those that have asked nothing for longest."""
        while len(self._tenants) > MAX_TENANTS:
            oldest = next((name for name, each in self._tenants.items() if not each.num_users), None)
            if oldest is None:
                return
            del self._tenants[oldest]

    def _ask(self, grammar: bytes) -> _Known:
        """On a thread of ours."""
        process = self._free.get()
        started_s = time.monotonic()
        try:
            reason = self._asked(process, grammar)
            self.num_refused += bool(reason)
            return _Known(reason, math.inf)
        except HelperDied as death:
            self.num_refused += 1
            what = "took too long" if death.was_slow else "ended the helper process"
            log.warning("a grammar of %d bytes %s and was refused", len(grammar), what)
            self._restart(process)
            return self._verdict_of(death)
        finally:
            self.num_checked += 1
            self.seconds += time.monotonic() - started_s
            self._free.put(process)

    def _asked(self, process: HelperProcess, grammar: bytes) -> str:
        """What a helper says of a grammar. One that dies after others' grammars may have died of those: a new one is asked again."""
        has_worked = process.has_worked
        try:
            return process.ask(grammar, self._timeout_s)
        except HelperDied as death:
            self.num_deaths += 1
            if death.was_slow or not has_worked:
                raise
        try:
            return process.ask(grammar, self._timeout_s)
        except HelperDied:
            self.num_deaths += 1
            raise

    def _restart(self, process: HelperProcess) -> None:
        """So that the one whose grammar ended it waits for the next one, and nobody else."""
        with suppress(EngineUnavailable):  # is in the log, and tried again when it is needed
            process.start()

    def _verdict_of(self, death: HelperDied) -> _Known:
        until_s = math.inf if death.was_crash else time.monotonic() + UNSURE_S
        if death.was_slow:
            return _Known(f"checking it takes longer than {self._timeout_s:g} s (grammar_check_s)", until_s)
        return _Known("compiling it nests too deeply or takes too much memory (grammar_check_mib)", until_s)

    def close(self) -> None:
        """End the processes; checks under way fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()
