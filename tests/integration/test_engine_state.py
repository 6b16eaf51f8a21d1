"""What the scheduler tells: over HTTP and to Prometheus. On engines of its own, with too little memory.

Runs before the shared engine starts (conftest), each engine after the one before it has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engine_bridge.local_node import LocalNode
from engine_bridge.protocol.node_facts import NodeFacts
from gateway.app import Server

from . import nodes
from .conftest import demo_config, metrics_of, served, settle, told
from .facts import COMPLETIONS, KEYS, Http, bearer
from .nodes import Expects

STATE = "/v1/engine/state"
NUM_BLOCKS, BLOCK_TOKENS = 30, 32
PROMPT_TOKENS, ANSWER_TOKENS = 250, 80


@asynccontextmanager
async def gateway(folder: Path, policy: str, **changes: Any) -> AsyncIterator[tuple[Server, LocalNode]]:
    """One whose engine has been told to expect little of answers, so that too many start at once."""

    def expect_little(driver: Any) -> None:
        if driver.scheduling is not None:
            driver.scheduling.predictor = Expects(lambda request: 2)

    settings = {
        "scheduling_policy": policy,
        "num_kv_blocks": NUM_BLOCKS,
        "max_model_len": 512,
        "max_num_seqs": 6,
    }
    async with nodes.engine(**settings, lane_refit_s=0.5) as node:
        await node.run_on_engine(expect_little)
        config = demo_config(folder / "data", **changes)
        async with served(config, node) as server:
            yield server, node


async def ask(http: Http, name: str, prompt: list[int], num_tokens: int, model: str = "demo") -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    await told(http.post(COMPLETIONS, json=body, headers={"X-Request-Id": name}))


def traffic(http: Http, name: str, num_requests: int) -> list[asyncio.Task[None]]:
    """Three of them fit the device when they start, and two when they end."""
    models = ("demo", "pirate", "robot")
    return [
        asyncio.create_task(
            ask(http, f"{name}-{at}", nodes.text((name, at), PROMPT_TOKENS), ANSWER_TOKENS, models[at % 3])
        )
        for at in range(num_requests)
    ]


async def busy_state(http: Http) -> dict[str, Any]:
    """The first in which requests of this caller run and wait."""

    async def look() -> dict[str, Any] | None:
        state: dict[str, Any] = await told(http.get(STATE))
        return state if state["waiting"]["total"] and state["running"]["total"] else None

    return await settle(look)


async def test_lanes_reasons_and_only_ones_own_requests(tmp_path: Path) -> None:
    async with (
        gateway(tmp_path, "mlq", operator_keys=KEYS) as (server, node),
        Http(server.url, headers=bearer(KEYS[0])) as first,
        Http(server.url, headers=bearer(KEYS[1])) as second,
    ):
        asked = traffic(first, "first", 4) + traffic(second, "second", 4)
        state = await busy_state(second)
        check_busy(state)
        facts, counts = node.figures().facts, (await told(second.get(STATE)))["counts"]
        check_facts(facts, state, counts.get("preempted", 0))
        few = await told(first.get(f"{STATE}?limit=1"))
        assert len(few["waiting"]["requests"]) <= 1 and few["waiting"]["total"] >= 1
        assert (await metrics_of(first))['overture_lane_quota_tokens{lane="0"}'] > 0
        await asyncio.gather(*asked)
        while not (state := await told(first.get(STATE)))["counts"].get("refits"):
            await ask(first, "more", nodes.text("more", 20), 2)
        check_after(state, await metrics_of(second))
        facts = node.figures().facts
        assert facts is not None and (facts.num_requests, facts.num_tokens, facts.answer_tokens) == (0, 0, 0)
        assert facts.free_tokens == (NUM_BLOCKS - 1) * BLOCK_TOKENS
        await node.drain(0)
        draining = node.figures().facts
        assert draining is not None and not draining.is_open
    assert state["counts"]["preempted"] > 0, "or there was too much memory"


def check_busy(state: dict[str, Any]) -> None:
    """As the second caller sees it: others' requests are nobody else's business."""
    engine, lanes = state["engine"], state["lanes"]
    waiting, running = state["waiting"]["requests"], state["running"]["requests"]
    assert all("second" in each["request_id"] for each in (*waiting, *running))
    assert "first" not in str(state)
    assert len(waiting) == state["waiting"]["total"] < engine["num_waiting"]
    assert sum(state["num_by_reason"].values()) == engine["num_waiting"]
    assert set(state["num_by_reason"]) >= {each["defer_reason"] for each in waiting}
    assert all(each["waited_s"] >= 0 and each["ran_s"] is None for each in waiting)
    assert all(each["ran_s"] >= 0 and each["defer_reason"] is None for each in running)
    assert all(each["lane"] is not None and each["size_tokens"] > 20 for each in running)
    assert len(lanes["quota_tokens"]) == len(lanes["used_tokens"]) == len(lanes["boundaries"]) + 1
    assert (engine["num_kv_blocks"], engine["block_size"]) == (NUM_BLOCKS, BLOCK_TOKENS)
    assert sum(lanes["quota_tokens"]) == (NUM_BLOCKS - 1) * BLOCK_TOKENS
    assert sum(lanes["used_tokens"]) > 0 and engine["num_free_kv_blocks"] < NUM_BLOCKS


def check_facts(facts: NodeFacts | None, state: dict[str, Any], num_preempted: int) -> None:
    """Taken just after the state, in which some of eight long requests run and others wait; none of them has ended.

    num_preempted: that often one lost its place until now.
    """
    assert facts is not None and facts.is_open
    assert state["engine"]["num_waiting"] + state["engine"]["num_running"] <= facts.num_requests <= 8
    # Answers are predicted to be of two tokens, whatever they are.
    # One that was preempted may find its blocks where they were, and has next to nothing to compute.
    num_computed = max(facts.queued.num - num_preempted, 0)
    most_tokens = 8 * (PROMPT_TOKENS + ANSWER_TOKENS)
    assert (PROMPT_TOKENS - 10) * num_computed <= facts.queued_tokens < facts.num_tokens < most_tokens
    assert facts.queued_tokens >= facts.queued.num
    assert facts.answer_tokens is not None and facts.free_tokens < NUM_BLOCKS * BLOCK_TOKENS
    both = facts.running + facts.queued
    assert both.most == 64 and both.total <= 2 * (16 + 64)
    perf = facts.perf
    assert perf is not None and 0 < perf.decode.seconds(facts.running, facts.num_tokens) < 10
    assert 0 < perf.prompt_token_s < 1


def check_after(state: dict[str, Any], metrics: dict[str, float]) -> None:
    engine, counts, errors = state["engine"], state["counts"], state["length_errors"]
    assert engine["num_running"] == engine["num_waiting"] == sum(state["lanes"]["used_tokens"]) == 0
    assert counts["admitted"] >= 8 + counts["preempted"]
    assert errors["num_answers"] >= 8
    assert 0 < state["seconds"]["decide"] < state["seconds"]["step"]
    assert metrics["overture_scheduling_admitted_total"] == counts["admitted"]
    assert metrics['overture_scheduling_preempted_total{kind="recompute"}'] == counts["preempted"]
    # Of all eight, and of one or more of two tokens.
    assert metrics['overture_node_answer_tokens_total{node="local"}'] >= 8 * ANSWER_TOKENS + 2
    assert metrics['overture_node_kv_blocks{node="local"}'] == NUM_BLOCKS
    assert metrics["overture_length_error_tokens_count"] == errors["num_answers"]
    assert metrics["overture_scheduling_refits_total"] >= 1
    waiting = (value for name, value in metrics.items() if name.startswith("overture_scheduling_waiting"))
    assert sum(waiting) == 0


async def test_vllms_own_queue_tells_what_it_knows(tmp_path: Path) -> None:
    async with gateway(tmp_path, "vllm") as (server, node), Http(server.url) as http:
        asked = traffic(http, "any", 5)
        state = await busy_state(http)
        waiting = state["waiting"]["requests"]
        assert state["policy"] == "vllm" and state["lanes"] is state["length_errors"] is None
        assert state["waiting"]["total"] == state["engine"]["num_waiting"]
        assert all("any" in each["request_id"] for each in waiting)
        assert {each["defer_reason"] for each in waiting} == set(state["num_by_reason"])
        facts = node.figures().facts
        assert facts is not None and 0 < facts.num_requests <= 5
        assert facts.answer_tokens == 0, "nobody predicts answers"
        await asyncio.gather(*asked)
        metrics, counts = await metrics_of(http), (await told(http.get(STATE)))["counts"]
        assert metrics['overture_scheduling_preempted_total{kind="recompute"}'] == counts["preempted"]
        assert metrics['overture_scheduling_waiting{reason="queued"}'] == 0
        for limit, status in (("0", 200), ("-1", 400), ("many", 400), ("²", 400)):
            await told(http.get(f"{STATE}?limit={limit}"), status)
