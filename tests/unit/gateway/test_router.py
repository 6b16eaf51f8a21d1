"""Several nodes are one: sessions stay where their KV is, advisories lead, and a node that fails costs as little as it can."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from engine_bridge.protocol.errors import EngineUnavailable, InvalidRequest
from engine_bridge.protocol.node import (
    Advisory,
    AdvisoryReport,
    ChatMessage,
    Delta,
    GenerateRequest,
    JsonReply,
    RequestId,
    SseReply,
)
from engine_bridge.protocol.request_context import RequestContext
from gateway.metrics.router import RouterCollector
from gateway.nodes import members
from gateway.nodes.adapter_sync import AdapterSync
from gateway.nodes.chosen_node import HOW
from gateway.nodes.router import Router
from tests.adapter_corpus import make_adapter
from tests.unit.cluster.catalog_node import MODULES
from tests.unit.gateway.fake_node import new_name
from tests.unit.gateway.nodes import PlacedNode, TestPlacement, routed


def question(session: str = "s", **fields: Any) -> GenerateRequest:
    context = RequestContext(tenant="t", session_id=session, **fields)
    return GenerateRequest(
        request_id=RequestId(new_name()), context=context, messages=(ChatMessage("user", "hi"),)
    )


def asking(router: Router, request: GenerateRequest) -> asyncio.Task[list[Delta]]:
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


# -- two doors ---------------------------------------------------------------------------------------------------------


async def test_a_session_stays_where_it_was_and_new_ones_spread() -> None:
    async with routed("a", "b") as (router, placement):
        first = asking(router, question("one"))
        (await placement.inner["a"].asked()).say("x")
        second = asking(router, question("two"))
        (await placement.inner["b"].asked()).finish("two")
        assert text(await second) == "two"
        again = asking(router, question("two"))
        (await placement.inner["b"].asked(1)).finish("again")
        assert text(await again) == "again"
        assert router.home_of("t", "two") == "b"
        first.cancel()


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
        assert answer.request.context.kv_from == "b:1"
        answer.finish("x")
        assert router.home_of("t", "s") == "a"
        # What it left behind makes room for others.
        await until(lambda: placement.inner["b"].ended_sessions == [("t", "s")])
        assert placement.inner["a"].ended_sessions == []


async def test_kv_that_was_brought_where_no_request_comes_makes_room_for_others() -> None:
    """A newer advisory goes to another node: the first one's node has a copy that nobody will ask for."""
    async with routed("a", "b", "c") as (router, placement):
        await answered(router, placement, "c")
        for number, name in enumerate("bcccc", start=1):
            router.remember([("t", f"busy{number}", name)])
            asking(router, question(f"busy{number}"))
        await until(lambda: len(placement.inner["c"].answers) == 5)
        advise = Advisory(advisory_id="one", session_id="s", tenant="t")
        await router.advise(advise, lambda report: None)
        await placement.inner["a"].told()
        for number in range(6, 10):
            router.remember([("t", f"busy{number}", "a")])
            asking(router, question(f"busy{number}"))
        await until(lambda: len(placement.inner["a"].answers) == 4)
        await router.advise(structs.replace(advise, advisory_id="two"), lambda report: None)
        await placement.inner["b"].told()
        await until(lambda: placement.inner["a"].ended_sessions == [("t", "s")])
        assert placement.inner["b"].ended_sessions == placement.inner["c"].ended_sessions == []


async def test_advisories_are_reported_and_retracted_where_they_went() -> None:
    reports: list[AdvisoryReport] = []
    async with routed("a", "b") as (router, placement):
        await router.advise(Advisory(advisory_id="adv", session_id="s", tenant="t"), reports.append)
        told = await placement.inner["a"].told()
        told.report("host", num_tokens=4)
        router.retract("adv", is_expired=True)
        await placement.inner["a"].until(lambda: bool(placement.inner["a"].retracted))
        await until(lambda: len(reports) == 2)
        assert [report.state for report in reports] == ["host", "expired"]
        assert placement.inner["b"].retracted == []
        assert [facts.queued.num for facts in router.homes.facts()] == [0, 0]


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


async def test_a_draft_is_computed_where_its_session_is() -> None:
    async with routed("a", "b") as (router, placement):
        router.remember([("t", "s", "b")])
        assert await router.prefill(question()) == 16
        assert len(placement.inner["b"].prefills) == 1


async def test_the_end_of_a_session_is_told_to_all_nodes() -> None:
    async with routed("a", "b") as (router, placement):
        router.remember([("t", "s", "b")])
        router.end_session("t", "s")
        assert router.home_of("t", "s") == ""
        await until(lambda: all(node.ended_sessions == [("t", "s")] for node in placement.inner.values()))


