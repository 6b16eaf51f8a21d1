"""Several nodes are one: sessions stay where their KV is, a node that fails costs as little as it can, and figures add up."""

import asyncio
import itertools
from pathlib import Path
from typing import Any, get_origin

import pytest
from msgspec import Struct, structs

from engine_bridge.protocol.engine_request import ChatMessage, EngineRequest, RequestId
from engine_bridge.protocol.errors import EngineUnavailable
from engine_bridge.protocol.figures import (
    EngineState,
    GrammarStats,
    LaneStats,
    LengthErrors,
    RequestState,
    SchedulingStats,
    TokenizerStats,
)
from engine_bridge.protocol.node import Advisory, AdvisoryReport, Delta, SessionHint, SseReply
from gateway.nodes import members
from gateway.nodes import router_figures as figures
from gateway.nodes.router import Router
from kvtiers.stats import DiskTierStats, HostStats, PeerStats, TierStats
from tests.adapter_corpus import make_adapter
from tests.unit.cluster.catalog_node import MODULES

from .nodes import PlacedNode, TestPlacement, routed
from .parts import until

NAMES = map("m{}".format, itertools.count())


def question(session: str = "s", **fields: Any) -> EngineRequest:
    fields |= {"messages": (ChatMessage("user", "hi"),)}
    return EngineRequest(request_id=RequestId(next(NAMES)), tenant="t", session_id=session, **fields)


def asking(router: Router, request: EngineRequest) -> asyncio.Task[list[Delta]]:
    async def collect() -> list[Delta]:
        return [delta async for delta in router.generate(request)]

    return asyncio.create_task(collect())


async def answered(router: Router, placement: TestPlacement, name: str, session: str = "s") -> None:
    """A turn of a session was answered on this node, and so it is at home there."""
    router.remember([("t", session, name)])
    node = placement.inner[name]
    number = len(node.answers)
    task = asking(router, question(session))
    (await node.asked(number)).finish("one")
    await task


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_a_request_follows_its_advisory_and_says_where_the_kv_is() -> None:
    async with routed("a", "b") as (router, placement):
        await answered(router, placement, "b")
        for number in range(1, 4):
            router.remember([("t", f"busy{number}", "b")])
            asking(router, question(f"busy{number}"))
            await placement.inner["b"].asked(number)
        await router.advise(Advisory(advisory_id="adv", session_id="s", tenant="t"), lambda report: None)
        told = await placement.inner["a"].told()
        assert told.advisory.kv_from == "b:1"
        asking(router, question())
        answer = await placement.inner["a"].asked()
        assert answer.request.kv_from == "b:1"
        answer.finish("x")
        assert router.home_of("t", "s") == "a"
        # What it left behind makes room for others.
        await until(lambda: placement.inner["b"].ended_sessions == [("t", "s")])
        assert placement.inner["a"].ended_sessions == []


async def test_a_hint_about_a_session_reaches_each_node_that_it_may_be_on() -> None:
    async with routed("a", "b") as (router, placement):
        router.hint_session(hint := SessionHint(session_id="s", tenant="t", keep_s=60.0))
        await until(lambda: all(node.session_hints == [hint] for node in placement.inner.values()))


async def test_kv_is_erased_on_all_nodes_and_one_that_cannot_is_told() -> None:
    async with routed("a", "b") as (router, placement):
        assert await router.erase_kv("t") == 6
        assert [node.erased for node in placement.inner.values()] == [["t"], ["t"]]
        placement.inner["a"].erase_error = EngineUnavailable("the engine is starting", code="starting")
        with pytest.raises(EngineUnavailable, match="starting"):
            await router.erase_kv("t")
        assert placement.inner["b"].erased == ["t", "t"], "the others have erased all the same"


async def test_an_advisory_is_taken_back_where_its_request_does_not_come() -> None:
    reports: list[AdvisoryReport] = []
    async with routed("a", "b") as (router, placement):
        await router.advise(Advisory(advisory_id="adv", session_id="s", tenant="t"), reports.append)
        await placement.inner["a"].told()
        await router.drain_node("a", 0.0)
        asking(router, question())
        (await placement.inner["b"].asked()).finish("x")
        await until(lambda: bool(reports))
        assert [report.state for report in reports] == ["cancelled"]


