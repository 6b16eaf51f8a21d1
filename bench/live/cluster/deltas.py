"""What the wire costs: 16 answers, a token each 20 ms, from a node in another process over TCP, and from the same node in this process.

    python -m bench.live.cluster.deltas serve    (the other process: says its port, ends with its standard input)

The node only keeps time; frames, sockets, proofs and merging are the real ones.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from bench.live.peers.client import ROOT
from engine_bridge.cluster.link import NodeLink
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.cluster.server import NodeServer
from engine_bridge.protocol.node import Delta, GenerateRequest, Progress, RequestId

HOST, TOKEN = "127.0.0.1", b"a token of this bench's"
NUM_STREAMS, EVERY_S = 16, 0.02


class Ticker:
    """A node that says a token each EVERY_S. Its text is the time at which it did, on the clock that all processes share."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        nothing: dict[str, Any] = dict(model_name="ticker", max_model_len=1, num_steps=0, num_rebuilds=0)
        for name in (
            "kv_tiers",
            "adapter_stats",
            "tokenizer_stats",
            "grammar_stats",
            "scheduling_stats",
            "facts",
        ):
            nothing[name] = lambda: None
        self.__dict__.update(nothing, progress=Progress("ready", "ready", 0.0), adapters=list)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        for number in range(self._num_tokens):
            await asyncio.sleep(EVERY_S)
            is_last = number == self._num_tokens - 1
            yield Delta(repr(time.monotonic()), (number,), "length" if is_last else None)


async def _listen(node: Any, tell: Any) -> None:
    server = NodeServer(node, "ticker", TOKEN)
    listening = await asyncio.get_running_loop().create_server(server.connection, HOST, 0)
    tell(listening.sockets[0].getsockname()[1])
    await asyncio.to_thread(sys.stdin.read)


async def _read(node: Any, num_deltas: list[int], latency_ms: list[float]) -> None:
    async def one(number: int) -> None:
        async for delta in node.generate(GenerateRequest(request_id=RequestId(f"stream-{number}"))):
            num_deltas[0] += 1
            latency_ms.append((time.monotonic() - float(delta.text)) * 1e3)

    await asyncio.gather(*(one(number) for number in range(NUM_STREAMS)))


async def measure(num_tokens: int) -> dict[str, Any]:
    """delta_overhead_us: processor time of both processes for each delta, less what the node and its reader take in one."""
    here = [0], list[float]()
    cpu_s = time.process_time()
    await _read(Ticker(num_tokens), *here)
    alone_s = time.process_time() - cpu_s
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.live.cluster.deltas", "serve", str(num_tokens)),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        node = RemoteNode("ticker")
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(lambda: NodeLink(TOKEN, node.take_report), HOST, port)
        await link.greeted
        node.attach(link)
        there = [0], list[float]()
        cpu_s, theirs_s = time.process_time(), _cpu_s(process.pid)
        await _read(node, *there)
        both_s = time.process_time() - cpu_s + _cpu_s(process.pid) - theirs_s
        link.abort()
    finally:
        process.stdin.close()
        await process.wait()
    return {
        "delta_overhead_us": round((both_s - alone_s) / there[0][0] * 1e6, 1),
        "delta_latency_ms": round(statistics.median(there[1]) - statistics.median(here[1]), 3),
        "num_deltas": there[0][0],
    }


def _cpu_s(pid: int) -> float:
    import psutil

    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def main() -> None:
    if sys.argv[1:2] != ["serve"]:
        sys.exit(__doc__)
    asyncio.run(_listen(Ticker(int(sys.argv[2])), lambda port: print(port, flush=True)))


if __name__ == "__main__":
    main()