# -- failures ----------------------------------------------------------------------------------------------------------


async def test_an_answer_that_had_not_begun_is_served_elsewhere_and_nobody_hears_of_it() -> None:
    async with routed("a", "b") as (router, placement):
        task = asking(router, question())
        await placement.inner["a"].asked()
        placement.kill("a")
        (await placement.inner["b"].asked()).finish("here")
        assert text(await task) == "here"
        assert router.home_of("t", "s") == "b"
        assert router.counts() == {"new": 1, "tried_again": 1}


async def test_an_answer_that_had_begun_ends_once_and_may_be_sent_again() -> None:
    async with routed("a", "b") as (router, placement):
        request = question()
        async with aclosing(router.generate(request)) as deltas:  # type: ignore[type-var]
            first = asyncio.ensure_future(anext(deltas))
            (await placement.inner["a"].asked()).say("one")
            assert (await first).text == "one"
            placement.kill("a")
            with pytest.raises(EngineUnavailable, match="Send the request again"):
                await anext(deltas)
        task = asking(router, question())
        (await placement.inner["b"].asked()).finish("again")
        assert text(await task) == "again"
        assert router.counts()["cut"] == 1


async def test_a_second_failure_is_not_hidden() -> None:
    async with routed("a", "b", "c") as (router, placement):
        task = asking(router, question())
        for name in ("a", "b"):
            await placement.inner[name].asked()
            placement.kill(name)
        with pytest.raises(EngineUnavailable):
            await task
        assert placement.inner["c"].answers == []


async def test_where_nobody_else_is_the_failure_itself_is_told() -> None:
    async with routed("a") as (router, placement):
        task = asking(router, question())
        await placement.inner["a"].asked()
        placement.kill("a")
        with pytest.raises(EngineUnavailable, match="failed"):
            await task
        with pytest.raises(EngineUnavailable, match="1 is starting"):
            await asking(router, question())


async def test_a_node_that_refuses_since_it_drains_costs_nothing() -> None:
    async with routed("a", "b") as (router, placement):
        placement.inner["a"].refusal = EngineUnavailable("going down", code="draining")
        task = asking(router, question())
        (await placement.inner["b"].asked()).finish("here")
        assert text(await task) == "here"


async def test_errors_of_the_request_are_not_tried_elsewhere() -> None:
    async with routed("a", "b") as (router, placement):
        placement.inner["a"].refusal = InvalidRequest("too long")
        with pytest.raises(InvalidRequest):
            await asking(router, question())
        assert placement.inner["b"].answers == []


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


async def test_a_session_whose_node_was_lost_comes_home_when_that_is_back() -> None:
    async with routed("a", "b") as (router, placement):
        await answered(router, placement, "a")
        placement.kill("a")
        await placement.connect("a")
        asking(router, question())
        (await placement.inner["a"].asked()).finish("x")


# -- calls of the APIs -------------------------------------------------------------------------------------------------

CONTEXT = RequestContext(tenant="t", session_id="s")


async def test_a_whole_reply_comes_from_another_node_if_the_first_dies() -> None:
    async with routed("a", "b") as (router, placement):
        placement.inner["a"].gate.clear()
        task = asyncio.create_task(router.serve("chat", {}, {}, CONTEXT))
        await placement.inner["a"].until(lambda: bool(placement.inner["a"].contexts))
        placement.kill("a")
        assert await task == JsonReply(200, b"b")


async def test_a_streamed_call_of_which_nothing_was_passed_on_is_streamed_by_another_node() -> None:
    async with routed("a", "b") as (router, placement):
        reply = await router.serve("chat", {"stream": True}, {}, CONTEXT)
        assert isinstance(reply, SseReply)
        await placement.inner["a"].called()
        reading = asyncio.ensure_future(anext(reply.events))
        placement.kill("a")
        call = await placement.inner["b"].called()
        call.events.put_nowait(b"here")
        call.events.put_nowait(None)
        assert await reading == b"here"
        assert [event async for event in reply.events] == []
        assert router.homes.num_requests("b") == 0


async def test_a_streamed_call_that_has_begun_ends_with_the_error() -> None:
    async with routed("a", "b") as (router, placement):
        reply = await router.serve("chat", {"stream": True}, {}, CONTEXT)
        assert isinstance(reply, SseReply)
        (await placement.inner["a"].called()).events.put_nowait(b"one")
        assert await anext(reply.events) == b"one"
        placement.kill("a")
        with pytest.raises(EngineUnavailable):
            await anext(reply.events)
        await reply.events.aclose()  # type: ignore[attr-defined]
        assert placement.inner["b"].streams == []


