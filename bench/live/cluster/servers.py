"""The servers of the cluster bench: one engine in its process, or several nodes, each with the same memory; and what their nodes say."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import aiohttp

from bench.live.shared.asking import streamed
from bench.live.shared.models import ModelShape, model_folder
from bench.live.shared.serving import QUIET_OPENMP, OvertureServer, ServerFailed
from overture_client import nodes

START_TIMEOUT_S = 300.0
MODEL = "cluster-bench"
SHAPE = ModelShape(max_model_len=4096)
# A node's memory in tokens is what sessions are counted by: some 10,900 on the device, as many in host memory. No disk: it would hold everything.
MEMORY_GIB = 0.25
# No request names an adapter here; buffers for eight adapters of rank 128 would take five gigabytes of each process.
SMALL = "--max-num-seqs 16 --max-loras 1 --max-lora-rank 8 --adapter-host-gib 0.125".split()


class Server(OvertureServer):
    """One gateway of this checkout with nodes on this machine, until the block ends. num_nodes: 1 for the engine in the gateway's own process."""

    def __init__(self, name: str, folder: Path, num_nodes: int) -> None:
        self.name, self.num_nodes = name, num_nodes
        command = ["--model", str(model_folder(SHAPE)), "--served-model-name", MODEL, "--dtype", SHAPE.dtype]
        command += ["--max-model-len", str(SHAPE.max_model_len), "--data-dir", str(folder / name)]
        # These flags are for the whole machine, whose nodes share the memory.
        memory_gib = str(MEMORY_GIB * num_nodes)
        command += ["--kv-cache-gib", memory_gib, "--kv-host-gib", memory_gib, "--kv-disk-gib", "0"]
        command += SMALL
        command += ["--nodes", str(num_nodes)] if num_nodes > 1 else []
        super().__init__(folder / f"{name}.log", *command, **QUIET_OPENMP)

    async def until_ready(self, http: aiohttp.ClientSession) -> None:
        """Return once all nodes are ready. Raises ServerFailed if the server ends or takes longer than START_TIMEOUT_S."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                states = [node["state"] for node in await self.nodes(http)]
                if states.count("ready") == self.num_nodes:
                    return
            await asyncio.sleep(0.2)
        raise ServerFailed(f"{self.name} did not start:\n{self.log_tail()}")

    async def nodes(self, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """Return the nodes as `GET /v1/nodes` describes them; an empty list while the server does not answer."""
        async with http.get(f"{self.url}/v1/nodes") as reply:
            found: list[dict[str, Any]] = (await reply.json())["nodes"] if reply.status == 200 else []
            return found

    async def drain(self, node_id: str) -> None:
        """Drain a node, as `overture nodes drain` does. Raises NodesError."""
        await asyncio.to_thread(self._changes.drain, node_id)

    async def reopen(self, node_id: str) -> None:
        """Reopen a node, as `overture nodes reopen` does. Raises NodesError."""
        await asyncio.to_thread(self._changes.reopen, node_id)

    @property
    def _changes(self) -> nodes.Changes:
        return nodes.Changes(nodes.Server(self.url), {}, START_TIMEOUT_S, lambda line: None)


def num_requests(node: dict[str, Any]) -> int:
    """Return the number of a node's running and waiting requests; 0 while its load is unknown."""
    load = node["load"] or {"num_running": 0, "num_waiting": 0}
    return int(load["num_running"] + load["num_waiting"])


async def complete(
    http: aiohttp.ClientSession, server: Server, token_ids: list[int], num_tokens: int, session_id: str = ""
) -> tuple[float, list[int], int]:
    """Return the seconds to the first token, the answer's token ids, and how many of the prompt's tokens were cached. Raises RuntimeError."""
    body = {"model": MODEL, "prompt": token_ids, "max_tokens": num_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    headers = {"X-Session-Id": session_id} if session_id else {}
    answer = await streamed(http, f"{server.url}/v1/completions", body, headers)
    return answer.ttft_s, answer.token_ids, answer.num_cached
