"""Advisories on the real engine: what they bring to the device, what they cost, and that they change no token.

Runs before the shared engine starts (conftest).
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig
from engine_bridge.local_node import LocalNode
from engine_bridge.protocol.engine_request import EngineRequest
from engine_bridge.protocol.errors import EngineUnavailable, NotSupported
from engine_bridge.protocol.node import ADVISORY_ENDS, Advisory, AdvisoryReport, KvSources, pack_token_ids
from engine_bridge.sleeping import Sleep

from . import nodes
from .conftest import engine_has, num_free_blocks, settle
from .nodes import WaitsForTheDisk, text

BLOCK_TOKENS = 32
NUM_DEVICE_BLOCKS = 12  # of which vLLM keeps one: two sessions of 150 tokens
HISTORY_TOKENS = 128
WHOLE_DEVICE = (
    BLOCK_TOKENS * (NUM_DEVICE_BLOCKS - 1) - 12
)  # tokens of a prompt that with its answer needs every block
_ids = itertools.count()


@asynccontextmanager
async def engine(folder: Path, host_bytes: int = 256 << 20) -> AsyncIterator[tuple[LocalNode, KvTiers]]:
    config = TiersConfig(host_bytes=host_bytes, disk_bytes=512 << 20, folder=folder)
    tiers = KvTiers(config, policy=WaitsForTheDisk())
    size = {"num_kv_blocks": NUM_DEVICE_BLOCKS, "max_model_len": 352}
    async with nodes.engine(tiers, enable_prompt_embeds=True, **size) as node:
        yield node, tiers


class Watch:
    """The reports of one advisory."""

    def __init__(self) -> None:
        self.reports: list[AdvisoryReport] = []

    @property
    def states(self) -> list[str]:
        return [report.state for report in self.reports]

    async def until(self, *states: str) -> AdvisoryReport:
        await settle(lambda: self.states and self.states[-1] in states)
        return self.reports[-1]


async def generate(
    node: LocalNode, prompt: Sequence[int] | str, session: str, adapter: str | None = None, tenant: str = ""
) -> tuple[list[int], KvSources]:
    said = await nodes.generate(node, prompt, 4, session_id=session, adapter=adapter or "", tenant=tenant)
    return said.token_ids, said.kv


async def advise(node: LocalNode, session: str, **fields: object) -> tuple[Watch, str]:
    watch, name = Watch(), f"a{next(_ids)}"
    advisory = Advisory(advisory_id=name, session_id=session, **fields)
    await node.advise(advisory, watch.reports.append)
    return watch, name


async def wash(node: LocalNode) -> None:
    """Overwrite all of the device's KV with what nobody asks for again."""
    for _ in range(2):
        await generate(node, text(("wash", next(_ids)), WHOLE_DEVICE), f"wash{next(_ids)}")


def forget_host(tiers: KvTiers) -> None:
    assert tiers.store is not None and tiers.store.flush()
    tiers.store.drop_host()


async def left_behind(
    node: LocalNode, tiers: KvTiers, session: str, *, keeps_host: bool = False
) -> list[int]:
    """A session whose KV is on disk, and in host memory if that is kept: its prompt."""
    history = text(session, HISTORY_TOKENS + 1)
    await generate(node, history, session)
    await wash(node)
    if not keeps_host:
        forget_host(tiers)
    return history


def moved_bytes(tiers: KvTiers) -> tuple[int, int]:
    """Return the bytes that the copier has brought to the device so far, and those that the disk has read."""
    stats = tiers.stats()
    assert tiers.copier is not None and stats is not None
    return tiers.copier.back.num_bytes, stats.disk.bytes_read


async def test_promotion(tmp_path: Path) -> None:
    """One engine for all of it: building one takes seconds."""
    async with engine(tmp_path) as (node, tiers):
        await settle(lambda: tiers.link is not None)  # measured by itself, as nobody wants anything
        assert tiers.link is not None and 1e8 < tiers.link.h2d_bytes_per_s < 1e12
        await a_session_comes_up_from_disk_and_says_the_same(node, tiers)
        await prefixes_given_as_ids_and_other_tenants(node, tiers)
        await an_advisory_that_is_too_late_is_so_scored(node, tiers)
        await wrong_and_retracted_ones_cost_no_memory(node, tiers)
        await more_guesses_than_memory_leave_room_for_requests(node, tiers)
        await an_arrival_time_is_waited_for(node, tiers)
        await drafts_are_computed_ahead_and_kept_nowhere(node, tiers)
        await a_failing_copy_costs_the_advice_and_no_memory(node, tiers)
        await embeddings_are_a_prompt_like_their_tokens_with_kv_of_their_own(node)
        await a_sleep_ends_answers_and_costs_no_conversation_its_kv(node)
        assert await num_free_blocks(node) == NUM_DEVICE_BLOCKS - 1
        await settle(lambda: tiers.store.check_invariants() == 0)
        history, long = text("restart", HISTORY_TOKENS + 1), text("long", 9 * BLOCK_TOKENS + 2)
        await generate(node, history, "restart")
        said, _ = await generate(node, long, "long")
        await generate(node, history, "adapted", "pirate")
        open_, _ = await advise(node, "adapted", adapter="pirate")
        await open_.until("warm")
        host_bytes = 3 * tiers.store.shape.block_bytes
    await open_.until(*ADVISORY_ENDS)  # the engine that ends tells so
    async with engine(tmp_path, host_bytes) as (node, tiers):
        await a_restart_knows_a_session_by_its_ids(node, tiers, history, long, said)


