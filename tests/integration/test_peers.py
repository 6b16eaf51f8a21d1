"""KV from one real engine to another, in two processes whose models and adapters lie in different folders."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from msgspec import structs

from engine_bridge.cluster.process import ProcessNode
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.local_node import LocalNode
from engine_bridge.protocol.node import (
    Advisory,
    AdvisoryReport,
    GenerateRequest,
    KvSources,
    RequestId,
    Sampling,
    pack_token_ids,
)
from engine_bridge.protocol.request_context import RequestContext
from gateway.app import node_config
from gateway.nodes.engine_process import make_node
from gateway.settings.config import DEMO_ADAPTERS_DIR, DEMO_MODEL_DIR
from kvtiers.stats import PeerStats

from .conftest import PEERS, SharedNode, WaitsForTheDisk, demo_config

HISTORY_TOKENS = 512
_ids = itertools.count()


@dataclass
class Pair:
    """`home` in a child process; `away` in this one, which asks a peer, and waits for it, however slow the machine is."""

    home: ProcessNode
    away: LocalNode

    def figures(self) -> PeerStats:
        stats = self.away.kv_tiers()
        assert stats is not None
        return stats.peers


class SlowComputing:
    """A second for each token, whatever was measured. The demo model computes about as fast as a busy machine sends."""

    def at(self, now: float) -> float:
        return 1.0

    def note(self, num_tokens: float, seconds: float, now: float) -> None: ...


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(node: SharedNode, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    model, adapters = folder / "somewhere" / "else", folder / "other-adapters"
    shutil.copytree(DEMO_MODEL_DIR, model)
    shutil.copytree(DEMO_ADAPTERS_DIR, adapters)
    config = node_config(demo_config(folder / "data"))
    engine = structs.replace(config.engine, model=str(model))
    config = structs.replace(config, engine=engine, adapters_dir=adapters, peers=PEERS)
    home, tiers = make_node(config, "plain", "warning"), node._tiers
    assert tiers is not None
    policy, rate = tiers.policy, tiers._prefill_rate
    tiers.policy, tiers._prefill_rate = WaitsForTheDisk(), SlowComputing()  # type: ignore[assignment]
    try:
        await home.start()
        yield Pair(home, node)
    finally:
        tiers.policy, tiers._prefill_rate = policy, rate
        await home.close()


def text(seed: object, length: int) -> list[int]:
    chance = random.Random(repr(seed))
    return [chance.randrange(20, 900) for _ in range(length)]


async def generate(
    node: LocalNode | RemoteNode, token_ids: list[int], session: str, **context: str
) -> tuple[list[int], KvSources]:
    request = GenerateRequest(
        request_id=RequestId(f"p{next(_ids)}"),
        prompt_token_ids=tuple(token_ids),
        context=RequestContext(session_id=session, **context),  # type: ignore[arg-type]
        sampling=Sampling(temperature=0, max_tokens=8, ignore_eos=True),
    )
    answer: list[int] = []
    kv = None
    async for delta in node.generate(request):
        answer.extend(delta.token_ids)
        kv = delta.timings.kv if delta.timings else kv
    assert kv is not None
    return answer, kv


async def begun_at_home(pair: Pair, session: str, adapter: str = "") -> list[int]:
    """The prompt with which a session goes on."""
    history = text(session, HISTORY_TOKENS)
    answer, _ = await generate(pair.home, history, session, adapter=adapter)
    return [*history, *answer, *text("more", 40)]


async def test_a_moved_session_goes_on_with_its_peers_kv_token_for_token(pair: Pair) -> None:
    """With an adapter, whose files lie elsewhere there, as the model's do."""
    for adapter in ("", "pirate"):
        session = f"moved-{adapter}"
        prompt = await begun_at_home(pair, session, adapter)
        at_home, _ = await generate(pair.home, prompt, session, adapter=adapter)
        moved, kv = await generate(
            pair.away, prompt, session, adapter=adapter, kv_from=pair.home.peer_address
        )
        assert (kv.peer, kv.device, kv.host, kv.disk) == (HISTORY_TOKENS + 32, 0, 0, 0)
        assert kv.peer + kv.recomputed == len(prompt)
        anew, kv = await generate(pair.away, prompt, session, adapter=adapter, tenant="somebody else")
        assert kv.recomputed == len(prompt)
        assert moved == at_home == anew
    num_moved = 2 * (HISTORY_TOKENS + 32) // 32
    async with asyncio.timeout(60):
        # Counted when the asking has ended, which no answer waits for.
        while pair.figures().num_fetched < num_moved:
            await asyncio.sleep(0.02)
    figures = pair.figures()
    assert figures.num_fetched == num_moved and figures.misses == {}


async def test_nobody_meets_another_tenants_kv_by_way_of_a_peer(pair: Pair) -> None:
    prompt = await begun_at_home(pair, "private")
    async with asyncio.timeout(60):
        for number in itertools.count():
            _, kv = await generate(
                pair.away, prompt, "private", tenant=f"t{number}", kv_from=pair.home.peer_address
            )
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
    _, kv = await generate(pair.away, prompt, "announced", kv_from=pair.home.peer_address)
    assert (kv.device, kv.peer) == (HISTORY_TOKENS, 0)


async def test_a_peer_that_has_died_costs_a_recomputation(pair: Pair) -> None:
    prompt = await begun_at_home(pair, "orphan")
    at_home, _ = await generate(pair.home, prompt, "orphan")
    address = pair.home.peer_address
    await pair.home.close()
    moved, kv = await generate(pair.away, prompt, "orphan", kv_from=address)
    assert kv.recomputed == len(prompt) and moved == at_home
    assert pair.figures().misses["dead"] == 1
