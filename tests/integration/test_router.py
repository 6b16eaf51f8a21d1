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
from typing import Any, NamedTuple

import psutil
import pytest
import pytest_asyncio
from msgspec import structs

from engine_bridge.cluster.process import ProcessNode
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.local_node import LocalNode
from engine_bridge.protocol.node import Advisory, AdvisoryReport, pack_token_ids
from engine_bridge.settings.node_config import LocalNodeConfig
from gateway.app import Server, node_config
from gateway.nodes import engine_process
from gateway.nodes.adapter_sync import AdapterSync
from gateway.nodes.router import Router
from gateway.settings.config import DEMO_ADAPTERS_DIR, DEMO_MODEL_DIR
from kvtiers.stats import PeerStats
from overture_client.chat import ChatClient
from overture_client.chat_frames import ChatError, Delta
from tests.integration.conftest import PEERS, SharedNode, ask, demo_config, served, settle, told
from tests.integration.facts import CHAT, MODEL, RESPONSES, Http
from tests.integration.nodes import WaitsForTheDisk, generate, text
from tests.integration.test_continuity import ApiConversation
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
    async with served(config, router) as server:
        yield server


async def listed(http: Http) -> dict[str, Any]:
    """The one adapter there is."""
    (shown,) = (await told(http.get("/v1/adapters")))["adapters"]
    return shown


async def test_sessions_spread_and_go_on_at_home(
    router: Router, server: Server, chat: ChatClient, http: Http
) -> None:
    async def both_are_open() -> bool:
        return (await told(http.get("/v1/nodes")))["totals"]["num_open"] == 2

    await settle(both_are_open)
    # So long that the first still runs when the second is sent to a node.
    long = LONG | {"max_tokens": 200}
    first, second = await asyncio.gather(ask(chat, SECRET, sampling=long), ask(chat, SECRET, sampling=long))
    assert first[0] == second[0], "both nodes say the same"
    homes = {done.session_id: router.home_of("", done.session_id) for _, done in (first, second)}
    assert sorted(homes.values()) == ["a", "b"]
    for session_id, home in homes.items():
        _, done = await ask(chat, QUESTION, session_id=session_id)
        assert done.timings.kv.device >= 32, "its KV is there"
        assert router.home_of("", session_id) == home
    stored = await server.services.store.homes(10)
    assert {session_id: home for _, session_id, home in stored} == homes


async def test_sessions_of_the_apis_keep_their_token_ids_across_processes(server: Server, http: Http) -> None:
    """Streamed or not; and what a response in the background says is stored by the gateway, whichever node it ran on."""
    for stream in (False, True):
        conversation = ApiConversation(http, server, "chat", stream=stream)
        await conversation.ask(f"Over REST, {stream}: where is the old harbour of this town?")
        num_before = len(await conversation.stored())
        assert num_before > 32
        assert await conversation.ask("And how far is it?") == (num_before - 1) // 32 * 32
    asked = {"model": MODEL, "input": "Hello!", "background": True}
    made = await told(http.post(RESPONSES, json=asked))

    async def ended() -> Any:
        response = await told(http.get(f"{RESPONSES}/{made['id']}"))
        return None if response["status"] in ("queued", "in_progress") else response

    response = await settle(ended, 30)
    assert response["status"] == "completed" and response["output"]
    assert (await told(http.post("/tokenize", json={"prompt": "Hello!"})))["count"] > 0


