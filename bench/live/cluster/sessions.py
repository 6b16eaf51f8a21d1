"""Two nodes behind one gateway: KV that goes from node to node, and what the way to another process adds to an answer."""

from __future__ import annotations

import statistics
import time
from typing import Any

import aiohttp

from bench.live.cluster.servers import Server, complete
from bench.live.peers.play import text
from overture_client.chat import ChatClient
from overture_client.chat_frames import Done

# Of a prompt, in cached tokens, for its KV to count as fetched. The last block and the new question are always computed.
HELD_SHARE = 0.8
MOVED_TOKENS, ANSWER_TOKENS = 2048, 16


async def moved(http: aiohttp.ClientSession, server: Server, reference: Server, num: int) -> dict[str, Any]:
    """Sessions go on after their node was drained, from its KV; as many new prompts of that length are computed. In turns, on the node that stays.

    peer_fetch_vs_recompute: medians of the time to the first token. tokens_identical: answers are those of one node that computed the whole prompt.
    """
    leaving = (await server.nodes(http))[0]["id"]
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
        if num_cached < HELD_SHARE * MOVED_TOKENS:
            raise RuntimeError(f"of session {number} only {num_cached} tokens were fetched")
        fetched_s.append(first_s)
        identical.append(answer == (await complete(http, reference, prompt, ANSWER_TOKENS))[1])
        fresh = text(MOVED_TOKENS + 32, "fresh", number)
        computed_s.append((await complete(http, server, fresh, 1))[0])
    await server.reopen(leaving)
    fetch_s, recompute_s = statistics.median(fetched_s), statistics.median(computed_s)
    return {
        "peer_fetch_vs_recompute": round(fetch_s / recompute_s, 3),
        "peer_fetch_ms": round(fetch_s * 1e3, 1),
        "recompute_ms": round(recompute_s * 1e3, 1),
        "num_moved": len(mine),
        "tokens_identical": all(identical),
    }


async def _steps(http: aiohttp.ClientSession, server: Server, node_id: str) -> int:
    return next(int(node["load"]["num_steps"]) for node in await server.nodes(http) if node["id"] == node_id)


async def ttft_added(one: Server, several: Server, num: int) -> dict[str, Any]:
    """Measure what nodes in other processes add to an answer of one token: the client's time less what the node itself took until then.

    Nodes of a machine share its cores, so their own times say nothing about the way between. The first two answers of each are not counted.
    """
    beyond_ms: dict[str, list[float]] = {"one": [], "several": []}
    async with ChatClient(one.url) as first, ChatClient(several.url) as second:
        for number in range(num + 2):
            for name, client in (("one", first), ("several", second)):
                beyond_ms[name].append(await _beyond_ms(client, f"{name} {number}"))
    alone, others = (found[2:] for found in beyond_ms.values())
    added = [b - a for a, b in zip(alone, others, strict=True)]
    medians = {"one": statistics.median(alone), "several": statistics.median(others)}
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