async def test_stopping_reaches_the_node_and_stops_a_second_try() -> None:
    async with routed("a", "b") as (router, placement):
        request = question()
        task = asking(router, request)
        await placement.inner["a"].asked()
        assert await router.cancel(request.request_id)
        assert (await task)[-1].finish_reason == "stopped"
        assert not await router.cancel(request.request_id)

        router.remember([("t", "other", "b")])
        request = question("other")
        task = asking(router, request)
        await placement.inner["b"].asked()
        placement.kill("b")
        assert await router.cancel(request.request_id)
        assert (await task)[-1].finish_reason == "stopped"
        assert len(placement.inner["a"].answers) == 1


ASKER = EngineRequest(tenant="t", session_id="s")


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_streamed_call_is_streamed_by_another_node_unless_something_was_passed_on(
    has_begun: bool,
) -> None:
    async with routed("a", "b") as (router, placement):
        reply = await router.serve("chat", {"stream": True}, {}, ASKER)
        assert isinstance(reply, SseReply)
        call = await placement.inner["a"].called()
        if has_begun:
            call.events.put_nowait(b"one")
            assert await anext(reply.events) == b"one"
            placement.kill("a")
            with pytest.raises(EngineUnavailable):
                await anext(reply.events)
            await reply.events.aclose()  # type: ignore[attr-defined]
            assert placement.inner["b"].streams == []
            return
        reading = asyncio.ensure_future(anext(reply.events))
        placement.kill("a")
        call = await placement.inner["b"].called()
        call.events.put_nowait(b"here")
        call.events.put_nowait(None)
        assert await reading == b"here"
        assert [event async for event in reply.events] == []
        assert router.homes.num_requests("b") == 0
        assert router.counts() == {"new": 1, "tried_again": 1}


async def test_a_silent_node_gets_nothing_and_then_its_answers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "LOOK_EVERY_S", 0.005)
    async with routed("a", "b") as (router, placement):
        begun, waiting = router.generate(question()), asking(router, question())
        first = asyncio.ensure_future(anext(begun))
        (await placement.inner["a"].asked(1)).say("one")
        await first
        # As after SIGSTOP: the connection stands, and nothing comes over it.
        link = placement.links["a"]
        link.data_received = lambda data: None  # type: ignore[method-assign]
        link.reported_s -= members.QUIET_S
        assert [node.state for node in router.nodes_state()] == ["quiet", "ready"]
        asking(router, question())
        answer = await placement.inner["b"].asked()
        assert answer.request.kv_from == "", "nor does it give any KV"
        answer.finish("x")
        link.reported_s -= members.SILENT_S
        with pytest.raises(EngineUnavailable):
            await anext(begun)
        (await placement.inner["b"].asked(1)).finish("elsewhere")
        assert text(await waiting) == "elsewhere"


async def test_after_its_drain_the_router_takes_nothing_and_its_nodes_still_serve_others() -> None:
    async with routed("a") as (router, placement):
        running = asking(router, question())
        answer = await placement.inner["a"].asked()
        assert not await router.drain(0.01)
        answer.finish("end")
        assert text(await running) == "end"
        assert await router.drain(1.0)
        assert placement.inner["a"].state == "ready"
        assert router.progress.state == "draining"
        with pytest.raises(EngineUnavailable, match="going down") as refused:
            await asking(router, question())
        assert refused.value.code == "draining"
    assert placement.is_closed


async def test_it_is_ready_as_soon_as_one_node_is_and_failed_when_all_are() -> None:
    async with routed("a", "b") as (router, placement):
        assert router.progress.state == "ready"
        for name, expected in (("a", "ready"), ("b", "failed")):
            placement.inner[name].state = "failed"
            await until(lambda name=name: placement.nodes[name].progress.state == "failed")  # type: ignore[misc]
            assert router.progress.state == expected
        placement.inner["a"].state = "rebuilding"
        await until(lambda: router.progress.state == "rebuilding")


async def test_tools_are_offered_only_where_each_node_that_is_up_can_have_them() -> None:
    async with routed("node-1", "node-2") as (router, placement):
        assert router.can_use_tools
        placement.inner["node-1"].can_use_tools = False
        await until(lambda: not router.can_use_tools)
        placement.kill("node-1")
        await until(lambda: router.can_use_tools)