async def test_a_session_of_a_drained_node_goes_on_elsewhere_with_its_kv(
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

    def asked_peers() -> Any:
        stats = router.figures().kv_tiers
        return stats and stats.peers.num_asked and stats.peers

    assert (await settle(asked_peers, 30)).misses == {}


async def test_both_engines_load_an_adapter(router: Router, placement: Processes, server: Server) -> None:
    body = {"lora_name": "pirate", "lora_path": str(placement.adapters / "pirate")}
    assert (await router.load_adapter(body)).status == 200
    assert (await router.pin_adapter("pirate", True)) is not None
    question = {"model": "pirate", "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}
    answers = []
    async with Http(server.url) as http:
        # A node that came back a moment ago is brought in step after the load.
        async def has_both() -> bool:
            return set((await listed(http))["nodes"]) == {"a", "b"}

        await settle(has_both)
        for home in ("a", "b"):
            router.remember([("", f"pirate-{home}", home)])
            headers = {"X-Session-Id": f"pirate-{home}"}
            said = await told(http.post(CHAT, json=question, headers=headers))
            answers.append(said["choices"][0]["message"]["content"])
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
        return stats.peers


class SlowComputing:
    """A second for each token, whatever was measured. The demo model computes about as fast as a busy machine sends."""

    def at(self, now: float) -> float:
        return 1.0

    def note(self, num_tokens: float, seconds: float, now: float) -> None: ...


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(node: SharedNode, router: Router, placement: Processes) -> AsyncIterator[Pair]:
    tiers = node._tiers
    policy, rate = tiers.policy, tiers._prefill_rate
    tiers.policy, tiers._prefill_rate = WaitsForTheDisk(), SlowComputing()
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
    reports: list[AdvisoryReport] = []
    named = {"session_id": "announced", "kv_from": pair.home.peer_address}
    advisory = Advisory(advisory_id="a", token_ids=pack_token_ids(prompt), **named)
    await pair.away.advise(advisory, reports.append)
    [report, *_] = await settle(lambda: [report for report in reports if report.state == "warm"])
    assert report.device_tokens == HISTORY_TOKENS
    said = await generate(pair.away, prompt, **named)
    assert (said.kv.device, said.kv.peer) == (HISTORY_TOKENS, 0)


# -- nodes that go ----------------------------------------------------------------------------------------------------


class Orphan(NamedTuple):
    """With what a session goes on, what its home answered to that, and where its home was."""

    prompt: list[int]
    answer: list[int]
    address: str


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def orphan(pair: Pair) -> Orphan:
    prompt = await begun_at_home(pair, "orphan")
    said = await generate(pair.home, prompt, session_id="orphan")
    return Orphan(prompt, said.token_ids, pair.home.peer_address)


async def test_a_node_starts_again_under_load_without_a_failed_request(
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
        async with Http(server.url) as http:
            while not is_over.is_set():
                headers = {"X-Session-Id": f"load-{number}"}
                async with http.post(CHAT, json=body, headers=headers) as reply:
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
    router: Router, placement: Processes, server: Server, chat: ChatClient, orphan: Orphan
) -> None:
    _, other = await ask(chat, SECRET)
    undisturbed, _ = await ask(chat, QUESTION, session_id=other.session_id)
    (_, begun), (_, waiting) = await ask(chat, SECRET), await ask(chat, SECRET)
    home = "b"
    router.remember([("", session.session_id, home) for session in (begun, waiting)])
    words = asyncio.Event()

    async def tell() -> ChatError:
        """A long story; what ends it."""
        with pytest.raises(ChatError) as failed:
            async for event in chat.ask("Tell me a long story.", session_id=begun.session_id, sampling=LONG):
                if isinstance(event, Delta):
                    words.set()
        return failed.value

    telling = asyncio.create_task(tell())
    await asyncio.wait_for(words.wait(), 60)
    server_process = placement.processes[home]._process
    process = psutil.Process(server_process.pid)
    process.suspend()  # so that the next one cannot begin
    async with ChatClient(server.url) as client:
        served = asyncio.create_task(ask(client, QUESTION, session_id=waiting.session_id))
        await settle(lambda: router.homes.num_requests(home) >= 2, 10)
        os.kill(process.pid, signal.SIGKILL)
        error = await asyncio.wait_for(telling, 30)
        assert (error.code, error.retryable) == ("engine_failed", True)
        text, _ = await asyncio.wait_for(served, 60)
    assert text == undisturbed
    assert router.home_of("", waiting.session_id) != home
    again, _ = await ask(chat, "Are you there?", session_id=begun.session_id)
    assert again, "the session goes on"


async def test_a_peer_that_has_died_costs_a_recomputation(pair: Pair, orphan: Orphan) -> None:
    """The one that was killed in the test before, if it ran. That it comes back is waited for in test_ray and test_process."""
    await pair.home.close()
    moved = await generate(pair.away, orphan.prompt, session_id="orphan", kv_from=orphan.address)
    assert moved.kv.recomputed == len(orphan.prompt) and moved.token_ids == orphan.answer
    assert pair.figures().misses["dead"] == 1