async def test_how_long_sessions_of_calls_are_is_estimated_for_whoever_announces_them() -> None:
    async with routed("a", "b") as (router, placement):
        body = {
            "stream": True,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 400}]}],
        }
        reply = await router.serve("chat", body, {}, CONTEXT)
        assert isinstance(reply, SseReply)
        call = await placement.inner["a"].called()
        for event in (b"one", b"two", None):
            call.events.put_nowait(event)
        assert [event async for event in reply.events] == [b"one", b"two"]
        await router.advise(Advisory(advisory_id="adv", session_id="s", tenant="t"), lambda report: None)
        assert router.homes.facts()[0].num_tokens == 102


async def test_closing_a_call_that_nobody_has_read_stops_it() -> None:
    async with routed("a", "b") as (router, placement):
        reply = await router.serve("chat", {"stream": True}, {}, CONTEXT)
        assert isinstance(reply, SseReply)
        call = await placement.inner["a"].called()
        await reply.events.aclose()  # type: ignore[attr-defined]
        await until(lambda: call.is_closed)
        assert router.homes.num_requests("a") == 0


async def test_counting_tokens_moves_no_session() -> None:
    async with routed("a", "b") as (router, placement):
        router.remember([("t", "s", "b")])
        await router.serve("count_tokens", {}, {}, CONTEXT)
        assert len(placement.inner["a"].contexts) == 1
        assert router.home_of("t", "s") == "b"


# -- nodes that come and go --------------------------------------------------------------------------------------------


async def test_a_draining_node_gets_nothing_new_ends_what_it_has_and_gives_its_kv() -> None:
    async with routed("a", "b") as (router, placement):
        running = asking(router, question())
        answer = await placement.inner["a"].asked()
        draining = asyncio.create_task(router.drain_node("a", 10.0))
        await until(lambda: router.nodes_state()[0].state == "draining")
        moved = asking(router, question())
        other = await placement.inner["b"].asked()
        assert other.request.context.kv_from == "a:1"
        assert not draining.done()
        answer.finish("end")
        assert await draining
        assert text(await running) == "end"
        other.finish("x")
        await moved
        assert [standing.num_sessions for standing in router.nodes_state()] == [0, 1]


async def test_draining_says_when_it_takes_longer_than_it_may() -> None:
    async with routed("a", "b") as (router, placement):
        task = asking(router, question())
        await placement.inner["a"].asked()
        assert not await router.drain_node("a", 0.01)
        task.cancel()


async def test_a_rolling_restart_loses_no_request() -> None:
    async with routed("a", "b") as (router, placement):
        for name in ("a", "b"):
            placement.inner[name].script = ["fine"]
            await router.restart_node(name, 10.0)
            placement.inner[name].script = ["fine"]
            assert text(await asking(router, question())) == "fine"
        assert placement.restarted == ["a", "b"]
        assert [standing.state for standing in router.nodes_state()] == ["ready", "ready"]


async def test_the_last_node_that_takes_requests_is_not_drained() -> None:
    async with routed("a", "b") as (router, _):
        await router.drain_node("a", 0.0)
        with pytest.raises(InvalidRequest, match="the only node"):
            await router.drain_node("b", 0.0)
        router.reopen_node("a")
        assert await router.drain_node("b", 0.0)
        with pytest.raises(InvalidRequest, match="no node named 'c'"):
            await router.drain_node("c", 0.0)


async def test_a_node_that_says_nothing_gets_nothing_and_then_its_answers_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
        assert [standing.state for standing in router.nodes_state()] == ["quiet", "ready"]
        asking(router, question())
        answer = await placement.inner["b"].asked()
        assert answer.request.context.kv_from == "", "nor does it give any KV"
        answer.finish("x")
        link.reported_s -= members.SILENT_S
        with pytest.raises(EngineUnavailable):
            await anext(begun)
        (await placement.inner["b"].asked(1)).finish("elsewhere")
        assert text(await waiting) == "elsewhere"


async def test_nodes_may_join_and_leave() -> None:
    async with routed("a") as (router, placement):
        router.remember([("t", "s", "a")])
        placement.nodes["b"] = type(placement.nodes["a"])("fake-model")
        assert [standing.state for standing in router.nodes_state()] == ["ready", "starting"]
        await placement.connect("b")
        await router.drain_node("a", 1.0)
        await placement.remove("a")
        asking(router, question())
        answer = await placement.inner["b"].asked()
        assert answer.request.context.kv_from == ""
        answer.finish("x")
        assert [standing.node_id for standing in router.nodes_state()] == ["b"]


