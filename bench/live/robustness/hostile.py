"""Attacks on a running server, one after the other, while somebody else streams: what does each cost the others?

    python -m bench.live.robustness.hostile [--only WORDS]

The server is a process of its own with the demo model and 5,000 keys, of which the attacker has one and the victim, who streams, another. Bodies,
paths and heads that are only malformed are not among the attacks: `make fuzz` sends these. That one client's grammars, adapters and texts show in no
other's answers and in no log is held by tests. The last line of the output is JSON.
"""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

import bench.live.robustness.attacks  # noqa: F401 - enters the cases
from bench.live.robustness.attacks.attacker import CASES, Attacker, Case, Outcome
from bench.live.robustness.server import Server
from bench.live.robustness.victim import Victim
from bench.live.shared.report import figures, options, report
from gateway.access.auth import generate_key
from gateway.access.key_file import key_file_line

ANSWER_WITHIN_S = 10.0
CASE_LIMIT_S = 90.0
SETTLE_S, FIRST_TEXT_S = 0.5, 3.0
NUM_KEYS = 5000
ROLES = ("attacker", "victim")
FLAGS = "--kv-host-gib 0.25 --kv-disk-gib 0.5 --drain-timeout-s 2 --draft-prefill --log-level warning".split()
NO_ANSWER = "no answer"
AIMS = {
    "process_deaths": "aim 0",
    "status_5xx": "aim 0",
    "worst_loop_stall_ms": "aim ≤ 100",
    "worst_loop_work_ms": "aim ≤ 100: of the stalls, what the loop's own thread computed",
    "worst_victim_gap_ms": "aim ≤ 1,000",
    "not_answered_in_10s": "aim 0",
    "other_failures": "aim 0",
    "worst_log_kib": "aim ≤ 64",
    "worst_growth_mib": "aim ≤ 512",
}
COUNTS = ("process_deaths", "status_5xx", "not_answered_in_10s", "other_failures")
"""Figures that are counted over the cases; of the others the worst is told."""


def client_of(server: Server, key: str) -> aiohttp.ClientSession:
    """Return an HTTP session that sends this key to the server."""
    return aiohttp.ClientSession(
        server.url,
        timeout=aiohttp.ClientTimeout(total=ANSWER_WITHIN_S * 3, sock_read=ANSWER_WITHIN_S),
        headers={"Authorization": f"Bearer {key}"},
        connector=aiohttp.TCPConnector(limit=0),
    )


async def play(case: Case, attacker: Attacker) -> Outcome:
    """Run one case; return what came of it."""
    try:
        async with asyncio.timeout(CASE_LIMIT_S):
            return await case.attack(attacker)
    except TimeoutError:
        return [NO_ANSWER]
    except (OSError, asyncio.IncompleteReadError) as error:
        return [f"cut ({type(error).__name__})"]


async def attack(case: Case, server: Server, victim: Victim, key: str) -> dict[str, float]:
    """Run one case, print its line, and start another server if this one died."""
    before = await server.held()
    server.take_log(), server.take_stalls(), victim.take_gap_ms()
    started_s = time.monotonic()
    async with client_of(server, key) as http:
        attacker = Attacker(http, server.port, key)
        outcome = await play(case, attacker)
    elapsed_s = time.monotonic() - started_s
    await asyncio.sleep(SETTLE_S)
    is_alive = await server.is_alive(CASE_LIMIT_S)
    gap_ms, said, (stall_ms, work_ms) = victim.take_gap_ms(), server.take_log(), server.take_stalls()
    after = await server.held() if is_alive else before
    if not is_alive:
        await server.kill()
        await server.start()
    result = {
        "process_deaths": not is_alive,
        "status_5xx": sum(isinstance(each, int) and each >= 500 for each in outcome),
        "worst_loop_stall_ms": stall_ms,
        "worst_loop_work_ms": work_ms,
        "worst_victim_gap_ms": round(gap_ms),
        "not_answered_in_10s": NO_ANSWER in outcome,
        "other_failures": any(each in case.bad for each in outcome),
        "worst_log_kib": round(len(said) / 1024, 1),
        "worst_growth_mib": round(after.rss_mib - before.rss_mib),
    }
    marks = [name for name in COUNTS if result[name]]
    print(
        f"{case.name:<44} {', '.join(sorted({str(each) for each in outcome})):<22} {elapsed_s:5.1f} s  gap {gap_ms:5.0f} ms  "
        f"stall {stall_ms:5.0f} ms  work {work_ms:4.0f} ms  {after.rss_mib:5.0f} MiB  {' '.join(marks)}",
        flush=True,
    )
    for answer in sorted(set(attacker.answers))[:20] if marks else ():
        print(f"        {answer[:200]}", flush=True)
    return result


def server_in(folder: Path, keys: dict[str, str]) -> Server:
    """Return a server that knows these keys by their role, and thousands of others."""
    lines = [key_file_line(f"filler{number}", generate_key()) for number in range(NUM_KEYS - len(keys))]
    lines += [key_file_line(role, key) for role, key in keys.items()]
    key_file = folder / "keys"
    key_file.write_text("\n".join(lines) + "\n")
    key_file.chmod(0o600)
    return Server(folder, f"--data-dir={folder}/data", f"--api-key-file={key_file}", *FLAGS)


async def run(cases: list[Case]) -> dict[str, Any]:
    """Attack a new server with all cases, one after the other; return the figures of all."""
    keys = {role: generate_key() for role in ROLES}
    results: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        server = server_in(Path(folder), keys)
        try:
            print("starting the server", flush=True)
            await server.start()
            async with Victim(server.url, keys["victim"]) as victim:
                await asyncio.sleep(FIRST_TEXT_S)
                # The attacker would run on another machine: its work must not take the server's cores.
                os.nice(10)
                for number, case in enumerate(cases, 1):
                    print(f"  {number:>2}/{len(cases)}  ", end="")
                    results.append(await attack(case, server, victim, keys["attacker"]))
        finally:
            server.close()
    found = {name: (sum if name in COUNTS else max)(each[name] for each in results) for name in AIMS}
    return {"cases": len(results)} | found


def main() -> None:
    """Run the bench from the command line."""
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds these words")
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = asyncio.run(run([case for case in CASES if args.only in case.name]))
    report("Hostile clients", figures(found, AIMS), found)


if __name__ == "__main__":
    main()