async def a_session_comes_up_from_disk_and_says_the_same(node: LocalNode, tiers: KvTiers) -> None:
    for adapter in (None, "pirate"):
        session, history = f"s-{adapter}", text(("history", adapter), HISTORY_TOKENS + 1)
        await generate(node, history, session, adapter)
        follow_up = history + text(("turn", adapter), 20)
        await wash(node)
        plain, kv = await generate(node, follow_up, session, adapter)
        assert kv.device == 0 and kv.host == HISTORY_TOKENS
        await wash(node)
        forget_host(tiers)
        free, moved = await num_free_blocks(node), moved_bytes(tiers)
        watch, _ = await advise(node, session, adapter=adapter)
        warm = await watch.until("warm")
        assert warm.device_tokens == warm.num_tokens == HISTORY_TOKENS
        assert warm.disk_bytes > 0 and warm.host_bytes == warm.disk_bytes  # read, then copied
        copied, read = moved_bytes(tiers)
        assert (warm.host_bytes, warm.disk_bytes) == (copied - moved[0], read - moved[1])
        assert await num_free_blocks(node) == free  # promoted blocks are anybody's
        answer, kv = await generate(node, follow_up, session, adapter)
        assert answer == plain
        assert kv.device == HISTORY_TOKENS
        hit = await watch.until("hit")
        assert hit.lead_s is not None and hit.lead_s > 0
        assert watch.states == ["staging", "warm", "hit"]


async def prefixes_given_as_ids_and_other_tenants(node: LocalNode, tiers: KvTiers) -> None:
    history = text("ids", HISTORY_TOKENS + 1)
    await generate(node, history, "mine", tenant="one")
    await wash(node)
    stranger, _ = await advise(node, "mine", tenant="two")
    assert (await stranger.until("unknown")).num_tokens == 0
    stranger, _ = await advise(node, "mine", tenant="two", token_ids=pack_token_ids(history))
    assert (await stranger.until("unknown")).device_tokens == 0  # another tenant's KV has other keys
    other_adapter, _ = await advise(node, "mine", tenant="one", adapter="robot")
    await other_adapter.until("unknown")
    mine, name = await advise(node, "another name", tenant="one", token_ids=pack_token_ids(history))
    assert (await mine.until("warm")).device_tokens == HISTORY_TOKENS
    node.retract(name, is_expired=False)


async def an_advisory_that_is_too_late_is_so_scored(node: LocalNode, tiers: KvTiers) -> None:
    history = await left_behind(node, tiers, "late")
    watch = Watch()
    late = Advisory(advisory_id="late", session_id="late")
    advising = asyncio.create_task(node.advise(late, watch.reports.append))
    _, kv = await generate(node, [*history, 7], "late")
    await advising
    assert kv.recomputed < BLOCK_TOKENS  # what the advisory has not brought, the request brings itself
    report = await watch.until("late", "hit", "warm")
    assert report.state != "late" or (report.late_s is not None and report.late_s > 0)
    node.retract("late", is_expired=False)


async def wrong_and_retracted_ones_cost_no_memory(node: LocalNode, tiers: KvTiers) -> None:
    await left_behind(node, tiers, "wrong", keeps_host=True)
    free = await num_free_blocks(node)
    watch, name = await advise(node, "wrong")
    await watch.until("warm")
    _, kv = await generate(node, text("something else", 100), "wrong")
    assert kv.device == 0
    await watch.until("wasted")
    await left_behind(node, tiers, "wrong")
    moved = moved_bytes(tiers)
    watch, name = await advise(node, "wrong")
    node.retract("not this one", is_expired=False)
    node.retract(name, is_expired=False)
    cancelled = await watch.until("cancelled")
    copied, read = moved_bytes(tiers)
    assert (cancelled.host_bytes, cancelled.disk_bytes) == (copied - moved[0], read - moved[1])
    await wash(node)
    watch, name = await advise(node, "wrong")
    await watch.until("warm")
    node.retract(name, is_expired=True)
    await watch.until("wasted")
    again, _ = await advise(node, "wrong")
    newer, name = await advise(node, "wrong")
    await again.until("cancelled")
    await newer.until("warm")
    node.retract(name, is_expired=False)
    unknown, _ = await advise(node, "nobody has heard of it")
    await unknown.until("unknown")
    assert await num_free_blocks(node) == free


