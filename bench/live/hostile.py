"""Attacks on a running server, one after the other, while somebody else streams: what does each cost the others?

    python -m bench.live.hostile [--only WORDS] [--verbose]

The server is a process of its own with the demo model and two keys; the attacker has one, the victim the other. The last line of the output is JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.live.attacks.attacker import Attacker, Outcome
from bench.live.attacks.cases import CASES, Case
from bench.live.report import figures, options, report

ANSWER_WITHIN_S = 10.0
CASE_LIMIT_S = 90.0
SETTLE_S = 0.5
AIMS = {
    "process_deaths": "aim 0",
    "status_5xx": "aim 0",
    "worst_loop_stall_ms": "aim ≤ 100",
    "worst_victim_gap_ms": "aim ≤ 1,000",
    "not_answered_in_10s": "aim 0",
    "other_failures": "aim 0",
}


class Child:
    """A module of ours that runs in a process of its own, and is talked to line by line."""

    async def run(self, module: str, *options: str, **variables: str) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | variables,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout


class ServerProcess(Child):
    """The server under attack, started again when it dies."""

    def __init__(self, keys: list[str]) -> None:
        self._keys = keys
        self._folder = tempfile.TemporaryDirectory(prefix="hostile-")
        self.num_deaths = 0
        self.port = 0

    async def start(self) -> None:
        options = [f"--data-dir={self._folder.name}", *(f"--key={key}" for key in self._keys)]
        await self.run("bench.live.peers.watched_server", *options)
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
    rss_mib: float
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


async def attack(case: Case, server: ServerProcess, victim: Victim, key: str) -> Result:
    await victim.take_gap_ms()
    await server.facts()
    timeout = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S * 3, sock_read=ANSWER_WITHIN_S)
    headers = {"Authorization": f"Bearer {key}"}
    connector = aiohttp.TCPConnector(limit=0)
    started_s = time.monotonic()
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{server.port}", timeout=timeout, headers=headers, connector=connector
    ) as http:
        attacker = Attacker(http, server.port, key)
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
    if facts is None:
        await server.replace()
        victim.follow(server.port)
    return Result(
        case,
        outcome,
        elapsed_s,
        gap_ms,
        stall_ms=facts["worst_stall_ms"] if facts else 0.0,
        rss_mib=facts["rss_bytes"] / (1 << 20) if facts else 0.0,
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
        )
        if is_so
    ]
    return (
        f"  {number:>2}/{num_cases}  {result.case.name:<44} {shown:<22} {result.elapsed_s:5.1f} s  "
        f"gap {result.gap_ms:5.0f} ms  stall {result.stall_ms:5.0f} ms  {result.rss_mib:5.0f} MiB  {' '.join(marks)}"
    )


async def run(cases: list[Case], is_verbose: bool) -> list[Result]:
    keys = [f"ov-{secrets.token_urlsafe(32)}" for _ in range(2)]
    server = ServerProcess(keys)
    print("starting the server", flush=True)
    await server.start()
    victim = Victim(keys[1])
    await victim.start(server.port)
    os.nice(10)  # an attacker has a machine of its own: this one's work must not take the server's
    results = []
    try:
        for number, case in enumerate(cases, 1):
            result = await attack(case, server, victim, keys[0])
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
        "worst_victim_gap_ms": round(max(result.gap_ms for result in results)),
        "not_answered_in_10s": sum(result.is_late for result in results),
        "other_failures": sum(result.is_bad for result in results),
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
