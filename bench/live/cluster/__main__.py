"""Two nodes behind one gateway against one engine in the gateway's process; every node has the same device and host memory.

    python -m bench.live.cluster [--part NAME ...] [--quick]

Model: bench.live.shared.models, 75 M weights; no disk tier. Parts, in this order:
  moved     a node is drained; the time to the first token of its sessions of 2,048 tokens on the other node, which fetches their KV, over new prompts
            of that length there; answers against those of one node that computed everything
  ttft      what the way to a node in another process adds to the time to the first token
  routing   32 people, a few of whom ask half of all questions, on one node, when another joins: with advisories, without, and sticky. They ask
            1.5 times what the node answers, which is measured first

The last line is JSON.
"""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from bench.live.cluster import routing, sessions
from bench.live.cluster.servers import Server
from bench.live.shared.report import Progress, figures, options, report

PARTS = ("moved", "ttft", "routing")
AIMS = {
    "peer_fetch_vs_recompute": "aim ≤ 0.1",
    "tokens_identical": "aim true",
    "ttft_added_ms": "aim ≤ 3",
    "advised_vs_sticky_ttft_p99": "aim ≤ 0.7",
    "imbalance_max_vs_median": "aim ≤ 1.2",
}


async def measure(parts: list[str], is_quick: bool) -> dict[str, Any]:
    """Start both servers and measure these parts, one after the other."""
    progress, result = Progress(), dict[str, Any]()
    timeout = aiohttp.ClientTimeout(total=120)
    with tempfile.TemporaryDirectory(prefix="ov-") as folder:
        async with aiohttp.ClientSession(timeout=timeout) as http:
            with Server("one", Path(folder), 1) as one, Server("two", Path(folder), 2) as two:
                await asyncio.gather(one.until_ready(http), two.until_ready(http))
                progress.say("one node and two nodes are ready")
                plays = {
                    "moved": partial(sessions.moved, http, two, one, 3 if is_quick else 8),
                    "ttft": partial(sessions.ttft_added, one, two, 40 if is_quick else 200),
                    "routing": partial(routing.joined, http, two, is_quick=is_quick),
                }
                for part in parts:
                    found = await plays[part]()
                    result |= found
                    progress.say(f"{part}: {found}")
    return result


def main() -> None:
    """Run the bench from the command line."""
    parser = options(__doc__, quick="fewer repeats: about four minutes")
    parser.add_argument("--part", action="append", choices=PARTS, help="only these; may be repeated")
    args = parser.parse_args()
    found = asyncio.run(measure([part for part in PARTS if part in (args.part or PARTS)], args.quick))
    result = {"bench": "cluster", "quick": args.quick} | found
    report(
        "Two nodes against one", figures({name: found[name] for name in AIMS if name in found}, AIMS), result
    )


if __name__ == "__main__":
    main()