async def more_guesses_than_memory_leave_room_for_requests(node: LocalNode, tiers: KvTiers) -> None:
    histories = {f"many{n}": text(("many", n), HISTORY_TOKENS + 1) for n in range(6)}
    for session, history in histories.items():
        await generate(node, history, session)
    await wash(node)
    forget_host(tiers)
    watches = {session: (await advise(node, session))[0] for session in histories}
    await asyncio.gather(*(watch.until("warm", "host") for watch in watches.values()))
    assert {"warm", "host"} == {watch.states[-1] for watch in watches.values()}
    assert await num_free_blocks(node) == NUM_DEVICE_BLOCKS - 1
    async with asyncio.timeout(30):  # half of an advisory's life
        long, _ = await generate(node, text("needy", WHOLE_DEVICE), "somebody else")
    assert len(long) == 4
    for session, history in histories.items():
        _, kv = await generate(node, [*history, 5], session)
        assert kv.recomputed < 2 * BLOCK_TOKENS
        assert watches[session].states[-1] in ("hit", "late")


async def an_arrival_time_is_waited_for(node: LocalNode, tiers: KvTiers) -> None:
    await left_behind(node, tiers, "arrival")
    watch, _ = await advise(node, "arrival", expected_arrival_s=3.0)
    waiting = await watch.until("host")
    assert waiting.device_tokens == 0
    issued_s = time.monotonic()
    warm = await watch.until("warm")  # by itself, while nothing runs
    assert time.monotonic() - issued_s > 0.3
    assert warm.device_tokens == HISTORY_TOKENS
    low, _ = await advise(node, "arrival", priority=1)
    await low.until("warm")  # it is there already
    await wash(node)
    low, name = await advise(node, "arrival", priority=1)
    assert (await low.until("host")).device_tokens == 0
    node.retract(name, is_expired=False)
    urgent, name = await advise(node, "arrival", priority=-1, expected_arrival_s=600.0)
    assert (await urgent.until("warm")).device_tokens == HISTORY_TOKENS
    node.retract(name, is_expired=False)


async def drafts_are_computed_ahead_and_kept_nowhere(node: LocalNode, tiers: KvTiers) -> None:
    await wash(node)
    saved = tiers.store.stats().host.num_saved
    draft = "Please remember this: " + " ".join(f"the {n}th of them is called Anna." for n in range(12))

    num_tokens = await node.prefill(nodes.request(f"{draft} And the la", 4, session_id="drafted"))
    assert num_tokens > 60
    assert tiers.store.stats().host.num_saved == saved
    assert await node.prefill(nodes.request(draft, 4, session_id="drafted")) <= num_tokens  # backspace
    _, kv = await generate(node, f"{draft} And the last one is Eve.", "drafted")
    assert kv.device >= num_tokens - BLOCK_TOKENS
    assert tiers.store.stats().host.num_saved > saved  # now it has been asked


async def a_failing_copy_costs_the_advice_and_no_memory(node: LocalNode, tiers: KvTiers) -> None:
    history = text("failing", HISTORY_TOKENS + 1)
    plain, _ = await generate(node, history, "failing")
    await wash(node)
    copier = tiers.copier

    class Broken:
        """The copier, with a fault in its way to the device."""

        overlaps = copier.overlaps
        out, back = copier.out, copier.back

        def to_device(self, *args: object) -> None:
            raise RuntimeError("no such address")

    free = await num_free_blocks(node)
    tiers.copier = Broken()
    try:
        watch, _ = await advise(node, "failing")
        await watch.until("cancelled")
    finally:
        tiers.copier = copier
    assert await num_free_blocks(node) == free
    assert node.figures().num_rebuilds == 0
    assert (await generate(node, history, "failing"))[0] == plain


