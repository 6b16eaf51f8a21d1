"""What the scheduler tells: over HTTP, to Prometheus, and in a decision log that can be replayed. On engines of its own, with too little memory.

Runs before the shared engine starts (conftest), each engine after the one before it has gone.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from prometheus_client import CollectorRegistry

from engine_bridge.driver.engine.engine import VllmDriver
from engine_bridge.local_node import LocalNode, LocalNodeConfig
from engine_bridge.policy.scheduling.decision_log import replay
from engine_bridge.predict.length import LengthFeatures, LengthGuess
from engine_bridge.protocol.node_facts import NodeFacts
from engine_bridge.settings.engine_config import EngineConfig
from gateway.app import Server, build_services
from gateway.metrics.metrics import Metrics
from gateway.settings.config import DEMO_ADAPTERS_DIR, DEMO_MODEL_DIR

from .conftest import KEYS, MODEL, demo_config

STATE = "/v1/engine/state"
MODELS = (MODEL, "pirate", "robot")


@asynccontextmanager
async def gateway(folder: Path, policy: str, **changes: Any) -> AsyncIterator[Server]:
    config = EngineConfig(
        model=str(DEMO_MODEL_DIR),
        served_model_name=MODEL,
        dtype="float32",
        cpu_threads=1,
        max_model_len=1024,
        max_num_seqs=6,
        num_kv_blocks=60,
        scheduling_policy=policy,
        decision_log=folder / "decisions.jsonl",
        lane_refit_s=0.5,
    )
    node = LocalNode(LocalNodeConfig(engine=config, adapters_dir=DEMO_ADAPTERS_DIR))
    services = await build_services(
        demo_config(folder / "data", **changes), node=node, metrics=Metrics(CollectorRegistry())
    )
    async with Server(services) as server:
        await node.start()
        await node.run_on_engine(expect_little)
        yield server


class TooLittle:
    """A predictor that lets too many start at once."""

    def predict(self, features: LengthFeatures) -> LengthGuess:
        return LengthGuess(2, 2, "made up")

    def observe(self, features: LengthFeatures, num_tokens: int) -> None: ...

    def refit(self) -> None: ...


def expect_little(driver: VllmDriver) -> None:
    if driver.scheduling is not None:
        driver.scheduling.predictor = TooLittle()


def client(server: Server, key: str | None = None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(server.url, headers={"Authorization": f"Bearer {key}"} if key else {})


async def ask(http: aiohttp.ClientSession, name: str, length: int, num_tokens: int, model: str) -> None:
    chance = random.Random(name)
    body = {
        "model": model,
        "prompt": [chance.randrange(20, 900) for _ in range(length)],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with http.post("/v1/completions", json=body, headers={"X-Request-Id": name}) as response:
        assert response.status == 200, await response.text()


def traffic(http: aiohttp.ClientSession, name: str, num_requests: int) -> list[asyncio.Task[None]]:
    """Three of them fit the device when they start, and two when they end."""
    return [
        asyncio.create_task(ask(http, f"{name}-{at}", 500 - at, 150, MODELS[at % len(MODELS)]))
        for at in range(num_requests)
    ]


async def state_of(http: aiohttp.ClientSession, query: str = "") -> dict[str, Any]:
    async with http.get(STATE + query) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def busy_state(http: aiohttp.ClientSession) -> dict[str, Any]:
    """The first in which requests of this caller run and wait."""
    async with asyncio.timeout(60):
        while True:
            state = await state_of(http)
            if state["waiting"]["total"] and state["running"]["total"]:
                return state


async def metrics_of(http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("overture_"))
    return {name: float(value) for name, value in pairs}


def names(requests: Sequence[dict[str, Any]]) -> set[str]:
    return {each["request_id"] for each in requests}


async def test_lanes_reasons_and_only_ones_own_requests_and_a_log_that_replays(
    tmp_path: Path,
) -> None:
    async with (
        gateway(tmp_path, "mlq", operator_keys=KEYS) as server,
        client(server, KEYS[0]) as first,
        client(server, KEYS[1]) as second,
    ):
        asked = traffic(first, "first", 4) + traffic(second, "second", 4)
        state = await busy_state(second)
        check_busy(state)
        facts = server.services.node.facts()
        check_facts(facts, state, (await state_of(second))["counts"].get("preempted", 0))
        few = await state_of(first, "?limit=1")
        assert len(few["waiting"]["requests"]) <= 1 and few["waiting"]["total"] >= 1
        assert (await metrics_of(first))["overture_lane_quota_tokens" + '{lane="0"}'] > 0
        await asyncio.gather(*asked)
        while not (state := await state_of(first))["counts"].get("refits"):
            await ask(first, "more", 20, 2, MODEL)
        check_after(state, await metrics_of(second))
        facts = server.services.node.facts()
        assert facts is not None and (facts.num_requests, facts.num_tokens, facts.answer_tokens) == (0, 0, 0)
        assert facts.free_tokens == (state["engine"]["num_kv_blocks"] - 1) * state["engine"]["block_size"]
        await server.services.node.drain(0)
        draining = server.services.node.facts()
        assert draining is not None and not draining.is_open
    result = check_log(tmp_path / "decisions.jsonl")
    assert result["preempted"] == state["counts"]["preempted"] > 0, "or there was too much memory"
    assert result["admitted"] == state["counts"]["admitted"]


def check_busy(state: dict[str, Any]) -> None:
    """As the second caller sees it."""
    waiting, running = state["waiting"]["requests"], state["running"]["requests"]
    assert all("second" in name for name in names(waiting) | names(running)), (
        "the others' are nobody else's business"
    )
    assert "first" not in str(state)
    assert len(waiting) == state["waiting"]["total"] < state["engine"]["num_waiting"]
    assert sum(state["num_by_reason"].values()) == state["engine"]["num_waiting"]
    assert set(state["num_by_reason"]) >= {each["defer_reason"] for each in waiting}
    assert all(each["waited_s"] >= 0 and each["ran_s"] is None for each in waiting)
    assert all(each["ran_s"] >= 0 and each["defer_reason"] is None for each in running)
    assert all(each["lane"] is not None and each["size_tokens"] > 20 for each in running)
    lanes = state["lanes"]
    assert len(lanes["quota_tokens"]) == len(lanes["used_tokens"]) == len(lanes["boundaries"]) + 1
    assert (
        sum(lanes["quota_tokens"]) == (state["engine"]["num_kv_blocks"] - 1) * state["engine"]["block_size"]
    )
    assert sum(lanes["used_tokens"]) > 0
    assert state["engine"]["num_free_kv_blocks"] < state["engine"]["num_kv_blocks"]


def check_facts(facts: NodeFacts | None, state: dict[str, Any], num_preempted: int) -> None:
    """Taken just after the state, in which some of eight long requests run and others wait; none of them has ended.

    num_preempted: that often one lost its place until now.
    """
    assert facts is not None and facts.is_open
    assert state["engine"]["num_waiting"] + state["engine"]["num_running"] <= facts.num_requests <= 8
    # Prompts of 497 to 500 tokens, and answers that are predicted to be of two, whatever they are.
    # One that was preempted may find its blocks where they were, and has next to nothing to compute.
    num_computed = max(facts.queued.num - num_preempted, 0)
    assert 490 * num_computed <= facts.queued_tokens < facts.num_tokens < 8 * 650
    assert facts.queued_tokens >= facts.queued.num
    assert facts.answer_tokens is not None and facts.free_tokens < 60 * state["engine"]["block_size"]
    both = facts.running + facts.queued
    assert both.most == 64 and both.total <= 2 * (16 + 64)
    perf = facts.perf
    assert perf is not None and 0 < perf.decode.seconds(facts.running, facts.num_tokens) < 10
    assert 0 < perf.prompt_token_s < 1


def check_after(state: dict[str, Any], metrics: dict[str, float]) -> None:
    assert (
        state["engine"]["num_running"]
        == state["engine"]["num_waiting"]
        == sum(state["lanes"]["used_tokens"])
        == 0
    )
    assert state["counts"]["admitted"] >= 8 + state["counts"]["preempted"]
    assert state["length_errors"]["num_answers"] >= 8
    assert 0 < state["seconds"]["decide"] < state["seconds"]["step"]
    assert metrics["overture_scheduling_admitted_total"] == state["counts"]["admitted"]
    assert metrics['overture_scheduling_preempted_total{kind="recompute"}'] == state["counts"]["preempted"]
    # 8 of 150 and one or more of 2 tokens.
    assert metrics['overture_node_answer_tokens_total{node="local"}'] >= 8 * 150 + 2
    assert metrics['overture_node_kv_blocks{node="local"}'] == 60
    assert metrics["overture_length_error_tokens_count"] == state["length_errors"]["num_answers"]
    assert metrics["overture_scheduling_refits_total"] >= 1
    assert (
        sum(value for name, value in metrics.items() if name.startswith("overture_scheduling_waiting")) == 0
    )
    assert metrics["overture_decision_log_bytes_total"] > 1000


def check_log(path: Path) -> Counter[str]:
    """What happened, counted from the log, whose replay decides the same."""
    lines = path.read_bytes().splitlines(keepends=True)
    result = replay(lines)
    assert not result.is_torn and result.num_lines == len(lines)
    assert result.num_decisions > 20 and result.num_different == 0, result.first_difference
    counts = Counter(msgspec.json.decode(line)["do"] for line in lines)
    assert counts["begin_refit"] >= 1 <= counts["advance_refit"]
    arrived = Counter(
        msgspec.json.decode(line)["facts"]["request_id"] for line in lines if b'"arrived"' in line[:20]
    )
    counts["preempted"] = sum(arrived.values()) - len(arrived)
    return counts


async def test_vllms_own_queue_tells_what_it_knows(tmp_path: Path) -> None:
    async with gateway(tmp_path, "vllm") as server, client(server) as http:
        asked = traffic(http, "any", 5)
        state = await busy_state(http)
        assert state["policy"] == "vllm" and state["lanes"] is state["length_errors"] is None
        assert state["waiting"]["total"] == state["engine"]["num_waiting"]
        assert all("any" in name for name in names(state["waiting"]["requests"]))
        facts = server.services.node.facts()
        assert facts is not None and 0 < facts.num_requests <= 5
        assert facts.answer_tokens == 0, "nobody predicts answers"
        assert {each["defer_reason"] for each in state["waiting"]["requests"]} == set(state["num_by_reason"])
        await asyncio.gather(*asked)
        metrics = await metrics_of(http)
        assert (
            metrics['overture_scheduling_preempted_total{kind="recompute"}']
            == (await state_of(http))["counts"]["preempted"]
        )
        assert metrics['overture_scheduling_waiting{reason="queued"}'] == 0
        for query, status in (("?limit=0", 200), ("?limit=-1", 400), ("?limit=many", 400), ("?limit=²", 400)):
            async with http.get(STATE + query) as response:
                assert response.status == status, query
    assert not (tmp_path / "decisions.jsonl").exists()


async def test_before_the_engine_is_up_there_is_nothing_to_tell(tmp_path: Path) -> None:
    config = demo_config(tmp_path, operator_keys=KEYS, kv_host_gib=0)
    services = await build_services(config, metrics=Metrics(CollectorRegistry()))
    async with Server(services) as server, client(server, KEYS[0]) as http, client(server) as nobody:
        async with http.get(STATE) as response:
            assert response.status == 503 and (await response.json())["error"]["code"] == "starting"
        assert not any("scheduling" in name or "lane" in name for name in await metrics_of(http))
        async with nobody.get(STATE) as response:
            assert response.status == 401
