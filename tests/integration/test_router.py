"""One gateway over two engines in processes of their own: sessions stay with theirs, and what happens to one costs as little as it can."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
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
from engine_bridge.local_node import LocalNode, LocalNodeConfig
from engine_bridge.protocol.node import TOKEN_ID_BYTES, Advisory, AdvisoryReport, pack_token_ids
from gateway.app import Server, build_services, node_config
from gateway.metrics.metrics import Metrics
from gateway.nodes import engine_process
from gateway.nodes.adapter_sync import AdapterSync
from gateway.nodes.router import Router
from gateway.settings.config import DEMO_ADAPTERS_DIR, DEMO_MODEL_DIR
from kvtiers.stats import PeerStats
from overture_client.chat import ChatClient
from overture_client.chat_frames import ChatError, Delta
from tests.integration.conftest import MODEL, PEERS, SharedNode, ask, demo_config, settle, told
from tests.integration.nodes import WaitsForTheDisk, generate, text
from tests.integration.test_process import LONG, QUESTION, SECRET

pytestmark = pytest.mark.slow


class Processes:
    """A placement of two nodes on this machine, each with a folder of its own, and the model and the adapters elsewhere than the gateway's."""

    def __init__(self, folder: Path) -> None:
        self.model, self.adapters = folder / "somewhere" / "else", folder / "other-adapters"
        shutil.copytree(DEMO_MODEL_DIR, self.model)
        shutil.copytree(DEMO_ADAPTERS_DIR, self.adapters)
        self.processes = {
            name: engine_process.make_node(self._config(folder / name), "plain", "warning")
            for name in ("a", "b")
        }

    def _config(self, folder: Path) -> LocalNodeConfig:
        """Without adapters, which the gateway keeps."""
        config = node_config(demo_config(folder, max_num_seqs=8))
        engine = structs.replace(config.engine, model=str(self.model))
        return structs.replace(config, engine=engine, adapters_dir=None, peers=PEERS)

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


