"""Two nodes behind one gateway against one engine in the gateway's process; every node has the same device and host memory.

    python -m bench.live.cluster [--part NAME ...] [--quick]

Model: bench.live.models, 75 M weights; no disk tier. Parts, in this order:
  held      how many sessions of 512 tokens go on from KV on two nodes, over one
  moved     a node is drained; the time to the first token of its sessions of 2,048 tokens on the other node, which fetches their KV, over new prompts
            of that length there; answers against those of one node that computed everything
  deltas    processor time that the wire costs for each delta, at both ends (bench.live.cluster.deltas)
  ttft      what the way to a node in another process adds to the time to the first token
  kill      kill -9 of a node under twelve conversations: each question is asked until it is answered
  drain     a node is drained under the same, and comes back
  rolling   all nodes are restarted under the same
  routing   32 people, a few of whom ask half of all questions, on one node, when another joins: with advisories, without, and sticky. They ask
            1.5 times what the node answers, which is measured first; without --quick also 0.75 times
  even      the same people on two nodes that are there from the beginning; not with --quick, unless named

The last line is JSON.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

from bench.live.cluster import deltas, failures, routing, sessions
from bench.live.cluster.servers import Server
from bench.live.report import Progress, figures, options, report

PARTS = ("held", "moved", "deltas", "ttft", "kill", "drain", "rolling", "routing", "even")
AIMS = {
    "sessions_held_ratio": "aim ≥ 1.8",
    "peer_fetch_vs_recompute": "aim ≤ 0.1",
    "tokens_identical": "aim true",
    "delta_overhead_us": "aim ≤ 150",
    "ttft_added_ms": "aim ≤ 3",
    "kill_lost_turns": "aim 0",
    "kill_answers_twice": "aim 0",
    "drain_failed": "aim 0",
    "rolling_restart_failed": "aim 0",
    "advised_vs_sticky_ttft_p99": "aim ≤ 0.7",
    "imbalance_max_vs_median": "aim ≤ 1.2",
    "easy_advised_vs_sticky_ttft_p99": "aim ≤ 1",
    "even_advised_vs_unannounced_ttft_p99": "aim ≤ 1",
}


async def run_part(
    part: str, http: aiohttp.ClientSession, one: Server, two: Server, is_quick: bool
) -> dict[str, Any]:
    match part:
        case "held":
            held = {each.name: await sessions.num_held(http, each) for each in (one, two)}
            return {"sessions_held_ratio": round(held["two"] / max(held["one"], 1), 2), "sessions_held": held}
        case "moved":
            return await sessions.moved(http, two, one, 3 if is_quick else 8)
        case "deltas":
            return await deltas.measure(300 if is_quick else 1500)
        case "ttft":
            return await sessions.ttft_added(one, two, 40 if is_quick else 200)
        case "kill":
            return await failures.kill(http, two)
        case "drain":
            return await failures.drain(http, two)
        case "rolling":
            return await failures.rolling_restart(http, two)
        case "routing":
            return await routing.joined(http, two, *((2, 25.0) if is_quick else (4, 45.0)), is_quick=is_quick)
        case _:
            return await routing.even(http, two, *((2, 30.0) if is_quick else (4, 75.0)))


async def measure(parts: list[str], is_quick: bool) -> dict[str, Any]:
    progress, result = Progress(), dict[str, Any]()
    timeout = aiohttp.ClientTimeout(total=120)
    with tempfile.TemporaryDirectory(prefix="ov-") as folder:
        async with aiohttp.ClientSession(timeout=timeout) as http:
            with Server("one", Path(folder), 1) as one, Server("two", Path(folder), 2) as two:
                await asyncio.gather(one.until_ready(http), two.until_ready(http))
                progress.say("one node and two nodes are ready")
                for part in parts:
                    found = await run_part(part, http, one, two, is_quick)
                    result |= found
                    progress.say(f"{part}: {found}")
    return result


def main() -> None:
    parser = options(__doc__, quick="fewer repeats: about eight minutes")
    parser.add_argument("--part", action="append", choices=PARTS, help="only these; may be repeated")
    args = parser.parse_args()
    wanted = args.part or (PARTS[:-1] if args.quick else PARTS)
    found = asyncio.run(measure([part for part in PARTS if part in wanted], args.quick))
    result = {"bench": "cluster", "quick": args.quick} | found
    rows = figures({name: value for name, value in result.items() if name in AIMS}, AIMS)
    report("Two nodes against one", rows, result)


if __name__ == "__main__":
    main()
