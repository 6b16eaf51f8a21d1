"""Asks helper processes about grammars, replaces dead ones, and remembers their verdicts."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec

from engine_bridge.grammars.worker import GrammarTokenizer, Setup
from engine_bridge.protocol.errors import EngineUnavailable
from engine_bridge.protocol.figures import GrammarStats

log = logging.getLogger(__name__)

NUM_PROCESSES = 2  # so that one client's slow grammar does not hold up another's
START_TIMEOUT_S = 60.0  # a tokenizer of 150,000 tokens takes about a second; a swapping machine takes longer
# Verdicts that are remembered of each tenant, and tenants. Chosen: an agent has some dozens of schemas.
MAX_REMEMBERED, MAX_TENANTS = 256, 4096
# A check that took too long, or was ended from outside, may have been the machine's fault: it is tried again after this time. Chosen.
UNSURE_S = 60.0
MIB = 1 << 20


class HelperDied(Exception):
    """A helper process ended. was_slow: it was ended for taking too long. was_crash: by a crash that will repeat itself."""

    def __init__(self, *, was_slow: bool, was_crash: bool) -> None:
        super().__init__()
        self.was_slow = was_slow
        self.was_crash = was_crash


class HelperProcess:
    """One helper process and the connection to it. Its methods block, for no longer than they say; one thread uses it at a time.

    Attributes:
        has_worked: whether the process has checked a grammar.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._helper: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._is_over = False
        self.has_worked = False

    @property
    def pid(self) -> int | None:
        """The number of the process; None while there is none."""
        return self._helper[0].pid if self._helper is not None else None

    def ask(self, grammar: bytes, timeout_s: float) -> str:
        """Check a grammar; returns its fault, "" for none.

        Raises HelperDied (the next call begins with a new process), EngineUnavailable if no process can be started.
        """
        self.start()
        self.has_worked = True
        return self._exchange(grammar, timeout_s).decode()

    def start(self) -> None:
        """Start a process unless one runs. Raises EngineUnavailable."""
        if self._helper is not None and self._helper[0].poll() is None:
            return
        self.close()
        try:
            self._helper = _start()
            self._exchange(msgspec.json.encode(self._setup), START_TIMEOUT_S)
        except (OSError, HelperDied) as error:
            self.close()
            if not self._is_over:  # else it was ended while it started
                log.error("the helper process for grammars cannot be started", exc_info=error)
            raise EngineUnavailable(
                "Structured output cannot be checked now. Try again in a moment."
            ) from error

    def end(self) -> None:
        """End the process for good, also while another thread starts it."""
        self._is_over = True
        self.close()

    def close(self) -> None:
        """End the process; the next start makes a new one."""
        helper, self._helper, self.has_worked = self._helper, None, False
        if helper is not None:
            process, connection = helper
            process.kill()
            process.wait()
            connection.close()

    def _exchange(self, message: bytes, timeout_s: float) -> bytes:
        """The reply to a message. A process that neither reads nor answers is ended when its time is over."""
        assert self._helper is not None
        process, connection = self._helper
        is_slow = threading.Event()

        def end() -> None:
            """End the process, so that nothing waits for it any more."""
            is_slow.set()
            process.kill()

        timer = threading.Timer(timeout_s, end)
        timer.start()
        try:
            connection.send_bytes(message)
            return connection.recv_bytes()
        except (OSError, EOFError) as error:
            crashes = (-signal.SIGSEGV, -signal.SIGABRT)
            was_crash = not is_slow.is_set() and _exit_status(process) in crashes
            self.close()
            raise HelperDied(was_slow=is_slow.is_set(), was_crash=was_crash) from error
        finally:
            timer.cancel()


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    """Return a new process, and our end of the pipe that is its standard input."""
    ours, theirs = Pipe()
    with theirs:
        try:
            # Ctrl-C in the server's terminal is for the server to handle; the helper ends when its stdin does. In the server's session, because in
            # a separate one Linux would not let answers go before checks, however nice it is (sched(7), "autogroup").
            process = subprocess.Popen(
                [sys.executable, "-m", "engine_bridge.grammars.worker"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                process_group=0,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def _exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status of a process whose connection has ended; None if it lives on."""
    try:
        return process.wait(1.0)
    except subprocess.TimeoutExpired:
        return None


class _Known(NamedTuple):
    """A verdict. until_s: the end of its validity on the monotonic clock."""

    reason: str
    until_s: float


class _Tenant:
    """One tenant's checks: its turn, and its verdicts. No tenant can learn of another's checks."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_users = 0
        self._verdicts: OrderedDict[bytes, _Known] = OrderedDict()

    def known(self, key: bytes) -> _Known | None:
        """Return the verdict on a grammar if it still holds."""
        found = self._verdicts.get(key)
        return found if found is not None and found.until_s > time.monotonic() else None

    def remember(self, key: bytes, known: _Known) -> None:
        """Keep a verdict; the one used longest ago makes room."""
        self._verdicts[key] = known
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > MAX_REMEMBERED:
            self._verdicts.popitem(last=False)


class GrammarChecker:
    """Verdicts on grammars, each reached once for a tenant and remembered by content.

    Attributes:
        num_checked, num_refused: grammars given to helper processes; grammars that must not be used.
        num_deaths: helper processes that ended by a crash or by their time.
        seconds: work of helper processes.
    """

    def __init__(self, tokenizer: GrammarTokenizer, *, timeout_s: float, memory_mib: int) -> None:
        self._timeout_s = timeout_s
        setup = Setup(tokenizer, memory_mib * MIB, cpu_s=2 * timeout_s)
        self.processes = [HelperProcess(setup) for _ in range(NUM_PROCESSES)]
        self._free: queue.SimpleQueue[HelperProcess] = queue.SimpleQueue()
        for process in self.processes:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="grammars")
        self._checking: set[asyncio.Task[str]] = set()
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self.num_checked = 0
        self.num_refused = 0
        self.num_deaths = 0
        self.seconds = 0.0

    def stats(self) -> GrammarStats:
        """Return the counts so far."""
        return GrammarStats(self.num_checked, self.num_refused, self.num_deaths, self.seconds)

    def warm_up(self) -> None:
        """Start the processes now, so that the first grammar need not wait for them. Returns at once."""
        for _ in self.processes:
            self._threads.submit(self._start_one)

    def _start_one(self) -> None:
        process = self._free.get()
        try:
            process.start()
        finally:
            self._free.put(process)

    async def check(self, grammar: str, tenant: str) -> str:
        """Check a grammar in llguidance's own form; returns its fault, "" for none. Raises EngineUnavailable.

        A tenant's are checked one after the other, so that none keeps all processes busy.
        """
        try:
            text = grammar.encode()
        except UnicodeEncodeError:
            return "it holds half a character (a lone surrogate)"
        # A separate task keeps the turn until the helper is done: a client that leaves and comes again must not have two at work.
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
        """Forget the tenants with the oldest checks, down to MAX_TENANTS."""
        while len(self._tenants) > MAX_TENANTS:
            oldest = next((name for name, each in self._tenants.items() if not each.num_users), None)
            if oldest is None:
                return
            del self._tenants[oldest]

    def _ask(self, grammar: bytes) -> _Known:
        """Let a helper check a grammar. Runs on a thread of `_threads`."""
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
        """Ask a helper. If it dies after earlier grammars it may have died of those: a new one is asked again."""
        has_worked = process.has_worked
        while True:
            try:
                return process.ask(grammar, self._timeout_s)
            except HelperDied as death:
                self.num_deaths += 1
                if death.was_slow or not has_worked:
                    raise
                has_worked = False

    def _restart(self, process: HelperProcess) -> None:
        """Start the process again, so that its death delays the tenant of this grammar, and no other."""
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
        for process in self.processes:
            process.end()
