"""Nodes that Ray places, as a user runs them: both answer, one that is killed comes back under its name, and nothing outlives the gateway."""

from __future__ import annotations

import asyncio
import os
import select
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.conftest import settle, told
from tests.integration.processes import output_until, serving
from tests.ports import free_port

from .facts import CHAT, Http

PATIENCE_S = 60.0
NUM_SHORT, SHORT_TOKENS = 4, 24
STORY: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me a long story."}], "temperature": 0}


async def nodes_of(http: Http) -> dict[str, Any]:
    """Each node's status, by its name."""
    return {node["id"]: node for node in (await told(http.get("/v1/nodes")))["nodes"]}


async def until_ready(http: Http, name: str, *, other_than: str = "") -> None:
    """Until a node takes requests; other_than: the incarnation that is not meant."""

    async def is_ready() -> bool:
        node = (await nodes_of(http))[name]
        return node["state"] == "ready" and node["incarnation"] != other_than

    await settle(is_ready, 4 * PATIENCE_S)


async def busy_node(http: Http) -> dict[str, Any]:
    """The one that works on the endless answer: it has given more tokens than all short ones had, whose count may come late."""
    before = await nodes_of(http)

    async def look() -> Any:
        for name, node in (await nodes_of(http)).items():
            num_tokens = node["load"]["num_answer_tokens"] - before[name]["load"]["num_answer_tokens"]
            if num_tokens > NUM_SHORT * SHORT_TOKENS:
                return node
        return None

    return await settle(look)


async def story(http: Http) -> str:
    reply = await told(http.post(CHAT, json=STORY | {"max_tokens": SHORT_TOKENS}))
    return str(reply["choices"][0]["message"]["content"])


def below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def process_of(gateway_pid: int, node_id: str) -> psutil.Process:
    """A node's: it has files open in its folder."""
    actors = (process for process in below(gateway_pid) if "ray::NodeActor" in process.cmdline()[0])
    return next(
        actor for actor in actors if any(f"/nodes/{node_id}/" in file.path for file in actor.open_files())
    )


@pytest.mark.slow
async def test_two_nodes_answer_a_killed_one_comes_back_and_all_end_with_the_gateway(tmp_path: Path) -> None:
    port = free_port()
    async with serving(port, tmp_path, "--nodes", "2") as gateway, Http(f"http://127.0.0.1:{port}") as http:
        said = b"".join(await output_until(gateway, b" ready: "))
        assert b"node-1: importing vLLM" in said or b"node-2: importing vLLM" in said
        for name in ("node-1", "node-2"):
            await until_ready(http, name)
        texts = await asyncio.gather(*(story(http) for _ in range(NUM_SHORT)))
        assert len(set(texts)) == 1, "two nodes say what one would"
        for name, node in (await nodes_of(http)).items():
            assert node["load"]["num_answer_tokens"], f"{name} has answered"

        endless = STORY | {"max_tokens": 4000, "ignore_eos": True, "stream": True}
        async with http.post(CHAT, json=endless) as reply:
            await reply.content.readline()
            dead = await busy_node(http)
            process_of(gateway.pid, dead["id"]).kill()
            async with asyncio.timeout(PATIENCE_S):
                assert b"engine_failed" in await reply.content.read(), "it may be asked for again"
        assert await story(http) == texts[0], "the other one answers meanwhile"
        await until_ready(http, dead["id"], other_than=dead["incarnation"])
        assert list(await nodes_of(http)) == ["node-1", "node-2"]

        words = {word for child in psutil.Process(gateway.pid).children() for word in child.cmdline()}
        [folder] = [Path(word) for word in words if "/ov-" in word]
        assert folder.stat().st_mode & 0o077 == 0, "Ray's own folder in it may be written to by everybody"
        watched = {os.pidfd_open(process.pid): process for process in below(gateway.pid)}
        gateway.kill()
        await gateway.wait()
        for fd, process in watched.items():
            ended, _, _ = await asyncio.to_thread(select.select, [fd], [], [], PATIENCE_S)
            os.close(fd)
            assert ended, f"{process} has outlived the gateway"
        assert not folder.exists()
