"""Attacks on a running server, one after the other, while somebody else streams: what does each cost the others?

    python -m bench.live.hostile [--only WORDS] [--verbose]

The server is a process of its own with the demo model and 5,000 keys. The attacker has one; the victim, who streams, a neighbour, whose answers must
stay the same, and an operator have others. The last line of the output is JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp

from bench.live.attacks.attacker import MIB, Attacker, Outcome
from bench.live.attacks.cases import CASES, Case
from bench.live.report import figures, options, report
from gateway.access.auth import generate_key, key_file_line

ANSWER_WITHIN_S = 10.0
CASE_LIMIT_S = 90.0
SETTLE_S = 0.5
NUM_KEYS = 5000
ROLES = ("attacker", "victim", "neighbour", "operator")
AIMS = {
    "process_deaths": "aim 0",
    "status_5xx": "aim 0",
    "worst_loop_stall_ms": "aim ≤ 100",
    "worst_loop_work_ms": "aim ≤ 100: of the stalls, what the loop's own thread computed",
    "worst_victim_gap_ms": "aim ≤ 1,000",
    "not_answered_in_10s": "aim 0",
    "other_failures": "aim 0",
    "quoted_in_the_log": "aim 0",
    "worst_log_kib": "aim ≤ 64",
    "worst_growth_mib": "aim ≤ 512",
}


class Child:
    """A module of ours that runs in a process of its own, and is talked to line by line."""

    async def run(self, module: str, *options: str, log: IO[bytes] | None = None, **variables: str) -> None:
        """log: where its standard error goes; ours without."""
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=os.environ | variables,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout


class ServerProcess(Child):
    """The server under attack, started again when it dies."""

    def __init__(self, keys: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hostile-")
        self._key_file = Path(self._folder.name) / "keys"
        lines = [key_file_line(f"filler{number}", generate_key()) for number in range(NUM_KEYS - len(keys))]
        lines += [key_file_line(role, key, is_operator=role == "operator") for role, key in keys.items()]
        self._key_file.write_text("\n".join(lines) + "\n")
        self._key_file.chmod(0o600)
        self._log = Path(self._folder.name) / "log"
        self.num_deaths = 0
        self.port = 0

    def take_log(self) -> bytes:
        """What it has logged since the last call."""
        with self._log.open("rb") as log:
            log.seek(self._log_read)
            said = log.read()
        self._log_read += len(said)
        return said

    async def start(self) -> None:
        self._log_read = 0
        options = [f"--data-dir={self._folder.name}/data", f"--key-file={self._key_file}"]
        with self._log.open("wb") as log:
            await self.run("bench.live.peers.watched_server", *options, log=log)
        while line := await self.stdout.readline():
            if line.startswith(b"ready "):
                self.port = int(line.split()[1])
                return
        raise RuntimeError("the server did not start")

    async def facts(self) -> dict[str, Any] | None:
        """What the server says of itself since the last time; None if it died or does not answer."""
        try:
            self.stdin.write(b"\n")
            async with asyncio.timeout(CASE_LIMIT_S):
                line = await self.stdout.readline()
            return json.loads(line) if line else None
        except (ConnectionError, TimeoutError):
            return None

    async def replace(self) -> None:
        self.num_deaths += 1
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.stdin.close()
            try:
                async with asyncio.timeout(20):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()


class Victim(Child):
    """Somebody who streams, in a process of its own: what this one computes must not look like a pause of the server's."""

    def __init__(self, key: str) -> None:
        self._key = key

    async def start(self, port: int) -> None:
        await self.run("bench.live.peers.victim", KEY=self._key)
        self.follow(port)
        await asyncio.sleep(3.0)
        await self.take_gap_ms()

    def follow(self, port: int) -> None:
        """Stream from this server from now on."""
        self.stdin.write(f"{port}\n".encode())

    async def take_gap_ms(self) -> float:
        """The longest time without text since the last call; what is going on counts."""
        self.stdin.write(b"\n")
        return float(await self.stdout.readline())

    async def stop(self) -> None:
        self.process.kill()
        await self.process.wait()


@dataclass
class Result:
    """What one case came to."""

    case: Case
    outcome: Outcome
    elapsed_s: float
    gap_ms: float
    stall_ms: float
    work_ms: float
    rss_mib: float
    growth_mib: float
    log_kib: float
    is_quoted: bool
    is_dead: bool
    answers: list[str]

    @property
    def num_5xx(self) -> int:
        return sum(isinstance(each, int) and each >= 500 for each in self.outcome)

    @property
    def is_bad(self) -> bool:
        return any(each in self.case.bad for each in self.outcome)

    @property
    def is_late(self) -> bool:
        return "no answer" in self.outcome


