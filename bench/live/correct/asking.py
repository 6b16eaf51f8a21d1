"""A server under test, and what it is asked over HTTP."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import Struct

from bench.live.correct.families import KV_TOKEN_BYTES, MAX_MODEL_LEN
from bench.live.correct.pictures import pictures_in
from bench.live.shared.serving import OvertureServer
from engine_bridge.protocol.node import ADVISORY_ENDS

BASE = "base"
ANSWER_TOKENS = 24
LONG_TOKENS = 600
"""Of a prompt: some of it lies outside of every window, and four of them fill the device of one rank."""
DEVICE_TOKENS = 2048
ADVISORY_S, MOST_TRIES = 10.0, 8
READY_S = 120.0
GREEDY = {"temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "return_token_ids": True}


class Answer(Struct, frozen=True):
    """A prompt and its answer in token ids.

    Attributes:
        num_cached: prompt tokens whose KV was reused.
        text: the answer's text, in a conversation.
        pictures: the PNGs that the prompt has, in their order.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    num_cached: int
    adapter: str = ""
    text: str = ""
    pictures: Sequence[bytes] = ()


class Refused(RuntimeError):
    """The server answered with an error."""


FIRST_FILLER = 90_000
"""The seeds of prompts that only take the device's blocks follow this one."""


def prompt_of(seed: int, num_tokens: int = LONG_TOKENS) -> list[int]:
    """A prompt of tokens that are letters, none of them special."""
    chosen = random.Random(seed)
    return [chosen.randrange(3, 250) for _ in range(num_tokens)]


class Asker:
    """Asks one server. pid: of its process."""

    def __init__(self, http: aiohttp.ClientSession, pid: int) -> None:
        self.http, self.pid = http, pid
        self._num_fillers = 0

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> dict[str, Any]:
        """The reply's JSON. Raises Refused."""
        async with self.http.request(method, path, json=body, headers=headers) as reply:
            if reply.status >= 300:
                raise Refused(f"{path}: {reply.status} {(await reply.text())[:300]}")
            found: dict[str, Any] = await reply.json() if reply.status != 204 else {}
            return found

    async def complete(
        self, prompt: Sequence[int], adapter: str = "", headers: Mapping[str, str] = {}, **fields: Any
    ) -> Answer:
        """Greedily. fields: more of the body."""
        body = GREEDY | {"model": adapter or BASE, "prompt": list(prompt)} | fields
        reply = await self.call("POST", "/v1/completions", body, **headers)
        return Answer(list(prompt), reply["choices"][0]["token_ids"], _num_cached(reply["usage"]), adapter)

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], adapter: str = "", session: str = "", **fields: Any
    ) -> Answer:
        """The next turn of a session, or a conversation of none."""
        body = GREEDY | {"model": adapter or BASE, "messages": list(messages)} | fields
        reply = await self.call(
            "POST", "/v1/chat/completions", body, **({"X-Session-Id": session} if session else {})
        )
        choice, num_cached = reply["choices"][0], _num_cached(reply["usage"])
        text, pictures = choice["message"]["content"], pictures_in(messages)
        return Answer(reply["prompt_token_ids"], choice["token_ids"], num_cached, adapter, text, pictures)

    async def announce(self, session: str, adapter: str = "") -> str:
        """Announce a session's next request until its history is on the device, or for ADVISORY_S. Returns the last state."""
        deadline_s, state = time.monotonic() + ADVISORY_S, ""
        for _ in range(MOST_TRIES):
            wanted = {"session_id": session, "model": adapter or BASE}
            made = await self.call("POST", "/v1/advisories", wanted)
            while state not in ADVISORY_ENDS and time.monotonic() < deadline_s:
                state = (await self.call("GET", f"/v1/advisories/{made['id']}"))["state"]
                if state == "warm":
                    return state
                await asyncio.sleep(0.05)
            # What no tier holds is computed while nothing else runs; an advisory may find it then.
            state = ""
            await asyncio.sleep(0.3)
        return state

    async def ready_nodes(self, num_nodes: int) -> list[str]:
        """Return the ids of the server's nodes, once as many are ready. Raises TimeoutError after READY_S."""
        async with asyncio.timeout(READY_S):
            while True:
                nodes = (await self.call("GET", "/v1/nodes"))["nodes"]
                ready = [node["id"] for node in nodes if node["state"] == "ready"]
                if len(ready) >= num_nodes:
                    return ready
                await asyncio.sleep(0.2)

    async def fill_device(self) -> None:
        """Have other prompts take all of the device's blocks: each of two ranks has as many bytes as one, and so more tokens."""
        [node, *_] = (await self.call("GET", "/v1/nodes"))["nodes"]
        num_tokens = node["load"]["num_kv_blocks"] * node["load"]["block_size"]
        for _ in range(num_tokens // LONG_TOKENS + 2):
            self._num_fillers += 1
            await self.complete(prompt_of(FIRST_FILLER + self._num_fillers), max_tokens=1)


def _num_cached(usage: Mapping[str, Any]) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


Serve = Callable[[Path, Sequence[str]], AbstractAsyncContextManager[Asker]]
"""Serves with these flags until the block ends; the folder is there for a log."""


@asynccontextmanager
async def in_a_process(folder: Path, flags: Sequence[str]) -> AsyncIterator[Asker]:
    """`overture serve` of this checkout."""
    with OvertureServer(folder / "server.log", *flags) as server:
        await asyncio.to_thread(server.wait, server.is_ready)
        async with session(server.url) as http:
            yield Asker(http, server.process.pid)


def session(url: str) -> aiohttp.ClientSession:
    """Return what asks the server at an address."""
    return aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120))


@asynccontextmanager
async def serving(
    model: Path,
    data: Path,
    *flags: str,
    adapters: Mapping[str, Path] = {},
    device_tokens: int = DEVICE_TOKENS,
    kv_token_bytes: int = KV_TOKEN_BYTES,
    dtype: str = "float32",
    serve: Serve = in_a_process,
) -> AsyncIterator[Asker]:
    """A server with a model, asked until the block ends. kv_token_bytes: of one token's KV in float32."""
    data.mkdir(exist_ok=True)  # noqa: ASYNC240 - a bench alone on its loop
    command = [f"--model={model}", f"--served-model-name={BASE}", f"--data-dir={data}", f"--dtype={dtype}"]
    command += ["--titles=first-words", f"--max-model-len={MAX_MODEL_LEN}", "--max-num-seqs=8"]
    command += ["--max-lora-rank=8", "--cpu-threads=1"]
    command += [f"--kv-cache-gib={device_tokens * kv_token_bytes / (1 << 30):.6f}"]
    command += ["--kv-host-gib=0.25", "--kv-disk-gib=0.25"]
    command += [f"--lora-module={name}={folder}" for name, folder in adapters.items()]
    async with serve(data, [*command, *flags]) as asker:
        yield asker