async def embeddings_are_a_prompt_like_their_tokens_with_kv_of_their_own(node: LocalNode) -> None:
    import torch
    from safetensors.torch import load_file

    matrix = load_file(nodes.small().model / "model.safetensors")["model.embed_tokens.weight"]

    async def complete(tenant: str = "", **prompt: Any) -> tuple[list[int], int]:
        """The answer's ids, and how many tokens of the prompt were not computed."""
        body = {"model": "demo", "max_tokens": 8, "temperature": 0, "return_token_ids": True} | prompt
        reply = await node.serve("completions", body, {}, EngineRequest(tenant=tenant))
        assert reply.status == 200, reply.body
        said = json.loads(reply.body)
        details = said["usage"]["prompt_tokens_details"] or {}
        return said["choices"][0]["token_ids"], details.get("cached_tokens") or 0

    def embedded(ids: Sequence[int]) -> str:
        file = io.BytesIO()
        torch.save(matrix[list(ids)], file)
        return base64.b64encode(file.getvalue()).decode()

    for adapter in ("demo", "pirate"):
        ids, others = text(("embedded", adapter), 70), text(("embedded, too", adapter), 70)
        asked = {"model": adapter, "prompt_embeds": embedded(ids)}
        plain, _ = await complete(model=adapter, prompt=ids)
        assert await complete(**asked) == (plain, 0), "KV of the same tokens is found by their ids only"
        assert await complete(**asked) == (plain, 64)
        assert await complete(tenant="another", **asked) == (plain, 0)
        await wash(node)
        assert await complete(**asked) == (plain, 64), "from host memory"
        other, num_cached = await complete(model=adapter, prompt_embeds=embedded(others))
        assert num_cached == 0 and other == (await complete(model=adapter, prompt=others))[0]
    grammar = {"structured_outputs": {"regex": "[ab]{3}"}, "max_tokens": 9}
    said, _ = await complete(prompt_embeds=embedded(text("held", 40)), **grammar)
    assert len(said) > 1, "a grammar can hold an answer to embeddings, as any other"
    wrong = {"model": "demo", "prompt_embeds": embedded([1])[:-8]}
    reply = await node.serve("completions", wrong, {}, EngineRequest())
    assert reply.status == 400 and json.loads(reply.body)["error"]["param"] == "prompt_embeds"


async def a_sleep_ends_answers_and_costs_no_conversation_its_kv(node: LocalNode) -> None:
    """On a CPU vLLM gives no memory up, so here it is overwritten meanwhile."""
    with pytest.raises(NotSupported, match="--enable-sleep-mode"):
        await node.sleep("abort", 1)
    node._sleep = Sleep("", node._thread, node._streams)
    history = text("asleep", HISTORY_TOKENS + 1)
    for adapter in (None, "pirate"):
        await generate(node, history, f"asleep-{adapter}", adapter)
    said = {
        adapter: await generate(node, history, f"asleep-{adapter}", adapter) for adapter in (None, "pirate")
    }
    running = asyncio.create_task(nodes.generate(node, text("cut off", 20), 300))
    await engine_has(node, 1)
    with pytest.raises(EngineUnavailable, match="still run") as busy:
        await node.sleep("wait", 0)
    assert (busy.value.code, node.state) == ("busy", "ready")
    watch, _ = await advise(node, "asleep-None")
    await node.sleep("abort", 60)
    await node.sleep("abort", 60)
    with pytest.raises(EngineUnavailable, match="put to sleep"):
        await running
    assert node.state == "asleep" and watch.states[-1] == "cancelled"
    for refused in (generate(node, history, "asleep-None"), advise(node, "asleep-None")):
        with pytest.raises(EngineUnavailable) as asleep:
            await refused
        assert asleep.value.code == "asleep"

    def overwrite(driver: Any) -> None:
        from engine_bridge.driver.in_process import kv_caches_of

        for layer in kv_caches_of(driver.engine):
            layer.fill_(7)

    await node.run_on_engine(overwrite)
    await node.wake_up()
    await node.wake_up()
    assert node.state == "ready"
    for adapter, (before, _) in said.items():
        after, kv = await generate(node, history, f"asleep-{adapter}", adapter)
        assert (after, kv.device, kv.host) == (before, 0, HISTORY_TOKENS)
    watch, _ = await advise(node, "asleep-None")
    assert (await watch.until("warm")).device_tokens == HISTORY_TOKENS


async def a_restart_knows_a_session_by_its_ids(
    node: LocalNode, tiers: KvTiers, history: list[int], long: list[int], said: list[int]
) -> None:
    """And reads a conversation that is larger than its host memory."""
    answer, kv = await generate(node, long, "long")
    assert (answer, kv.disk) == (said, 9 * BLOCK_TOKENS)
    stats = tiers.stats()
    assert stats is not None and stats.host.num_carried >= 9 - 2, "all but the last pieces"
    await settle(lambda: tiers.store.check_invariants() == 0)
    forgotten, _ = await advise(node, "restart")
    await forgotten.until("unknown")
    watch, _ = await advise(node, "restart", token_ids=pack_token_ids(history))
    assert (await watch.until("warm")).device_tokens == HISTORY_TOKENS
    _, kv = await generate(node, [*history, 9], "restart")
    assert kv.device == HISTORY_TOKENS
    await watch.until("hit")