def client_of(server: ServerProcess, key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        f"http://127.0.0.1:{server.port}",
        timeout=aiohttp.ClientTimeout(total=ANSWER_WITHIN_S * 3, sock_read=ANSWER_WITHIN_S),
        headers={"Authorization": f"Bearer {key}"},
        connector=aiohttp.TCPConnector(limit=0),
    )


async def attack(case: Case, server: ServerProcess, victim: Victim, keys: dict[str, str]) -> Result:
    await victim.take_gap_ms()
    before = await server.facts() or {"rss_bytes": 0}
    server.take_log()
    started_s = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            role: Attacker(await stack.enter_async_context(client_of(server, key)), server.port, key)
            for role, key in keys.items()
        }
        attacker = clients["attacker"]
        attacker.others = clients
        outcome: Outcome
        try:
            async with asyncio.timeout(CASE_LIMIT_S):
                outcome = await case.attack(attacker)
        except TimeoutError:
            outcome = ["no answer"]
        except (OSError, asyncio.IncompleteReadError) as error:
            outcome = [f"cut ({type(error).__name__})"]
    elapsed_s = time.monotonic() - started_s
    await asyncio.sleep(SETTLE_S)
    facts = await server.facts()
    gap_ms = await victim.take_gap_ms()
    said = server.take_log()
    if facts is None:
        await server.replace()
        victim.follow(server.port)
    return Result(
        case,
        outcome,
        elapsed_s,
        gap_ms,
        stall_ms=facts["worst_stall_ms"] if facts else 0.0,
        work_ms=facts["worst_work_ms"] if facts else 0.0,
        rss_mib=facts["rss_bytes"] / MIB if facts else 0.0,
        growth_mib=(facts["rss_bytes"] - before["rss_bytes"]) / MIB if facts else 0.0,
        log_kib=len(said) / 1024,
        is_quoted=attacker.word.encode() in said,
        is_dead=facts is None,
        answers=attacker.answers,
    )


def line_of(number: int, num_cases: int, result: Result) -> str:
    shown = ", ".join(sorted({str(each) for each in result.outcome}))
    marks = [
        word
        for word, is_so in (
            ("DIED", result.is_dead),
            ("5xx", result.num_5xx),
            ("BAD", result.is_bad),
            ("LATE", result.is_late),
            ("QUOTED", result.is_quoted),
        )
        if is_so
    ]
    return (
        f"  {number:>2}/{num_cases}  {result.case.name:<44} {shown:<22} {result.elapsed_s:5.1f} s  "
        f"gap {result.gap_ms:5.0f} ms  stall {result.stall_ms:5.0f} ms  work {result.work_ms:4.0f} ms  {result.rss_mib:5.0f} MiB  {' '.join(marks)}"
    )


async def run(cases: list[Case], is_verbose: bool) -> list[Result]:
    keys = {role: generate_key() for role in ROLES}
    server = ServerProcess(keys)
    print("starting the server", flush=True)
    await server.start()
    victim = Victim(keys["victim"])
    await victim.start(server.port)
    os.nice(10)  # an attacker has a machine of its own: this one's work must not take the server's
    results = []
    try:
        for number, case in enumerate(cases, 1):
            result = await attack(case, server, victim, keys)
            results.append(result)
            print(line_of(number, len(cases), result), flush=True)
            if is_verbose or result.num_5xx or result.is_bad:
                for answer in sorted(set(result.answers))[:20]:
                    print(f"        {answer[:200]}", flush=True)
    finally:
        await victim.stop()
        await server.stop()
    return results


def summary(results: list[Result]) -> dict[str, Any]:
    return {
        "cases": len(results),
        "process_deaths": sum(result.is_dead for result in results),
        "status_5xx": sum(result.num_5xx for result in results),
        "worst_loop_stall_ms": max(result.stall_ms for result in results),
        "worst_loop_work_ms": max(result.work_ms for result in results),
        "worst_victim_gap_ms": round(max(result.gap_ms for result in results)),
        "not_answered_in_10s": sum(result.is_late for result in results),
        "other_failures": sum(result.is_bad for result in results),
        "quoted_in_the_log": sum(result.is_quoted for result in results),
        "worst_log_kib": round(max(result.log_kib for result in results), 1),
        "worst_growth_mib": round(max(result.growth_mib for result in results)),
        "rss_mib": round(results[-1].rss_mib),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds these words")
    parser.add_argument("--verbose", action="store_true", help="show what the server answered")
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    cases = [case for case in CASES if args.only in case.name]
    results = asyncio.run(run(cases, args.verbose))
    found = summary(results)
    report("Hostile clients", figures(found, AIMS), found)


if __name__ == "__main__":
    main()