async def test_a_node_is_drained_once_those_that_stay_serve_its_adapters(tmp_path: Path) -> None:
    async with routed("a", "b") as (router, placement):
        placement.kill("b")
        path = make_adapter(tmp_path / "large", modules=MODULES, rank=16)
        assert (await router.load_adapter({"lora_name": "large", "lora_path": str(path)})).status == 200
        placement.inner["b"] = back = PlacedNode("b")
        back.may_load.clear()
        await placement.connect("b")
        draining = asyncio.create_task(router.drain_node("a", 10.0))
        await until(lambda: ("load", "large") in back.calls)
        early = asking(router, question("early", adapter="large"))
        answer = await placement.inner["a"].asked()
        back.may_load.set()
        await until(lambda: router.nodes_state()[0].state == "draining")
        assert not draining.done()
        answer.finish("at a")
        assert await draining and text(await early) == "at a"
        late = asking(router, question("late", adapter="large"))
        (await back.asked()).finish("at b")
        assert text(await late) == "at b"


def full(kind: type[Struct], value: int, **fields: Any) -> Any:
    """With every field set: numbers to `value`."""
    made: dict[str, Any] = {}
    for field in structs.fields(kind):
        if field.type is bool:
            made[field.name] = True
        elif field.type in (int, float):
            made[field.name] = value
        elif get_origin(field.type) is dict:
            made[field.name] = {"both": value, f"only {value}": value}
    return kind(**(made | fields))


def lanes(*tokens: int) -> LaneStats:
    edges = (0.5,) * (len(tokens) - 1)
    return LaneStats(boundaries=edges, num_waiting=tokens, quota_tokens=tokens, used_tokens=tokens)


def tiers(value: int, problem: str | None = None) -> TierStats:
    host, disk, peers = (full(kind, value) for kind in (HostStats, DiskTierStats, PeerStats))
    return TierStats(host=host, disk=disk, peers=peers, problem=problem)


def state(name: str, value: int) -> EngineState:
    """Of an engine with two waiting and two running requests, whose figures are `value`."""
    one = RequestState(request_id=name, priority=0, size_tokens=1, num_output_tokens=0)
    requests = [structs.replace(one, request_id=f"{name}{at}") for at in range(2)]
    errors = LengthErrors(num_answers=value, sum_tokens=value, num_within_p90=value, num_within={16: value})
    fields: dict[str, Any] = {"length_calibration": {"both": (value, 1, 2), name: (value, 0, 0)}}
    fields |= {"policy": "mlq", "num_by_reason": {"queued": value}, "lanes": lanes(value, 2 * value)}
    return EngineState(
        state="ready",
        num_steps=value,
        num_rebuilds=value,
        scheduling=full(SchedulingStats, value, **fields, length_errors=errors),
        waiting=requests,
        running=requests,
        num_waiting=2,
        num_running=2,
    )


def test_engines_are_one_with_the_first_requests_of_all() -> None:
    for kind, put_together in ((TokenizerStats, figures.tokenizers_of), (GrammarStats, figures.grammars_of)):
        assert put_together([full(kind, 1), full(kind, 2)]) == full(kind, 3)  # type: ignore[operator]
    both = figures.engine_state_of([state("a", 1), state("b", 3)], "rebuilding", 3)
    assert [request.request_id for request in both.waiting] == ["a0", "a1", "b0"]
    assert (both.num_waiting, both.num_running) == (4, 4)
    assert (both.state, both.num_steps, both.num_rebuilds) == ("rebuilding", 4, 4)
    kv = figures.tiers_of([tiers(1), tiers(3, "no room")])
    assert kv is not None and kv.problem == "no room"
    assert (kv.host.num_blocks, kv.disk.num_hits, kv.peers.bytes_fetched) == (4, 4, 4)
    # Speeds and delays do not add up.
    assert (kv.disk.bytes_per_s, kv.disk.write_lag_s, kv.disk.is_on) == (2.0, 3, True)
    assert kv.peers.misses == {"both": 4, "only 1": 1, "only 3": 3}
    queue = both.scheduling
    assert queue is not None and queue.lanes == lanes(4, 8) and queue.block_size == 1
    assert (queue.num_running, queue.num_kv_blocks, queue.num_by_reason, queue.counts["both"]) == (
        4,
        4,
        {"queued": 4},
        4,
    )
    assert queue.length_calibration == {"both": (4, 2, 4), "a": (1, 0, 0), "b": (3, 0, 0)}
    assert queue.length_errors is not None and queue.length_errors.num_within == {16: 4}
