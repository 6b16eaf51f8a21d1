"""One gateway over two engines in processes of their own: sessions stay with theirs, and what happens to one costs as little as it can."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
from msgspec import structs
from prometheus_client import CollectorRegistry

from engine_bridge.cluster.process import ProcessNode
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.local_node import LocalNodeConfig
from engine_bridge.protocol.node import TOKEN_ID_BYTES
from gateway.app import Server, build_services, node_config
from gateway.metrics.metrics import Metrics
from gateway.nodes import engine_process
from gateway.nodes.adapter_sync import AdapterSync
from gateway.nodes.router import Router
from gateway.settings.config import DEMO_ADAPTERS_DIR
from overture_client.chat import ChatClient
from overture_client.chat_frames import ChatError, Delta
from tests.integration.conftest import MODEL, PEERS, demo_config
from tests.integration.test_process import LONG, QUESTION, SECRET, ask

pytestmark = pytest.mark.slow


class Processes:
    """A placement of two nodes on this machine, each with a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.processes = {
            name: engine_process.make_node(_config(folder / name), "plain", "warning") for name in ("a", "b")
        }

    @property
    def nodes(self) -> dict[str, RemoteNode]:
        return dict(self.processes)

    async def start(self) -> None:
        await asyncio.gather(*(node.start() for node in self.processes.values()))

    async def restart(self, node_id: str) -> None:
        await self.processes[node_id].restart()

    async def remove(self, node_id: str) -> None:
        await self.processes.pop(node_id).close()

    async def close(self) -> None:
        await asyncio.gather(*(node.close() for node in self.processes.values()))