@pytest.fixture(scope="module")
def placement(tmp_path_factory: pytest.TempPathFactory) -> Processes:
    return Processes(tmp_path_factory.mktemp("nodes"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def router(placement: Processes) -> AsyncIterator[Router]:
    # Others go by how fast a node is, which on a busy machine is anybody's guess.
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


def process_of(node: ProcessNode) -> psutil.Process:
    assert node._process is not None
    return psutil.Process(node._process.pid)


async def listed(http: aiohttp.ClientSession) -> dict[str, Any]:
    """The one adapter there is."""
    (shown,) = (await told(http.get("/v1/adapters")))["adapters"]
    found: dict[str, Any] = shown
    return found


async def until_ready(router: Router, node_id: str, not_as: str = "") -> None:
    await settle(
        lambda: any(
            state.node_id == node_id and state.state == "ready" and state.incarnation != not_as
            for state in router.nodes_state()
        )
    )


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
        _, done = await ask(chat, QUESTION, session_id=session_id)
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
        response = await told(
            http.post("/v1/responses", json=options | {"input": "Hello!", "background": True})
        )
        async with asyncio.timeout(30):
            while response["status"] in ("queued", "in_progress"):
                response = await told(http.get(f"/v1/responses/{response['id']}"))
        assert response["status"] == "completed" and response["output"]
        assert (await told(http.post("/tokenize", json={"prompt": "Hello!"})))["count"] > 0


async def test_a_session_whose_node_is_drained_goes_on_elsewhere_and_its_kv_is_asked_for_there(
    router: Router, chat: ChatClient
) -> None:
    """Whether it is also waited for is up to how fast this machine computes at the moment, and what it says to the tests of peers below."""
    _, begun = await ask(
        chat, "The word of the day is albatross, and the one of the year is kingfisher. " * 3
    )
    home = router.home_of("", begun.session_id)
    assert await router.drain_node(home, 30.0)
    try:
        answer, _ = await ask(chat, QUESTION, session_id=begun.session_id)
        assert answer and router.home_of("", begun.session_id) != home
    finally:
        router.reopen_node(home)
    async with asyncio.timeout(30):
        while not (stats := router.figures().kv_tiers) or not stats.peers.num_asked:
            await asyncio.sleep(0.05)
    assert stats.peers.misses == {}


async def test_an_adapter_is_loaded_by_both_engines_which_answer_alike(
    router: Router, placement: Processes, server: Server
) -> None:
    body = {"lora_name": "pirate", "lora_path": str(placement.adapters / "pirate")}
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
            answers.append(
                (await told(http.post("/v1/chat/completions", json=question, headers=headers)))["choices"][0][
                    "message"
                ]["content"]
            )
        await settle(lambda: [info.num_uses for info in router.adapters()] == [2])
        shown = await listed(http)
    assert answers[0] == answers[1]
    assert set(shown["nodes"]) == {"a", "b"} and "disk" not in shown["nodes"].values()


# -- KV from one engine to another ------------------------------------------------------------------------------------

HISTORY_TOKENS = 512


@dataclass
class Pair:
    """`home` in a child process; `away` in this one, which asks a peer, and waits for it, however slow the machine is."""

    home: ProcessNode
    away: LocalNode

    def figures(self) -> PeerStats:
        stats = self.away.figures().kv_tiers
        assert stats is not None
        return stats.peers


class SlowComputing:
    """A second for each token, whatever was measured. The demo model computes about as fast as a busy machine sends."""

    def at(self, now: float) -> float:
        return 1.0

    def note(self, num_tokens: float, seconds: float, now: float) -> None: ...


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(node: SharedNode, router: Router, placement: Processes) -> AsyncIterator[Pair]:
    tiers = node._tiers
    assert tiers is not None
    policy, rate = tiers.policy, tiers._prefill_rate
    tiers.policy, tiers._prefill_rate = WaitsForTheDisk(), SlowComputing()  # type: ignore[assignment]
    yield Pair(placement.processes["b"], node)
    tiers.policy, tiers._prefill_rate = policy, rate


async def begun_at_home(pair: Pair, session: str, adapter: str = "") -> list[int]:
    """The prompt with which a session goes on."""
    history = text(session, HISTORY_TOKENS)
    begun = await generate(pair.home, history, session_id=session, adapter=adapter)
    return [*history, *begun.token_ids, *text("more", 40)]


async def test_a_moved_session_goes_on_with_its_peers_kv_token_for_token(pair: Pair) -> None:
    """With an adapter, whose files lie elsewhere there, as the model's do."""
    for adapter in ("", "pirate"):
        session = f"moved-{adapter}"
        prompt = await begun_at_home(pair, session, adapter)
        context = {"session_id": session, "adapter": adapter}
        at_home = await generate(pair.home, prompt, **context)
        moved = await generate(pair.away, prompt, **context, kv_from=pair.home.peer_address)
        kv = moved.kv
        assert (kv.peer, kv.device, kv.host, kv.disk) == (HISTORY_TOKENS + 32, 0, 0, 0)
        assert kv.peer + kv.recomputed == len(prompt)
        anew = await generate(pair.away, prompt, **context, tenant="somebody else")
        assert anew.kv.recomputed == len(prompt)
        assert moved.token_ids == at_home.token_ids == anew.token_ids
    num_moved = 2 * (HISTORY_TOKENS + 32) // 32
    # Counted when the asking has ended, which no answer waits for.
    await settle(lambda: pair.figures().num_fetched >= num_moved)
    figures = pair.figures()
    assert figures.num_fetched == num_moved and figures.misses == {}


async def test_nobody_meets_another_tenants_kv_by_way_of_a_peer(pair: Pair) -> None:
    prompt = await begun_at_home(pair, "private")
    async with asyncio.timeout(60):
        for number in itertools.count():
            tenant = {"tenant": f"t{number}", "kv_from": pair.home.peer_address}
            kv = (await generate(pair.away, prompt, session_id="private", **tenant)).kv
            assert kv.peer == 0 and kv.recomputed == len(prompt)
            # Where the answer is there before the peer's reply, as on a busy machine, the question is given up.
            if pair.figures().misses:
                break
    assert set(pair.figures().misses) == {"absent"}


async def test_an_advisory_brings_a_peers_kv_to_the_device(pair: Pair) -> None:
    prompt = await begun_at_home(pair, "announced")
    warm: asyncio.Future[AdvisoryReport] = asyncio.get_running_loop().create_future()

    def note(report: AdvisoryReport) -> None:
        if report.state == "warm" and not warm.done():
            warm.set_result(report)

    advisory = Advisory(
        advisory_id="a",
        session_id="announced",
        token_ids=pack_token_ids(prompt),
        kv_from=pair.home.peer_address,
    )
    async with asyncio.timeout(60):
        await pair.away.advise(advisory, note)
        report = await warm
    assert report.device_tokens == HISTORY_TOKENS
    said = await generate(pair.away, prompt, session_id="announced", kv_from=pair.home.peer_address)
    assert (said.kv.device, said.kv.peer) == (HISTORY_TOKENS, 0)


# -- nodes that go ----------------------------------------------------------------------------------------------------


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
    both = [({"a", "b"}, True)]
    await settle(lambda: [(set(info.nodes), info.is_pinned) for info in router.adapters()] == both)


async def test_the_death_of_a_node_costs_begun_answers_a_retry_and_nothing_else(
    router: Router, placement: Processes, server: Server, chat: ChatClient
) -> None:
    _, other = await ask(chat, SECRET)
    undisturbed, _ = await ask(chat, QUESTION, session_id=other.session_id)
    (_, begun), (_, waiting) = await ask(chat, SECRET), await ask(chat, SECRET)
    home = router.home_of("", begun.session_id)
    router.remember([("", waiting.session_id, home)])
    incarnation = next(state.incarnation for state in router.nodes_state() if state.node_id == home)

    words = asyncio.Event()
    telling = asyncio.create_task(first_words(chat, begun.session_id, words))
    await asyncio.wait_for(words.wait(), 60)
    process = process_of(placement.processes[home])
    process.suspend()  # so that the next one cannot begin
    async with ChatClient(server.url) as client:
        served = asyncio.create_task(ask(client, QUESTION, session_id=waiting.session_id))
        async with asyncio.timeout(10):
            while router.homes.num_requests(home) < 2:
                await asyncio.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        error = await asyncio.wait_for(telling, 30)
        assert (error.code, error.retryable) == ("engine_failed", True)
        text, _ = await asyncio.wait_for(served, 60)
    assert text == undisturbed
    assert router.home_of("", waiting.session_id) != home
    again, _ = await ask(chat, "Are you there?", session_id=begun.session_id)
    assert again, "the session goes on"
    await until_ready(router, home, not_as=incarnation)


async def test_a_peer_that_has_died_costs_a_recomputation(pair: Pair) -> None:
    prompt = await begun_at_home(pair, "orphan")
    at_home = await generate(pair.home, prompt, session_id="orphan")
    address = pair.home.peer_address
    await pair.home.close()
    moved = await generate(pair.away, prompt, session_id="orphan", kv_from=address)
    assert moved.kv.recomputed == len(prompt) and moved.token_ids == at_home.token_ids
    assert pair.figures().misses["dead"] == 1