async def test_of_another_node_under_an_old_name_nothing_is_expected() -> None:
    async with routed("a", "b") as (router, placement):
        await router.advise(Advisory(advisory_id="adv", session_id="s", tenant="t"), lambda report: None)
        assert [facts.queued.num for facts in router.homes.facts()] == [1, 0]
        placement.nodes["a"] = type(placement.nodes["a"])("fake-model")
        await placement.connect("a")
        router.nodes_state()
        assert [facts.queued.num for facts in router.homes.facts()] == [0, 0]


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


# -- all together ------------------------------------------------------------------------------------------------------


async def test_it_is_ready_as_soon_as_one_node_is_and_failed_when_all_are() -> None:
    async with routed("a", "b") as (router, placement):
        assert router.progress.state == "ready"
        for name, expected in (("a", "ready"), ("b", "failed")):
            placement.inner[name].state = "failed"
            await until(lambda name=name: placement.nodes[name].progress.state == "failed")  # type: ignore[misc]
            assert router.progress.state == expected
        placement.inner["a"].state = "rebuilding"
        await until(lambda: router.progress.state == "rebuilding")


async def test_before_any_node_it_is_starting() -> None:
    router = Router(TestPlacement(), AdapterSync(dict))
    assert router.progress.state == "starting"
    with pytest.raises(EngineUnavailable, match="there are none yet") as refused:
        await asking(router, question())
    assert refused.value.code == "starting"
    assert router.max_model_len == 0


async def test_adapters_are_loaded_by_all_nodes_and_requests_go_where_theirs_is(tmp_path: Path) -> None:
    async with routed("a", "b") as (router, placement):
        path = make_adapter(tmp_path / "large", modules=MODULES, rank=16)
        reply = await router.load_adapter({"lora_name": "large", "lora_path": str(path)})
        assert reply.status == 200
        (info,) = router.adapters()
        assert (info.name, info.nodes) == ("large", {"a": "disk", "b": "disk"})
        placement.kill("a")
        placement.inner["a"] = PlacedNode("a", max_rank=8)
        again = await placement.connect("a")
        await until(lambda: ("load", "large") in again.calls)
        assert router.progress.state == "ready"
        for at in range(3):
            asking(router, question(f"{at}", adapter="large"))
            await placement.inner["b"].asked(at)
        assert again.answers == []
        placement.kill("b")
        with pytest.raises(EngineUnavailable):
            await asking(router, question("nowhere", adapter="large"))
        asking(router, question("unknown", adapter="nobody"))
        await again.asked()


class SlowToLoad(PlacedNode):
    """Loads no adapter before a test says so."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.may_load, self.is_asked = asyncio.Event(), False

    async def load_adapter(self, body: Any) -> JsonReply:
        self.is_asked = True
        await self.may_load.wait()
        return await super().load_adapter(body)


async def test_a_node_is_drained_once_those_that_stay_serve_its_adapters(tmp_path: Path) -> None:
    async with routed("a", "b") as (router, placement):
        placement.kill("b")
        path = make_adapter(tmp_path / "large", modules=MODULES, rank=16)
        assert (await router.load_adapter({"lora_name": "large", "lora_path": str(path)})).status == 200
        placement.inner["b"] = back = SlowToLoad("b")
        await placement.connect("b")
        draining = asyncio.create_task(router.drain_node("a", 10.0))
        await until(lambda: back.is_asked)
        early = asking(router, question("early", adapter="large"))
        (await placement.inner["a"].asked()).finish("at a")
        assert text(await early) == "at a"
        back.may_load.set()
        assert await draining
        late = asking(router, question("late", adapter="large"))
        (await back.asked()).finish("at b")
        assert text(await late) == "at b"


async def test_models_come_from_any_node_that_is_there() -> None:
    async with routed("a", "b") as (router, placement):
        assert await router.models() == JsonReply(200, b"a")
        placement.kill("a")
        assert await router.models() == JsonReply(200, b"b")


async def test_it_is_told_how_requests_came_to_their_nodes() -> None:
    async with routed("a", "b") as (router, placement):
        for node in placement.inner.values():
            node.script = ["fine"]
        await asking(router, question())
        await asking(router, question())
        await router.advise(Advisory(advisory_id="adv", session_id="s", tenant="t"), lambda report: None)
        await asking(router, question())
        await router.drain_node(router.home_of("t", "s"), 1.0)
        await asking(router, question())
        assert router.counts() == {"new": 1, "home": 1, "announced": 1, "moved": 1}
        registry = CollectorRegistry()
        registry.register(RouterCollector(router.counts))
        for how in HOW:
            assert registry.get_sample_value("overture_router_requests_total", {"how": how}) == 1
        assert registry.get_sample_value("overture_router_cut_total") == 0


async def until(is_so: Any) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.005)