def _config(folder: Path) -> LocalNodeConfig:
    """Without adapters, which the gateway keeps."""
    config = node_config(demo_config(folder, max_num_seqs=8))
    return structs.replace(config, adapters_dir=None, peers=PEERS)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def router(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    # Others go by how fast a node is, which on a busy machine is anybody's guess.
    placement = Processes(tmp_path_factory.mktemp("nodes"))
    router = Router(placement, AdapterSync(lambda: placement.nodes), "load_balance")
    await router.start()
    yield router
    await router.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(router: Router, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    config = demo_config(tmp_path_factory.mktemp("gateway"))
    services = await build_services(config, node=router, metrics=Metrics(CollectorRegistry()))
    async with Server(services) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="session")
async def chat(server: Server) -> AsyncIterator[ChatClient]:
    async with ChatClient(server.url) as client:
        yield client


def process_of(router: Router, node_id: str) -> psutil.Process:
    """The one that a node's engine runs in, among all that were started here."""
    node = router._placement.nodes[node_id]  # type: ignore[attr-defined]
    assert isinstance(node, ProcessNode) and node._process is not None
    return psutil.Process(node._process.pid)


async def listed(http: aiohttp.ClientSession) -> dict[str, Any]:
    """The one adapter there is."""
    async with http.get("/v1/adapters") as reply:
        (shown,) = (await reply.json())["adapters"]
        found: dict[str, Any] = shown
        return found


async def until_ready(router: Router, node_id: str, not_as: str = "") -> None:
    async with asyncio.timeout(120):
        while not any(
            state.node_id == node_id and state.state == "ready" and state.incarnation != not_as
            for state in router.nodes_state()
        ):
            await asyncio.sleep(0.05)


async def first_words(client: ChatClient, session_id: str | None, words: asyncio.Event) -> ChatError:
    """Ask for a long story; what ends it."""
    with pytest.raises(ChatError) as failed:
        async for event in client.ask("Tell me a long story.", session_id=session_id, sampling=LONG):
            if isinstance(event, Delta):
                words.set()
    return failed.value


async def test_new_sessions_spread_and_go_on_where_they_began(
    router: Router, server: Server, chat: ChatClient
) -> None:
    first, second = await asyncio.gather(ask(chat, SECRET), ask(chat, SECRET))
    assert first[0] == second[0], "both nodes say the same"
    homes = {done.session_id: router.home_of("", done.session_id) for _, done in (first, second)}
    assert sorted(homes.values()) == ["a", "b"]
    for session_id, home in homes.items():
        _, done = await ask(chat, QUESTION, session_id)
        assert done.timings.kv.device >= 32, "its KV is there"
        assert router.home_of("", session_id) == home
    stored = await server.services.store.homes(10)
    assert {session_id: home for _, session_id, home in stored} == homes


async def test_sessions_of_the_apis_keep_their_token_ids_across_processes(server: Server) -> None:
    """Streamed or not; and what a response in the background says is stored by the gateway, whichever node it ran on."""
    options: dict[str, Any] = {
        "model": server.services.config.served_model_name,
        "temperature": 1.0,
        "seed": 3,
    }
    async with aiohttp.ClientSession(server.url) as http:
        for stream in (False, True):
            session, messages = {"X-Session-Id": f"rest-{stream}"}, []
            for question in (
                f"Over REST, {stream}: where is the old harbour of this town?",
                "And how far is it?",
            ):
                messages.append({"role": "user", "content": question})
                body = options | {"messages": messages, "max_tokens": 40, "stream": stream}
                body |= {"stream_options": {"include_usage": True}} if stream else {}
                before = await server.services.store.token_ids("local", session["X-Session-Id"])
                async with http.post("/v1/chat/completions", json=body, headers=session) as reply:
                    assert reply.status == 200 and b"token ids" not in await reply.read()
                turns = (await server.services.store.get_session("local", session["X-Session-Id"])).turns
                messages.append({"role": "assistant", "content": turns[-1].answer})
            num_before = len(before) // TOKEN_ID_BYTES
            assert turns[-1].usage is not None and num_before > 32
            assert turns[-1].usage["cached_tokens"] == (num_before - 1) // 32 * 32
        async with http.post(
            "/v1/responses", json=options | {"input": "Hello!", "background": True}
        ) as reply:
            response = await reply.json()
        async with asyncio.timeout(30):
            while response["status"] in ("queued", "in_progress"):
                async with http.get(f"/v1/responses/{response['id']}") as reply:
                    response = await reply.json()
        assert response["status"] == "completed" and response["output"]
        async with http.post("/tokenize", json={"prompt": "Hello!"}) as reply:
            assert (await reply.json())["count"] > 0


async def test_a_session_whose_node_is_drained_goes_on_elsewhere_and_its_kv_is_asked_for_there(
    router: Router, chat: ChatClient
) -> None:
    """Whether it is also waited for is up to how fast this machine computes at the moment, and what it says to test_peers."""
    _, begun = await ask(
        chat, "The word of the day is albatross, and the one of the year is kingfisher. " * 3
    )
    home = router.home_of("", begun.session_id)
    assert await router.drain_node(home, 30.0)
    try:
        answer, _ = await ask(chat, QUESTION, begun.session_id)
        assert answer and router.home_of("", begun.session_id) != home
    finally:
        router.reopen_node(home)
    async with asyncio.timeout(30):
        while not (stats := router.kv_tiers()) or not stats.peers.num_asked:
            await asyncio.sleep(0.05)
    assert stats.peers.misses == {}


async def test_the_death_of_a_node_costs_begun_answers_a_retry_and_nothing_else(
    router: Router, server: Server, chat: ChatClient
) -> None:
    _, other = await ask(chat, SECRET)
    undisturbed, _ = await ask(chat, QUESTION, other.session_id)
    (_, begun), (_, waiting) = await ask(chat, SECRET), await ask(chat, SECRET)
    home = router.home_of("", begun.session_id)
    router.remember([("", waiting.session_id, home)])
    incarnation = next(state.incarnation for state in router.nodes_state() if state.node_id == home)

    words = asyncio.Event()
    telling = asyncio.create_task(first_words(chat, begun.session_id, words))
    await asyncio.wait_for(words.wait(), 60)
    process = process_of(router, home)
    process.suspend()  # so that the next one cannot begin
    async with ChatClient(server.url) as client:
        served = asyncio.create_task(ask(client, QUESTION, waiting.session_id))
        async with asyncio.timeout(10):
            while router.homes.num_requests(home) < 2:
                await asyncio.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        error = await asyncio.wait_for(telling, 30)
        assert (error.code, error.retryable) == ("engine_failed", True)
        text, _ = await asyncio.wait_for(served, 60)
    assert text == undisturbed
    assert router.home_of("", waiting.session_id) != home
    again, _ = await ask(chat, "Are you there?", begun.session_id)
    assert again, "the session goes on"
    await until_ready(router, home, not_as=incarnation)


async def test_an_adapter_is_loaded_by_both_engines_which_answer_alike(
    router: Router, server: Server
) -> None:
    await until_ready(router, "a")
    await until_ready(router, "b")
    body = {"lora_name": "pirate", "lora_path": str(DEMO_ADAPTERS_DIR / "pirate")}
    assert (await router.load_adapter(body)).status == 200
    assert (await router.pin_adapter("pirate", True)) is not None
    question = {"model": "pirate", "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}
    answers = []
    async with aiohttp.ClientSession(server.url) as http:
        # A node that came back a moment ago is brought in step after the load.
        async with asyncio.timeout(60):
            while set((await listed(http))["nodes"]) != {"a", "b"}:
                await asyncio.sleep(0.05)
        for home in ("a", "b"):
            router.remember([("", f"pirate-{home}", home)])
            headers = {"X-Session-Id": f"pirate-{home}"}
            async with http.post("/v1/chat/completions", json=question, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
                answers.append((await reply.json())["choices"][0]["message"]["content"])
        async with asyncio.timeout(30):
            while [info.num_uses for info in router.adapters()] != [2]:
                await asyncio.sleep(0.05)
        shown = await listed(http)
    assert answers[0] == answers[1]
    assert set(shown["nodes"]) == {"a", "b"} and "disk" not in shown["nodes"].values()


async def test_a_node_is_started_again_under_load_without_a_failed_request(
    router: Router, server: Server
) -> None:
    """With half of the requests for the adapter of the test before, pinned, which the node has again by itself."""
    is_over = asyncio.Event()
    statuses: list[int] = []

    async def asks(number: int) -> None:
        body = {
            "model": MODEL if number < 2 else "pirate",
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": 40,
            "stream": number % 2 == 0,
        }
        async with aiohttp.ClientSession(server.url) as http:
            while not is_over.is_set():
                headers = {"X-Session-Id": f"load-{number}"}
                async with http.post("/v1/chat/completions", json=body, headers=headers) as reply:
                    text = await reply.text()
                    statuses.append(reply.status if '"error"' not in text else 500)
                # Somebody reads; else the load, and not the start, would take the test's time.
                await asyncio.sleep(0.25)

    asking = [asyncio.create_task(asks(number)) for number in range(4)]
    before, standing = (state.incarnation for state in router.nodes_state())
    await router.restart_node("a", 60.0)
    is_over.set()
    await asyncio.gather(*asking)
    again, still = (state.incarnation for state in router.nodes_state())
    assert again != before and still == standing
    assert set(statuses) == {200}
    async with asyncio.timeout(30):
        while [(set(info.nodes), info.is_pinned) for info in router.adapters()] != [({"a", "b"}, True)]:
            await asyncio.sleep(0.05)
