"""The servers of the cluster bench: one engine in its process, or several nodes, each with the same memory; and what their nodes say."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

from bench.live.models import ModelShape, model_folder
from bench.live.peers.client import QUIET_OPENMP
from bench.live.report import ROOT
from bench.live.serving import ServerProcess
from bench.live.soak.server import free_port
from overture_client import nodes

START_TIMEOUT_S = 300.0
MODEL = "cluster-bench"
SHAPE = ModelShape(max_model_len=4096)
# A node's memory in tokens is what sessions are counted by: some 10,900 on the device, as many in host memory. No disk: it would hold everything.
MEMORY_GIB = 0.25
# Nobody asks for an adapter here: their buffers, made for eight of rank 128, would take five gigabytes of each process.
SMALL = "--max-num-seqs 16 --max-loras 1 --max-lora-rank 8 --adapter-host-gib 0.125".split()


class Server(ServerProcess):
    """One gateway of this checkout, until the block ends.

    Args:
        num_nodes: 1: the engine in the gateway's process.
    """

    def __init__(self, name: str, folder: Path, num_nodes: int, flags: tuple[str, ...] = ()) -> None:
        self.name, self.num_nodes, port = name, num_nodes, free_port()
        command = [sys.executable, "-m", "gateway.cli", "serve", "--port", str(port)]
        command += ["--model", str(model_folder(SHAPE)), "--served-model-name", MODEL, "--dtype", SHAPE.dtype]
        command += ["--max-model-len", str(SHAPE.max_model_len), "--data-dir", str(folder / name)]
        # What is said is a machine's: nodes share it.
        memory_gib = str(MEMORY_GIB * num_nodes)
        command += ["--kv-cache-gib", memory_gib, "--kv-host-gib", memory_gib, "--kv-disk-gib", "0"]
        command += SMALL
        command += ["--nodes", str(num_nodes), *flags] if num_nodes > 1 else flags
        environ = os.environ | QUIET_OPENMP | {"PYTHONPATH": str(ROOT)}
        super().__init__(command, port, folder / f"{name}.log", ROOT, environ)

    async def until_ready(self, http: aiohttp.ClientSession) -> None:
        """All nodes. Raises RuntimeError."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                states = [node["state"] for node in await self.nodes(http)]
                if states.count("ready") == self.num_nodes:
                    return
            await asyncio.sleep(0.2)
        raise RuntimeError(f"{self.name} did not start:\n{self._log.read_text(errors='replace')[-3000:]}")

    async def nodes(self, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """As `GET /v1/nodes` has them; none while nobody answers there."""
        async with http.get(f"{self.url}/v1/nodes") as reply:
            found: list[dict[str, Any]] = (await reply.json())["nodes"] if reply.status == 200 else []
            return found

    async def drain(self, node_id: str) -> None:
        """As `overture nodes drain` does. Raises NodesError."""
        await asyncio.to_thread(self._changes.drain, node_id)

    async def reopen(self, node_id: str) -> None:
        await asyncio.to_thread(self._changes.reopen, node_id)

    async def restart(self, *node_ids: str) -> None:
        """One after the other, as `overture nodes restart` does. Raises NodesError."""
        await asyncio.to_thread(self._changes.restart, node_ids)

    @property
    def _changes(self) -> nodes.Changes:
        return nodes.Changes(nodes.Server(self.url), {}, START_TIMEOUT_S, lambda line: None)

    def engine_processes(self) -> list[psutil.Process]:
        """Those of nodes, largest first: each has a model in it."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = sorted(children, key=lambda each: each.memory_info().rss, reverse=True)
        return found[: self.num_nodes]


def num_requests(node: dict[str, Any]) -> int:
    """Running and waiting; none while nobody knows."""
    load = node["load"] or {"num_running": 0, "num_waiting": 0}
    return int(load["num_running"] + load["num_waiting"])


async def complete(
    http: aiohttp.ClientSession, server: Server, token_ids: list[int], num_tokens: int, session_id: str = ""
) -> tuple[float, list[int], int]:
    """Seconds to the first token, the answer's token ids, and how many of the prompt's tokens were cached. Raises RuntimeError."""
    body: dict[str, Any] = {"model": MODEL, "prompt": token_ids, "max_tokens": num_tokens, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True}
    headers = {"X-Session-Id": session_id} if session_id else {}
    began_s, first_s, answer, num_cached = time.perf_counter(), 0.0, list[int](), 0
    async with http.post(f"{server.url}/v1/completions", json=body, headers=headers) as reply:
        if reply.status != 200:
            raise RuntimeError(f"{server.name}: {reply.status} {await reply.text()}")
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = orjson.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{server.name}: {event['error']}")
            if event["choices"]:
                first_s = first_s or time.perf_counter() - began_s
                answer += event["choices"][0].get("token_ids") or []
            if event.get("usage"):
                num_cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return first_s, answer, num_cached
