"""What two nodes hold and move: sessions whose KV stays, KV that goes from node to node, and what a token costs on its way to the gateway."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import aiohttp

from bench.live.cluster.servers import Server, complete
from bench.live.peers.play import text
from overture_client.chat import ChatClient
from overture_client.chat_frames import Done

# More sessions than a node has memory for, which is 21.
SESSION_TOKENS, SESSIONS_A_NODE, ENOUGH_MISSES = 512, 28, 4
# Of a prompt, in cached tokens, for its session to count as held. The last block and the new question are always computed.
HELD_SHARE = 0.8
MOVED_TOKENS, ANSWER_TOKENS = 2048, 16


async def num_held(http: aiohttp.ClientSession, server: Server) -> int:
    """Sessions are begun, as many at a time as there are nodes. How many go on from KV: the last one first, until several in a row do not."""
    num = SESSIONS_A_NODE * server.num_nodes
    prompts = [text(SESSION_TOKENS, "held", number) for number in range(num)]
    for first in range(0, num, server.num_nodes):
        numbers = range(first, first + server.num_nodes)
        await asyncio.gather(*(complete(http, server, prompts[n], 1, f"held-{n}") for n in numbers))
    found, num_misses = 0, 0
    for number in reversed(range(num)):
        prompt = prompts[number] + text(8, "more", number)
        _, _, num_cached = await complete(http, server, prompt, 1, f"held-{number}")
        is_held = num_cached >= HELD_SHARE * SESSION_TOKENS
        found += is_held
        num_misses = 0 if is_held else num_misses + 1
        if num_misses == ENOUGH_MISSES:
            break
    return found


async def moved(http: aiohttp.ClientSession, server: Server, reference: Server, num: int) -> dict[str, Any]:
    """Sessions go on after their node was drained, from its KV; as many new prompts of that length are computed. In turns, on the node that stays.

    peer_fetch_vs_recompute: medians of the time to the first token. tokens_identical: answers are those of one node that computed the whole prompt.
    """
    leaving, staying = [node["id"] for node in await server.nodes(http)]
    mine: list[int] = []
    for number in range(4 * num):
        before = await _steps(http, server, leaving)
        await complete(http, server, text(MOVED_TOKENS, "moved", number), 1, f"moved-{number}")
        if await _steps(http, server, leaving) > before:
            mine.append(number)
        if len(mine) == num:
            break
    await server.drain(leaving)
    fetched_s, computed_s, identical = [], [], []
    for number in mine:
        prompt = text(MOVED_TOKENS, "moved", number) + text(32, "turn", number)
        first_s, answer, num_cached = await complete(http, server, prompt, ANSWER_TOKENS, f"moved-{number}")
        fetched_s.append(first_s if num_cached >= HELD_SHARE * MOVED_TOKENS else float("inf"))
        identical.append(answer == (await complete(http, reference, prompt, ANSWER_TOKENS))[1])
        fresh = text(MOVED_TOKENS + 32, "fresh", number)
        computed_s.append((await complete(http, server, fresh, 1))[0])
    await server.reopen(leaving)
    return {
        "peer_fetch_vs_recompute": _ratio(fetched_s, computed_s),
        "peer_fetch_ms": _ms(fetched_s),
        "recompute_ms": _ms(computed_s),
        "num_moved": len(mine),
        "tokens_identical": bool(identical) and all(identical),
        "stayed_on": staying,
    }


async def _steps(http: aiohttp.ClientSession, server: Server, node_id: str) -> int:
    return next(int(node["load"]["num_steps"]) for node in await server.nodes(http) if node["id"] == node_id)


def _ratio(some: list[float], others: list[float]) -> float | None:
    found = statistics.median(some) / statistics.median(others) if some and others else float("inf")
    return round(found, 3) if found != float("inf") else None


def _ms(seconds: list[float]) -> float | None:
    found = statistics.median(seconds) if seconds else float("inf")
    return round(found * 1e3, 1) if found != float("inf") else None


async def ttft_added(one: Server, several: Server, num: int) -> dict[str, Any]:
    """What nodes in other processes add to an answer of one token: the client's time less what the node itself took until then.

    Nodes of a machine share its cores, so their own times say nothing about the way between.
    """
    beyond: dict[str, list[float]] = {"one": [], "several": []}
    async with ChatClient(one.url) as first, ChatClient(several.url) as second:
        for number in range(num + 2):
            for name, client in (("one", first), ("several", second)):
                found = await _beyond_ms(client, f"{name} {number}")
                if number >= 2:
                    beyond[name].append(found)
    medians = {name: statistics.median(found) for name, found in beyond.items()}
    added = [b - a for a, b in zip(beyond["one"], beyond["several"], strict=True)]
    return {
        "ttft_added_ms": round(statistics.median(added), 2),
        "ttft_beyond_node_ms": {name: round(found, 2) for name, found in medians.items()},
    }


async def _beyond_ms(client: ChatClient, content: str) -> float:
    began_s = time.perf_counter()
    # One token: it may be no whole character, so that its end is the first that is heard of it.
    async for event in client.ask(content, sampling={"max_tokens": 1, "temperature": 0, "ignore_eos": True}):
        if isinstance(event, Done):
            return (time.perf_counter() - began_s) * 1e3 - (event.timings.ttft_ms or 0.0)
    raise RuntimeError("an answer without an end")
