"""Priority, weights and what is known of answer lengths, from the API down to the queue, on a real engine with one slot.

Runs before the shared engine starts (conftest), each engine after the one before it has gone.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from engine_bridge.driver.carried import Carried, facts_of
from engine_bridge.local_node import LocalNode
from engine_bridge.predict.custom_predictor import PredictorRefused
from engine_bridge.predict.hints import HINTS
from engine_bridge.protocol.asked import TEXT_HINTS
from gateway.app import Server, build_services, node_config
from gateway.metrics.metrics import Metrics

from .conftest import KEYS, MODEL, SharedNode, demo_config, engine_is_empty, starts
from .test_engine_faults import break_next_step, is_ready

SHORT = {"model": MODEL, "max_tokens": 4, "temperature": 0}
QUESTION = "Is it true? Answer in 2 sentences."
_ids = itertools.count()
OWN = '''
import threading
from engine_bridge.predict.length import LengthGuess

release = threading.Event()

class Own:
    """Knows each answer, fails at "fail" and hangs at "hang"."""
    def __init__(self, context):
        self.context, self.seen, self.questions = context, [], []
    def predict(self, features):
        self.questions.append((features.question, len(features.prompt_token_ids or ())))
        if "fail" in features.question:
            raise KeyError("no idea")
        if "hang" in features.question:
            release.wait()
        return LengthGuess(7, 11, "own")
    def observe(self, features, num_tokens):
        self.seen.append(num_tokens)
    def refit(self): ...
'''


@dataclass
class Place:
    """One engine with one slot, and gateways in front of it."""

    node: SharedNode
    gateway: Callable[..., Awaitable[str]]

    @asynccontextmanager
    async def taken(self, url: str) -> AsyncIterator[None]:
        """While somebody else has the slot."""
        body = SHORT | {"prompt": "a", "max_tokens": 3900, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession(url) as http, http.post("/v1/completions", json=body) as answer:
            await answer.content.readany()
            yield
        # The client has left: the slot is free.

    async def waiting(self, tasks: list[asyncio.Task[Any]]) -> list[Carried]:
        """What the scheduler was told of all who wait, once these requests do."""

        def look(driver: Any) -> list[Carried]:
            return [facts_of(request) for request in driver.scheduling.queue]

        async with asyncio.timeout(60):
            while len(found := await self.node.run_on_engine(look)) < len(tasks):
                for task in tasks:
                    assert not task.done(), task.result()
                await asyncio.sleep(0.005)
        return found


def config_of(folder: Path, **changes: Any) -> Any:
    return demo_config(folder, scheduling_policy="priority", max_num_seqs=1, kv_host_gib=0, **changes)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("place")
    node = SharedNode(node_config(config_of(folder)))
    await node.start()
    async with AsyncExitStack() as stack:

        async def gateway(**changes: Any) -> str:
            config = config_of(tmp_path_factory.mktemp("gateway"), **changes)
            services = await build_services(config, node=node, metrics=Metrics(CollectorRegistry()))
            return (await stack.enter_async_context(Server(services))).url

        yield Place(node, gateway)
    await node.really_close()


async def post(url: str, path: str, body: dict[str, Any], key: str = KEYS[0]) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(url, headers=headers) as http,
        http.post(path, json=SHORT | body) as answer,
    ):
        return answer.status, await answer.json()


async def turn(url: str, **fields: Any) -> dict[str, Any]:
    """The last frame of a turn over the chat socket."""
    async with aiohttp.ClientSession(url) as http, http.ws_connect("/ws") as socket:
        await socket.send_json({"type": "hello"})
        sampling = {"max_tokens": 4, "temperature": 0}
        await socket.send_json(
            {"type": "message", "id": f"turn-{next(_ids)}", "content": QUESTION, "sampling": sampling}
            | fields
        )
        async for message in socket:
            frame: dict[str, Any] = message.json()
            if frame["type"] in ("done", "error"):
                return frame
    raise AssertionError("the socket was closed")


def user(text: str = QUESTION) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def test_with_one_slot_the_lower_number_starts_first_by_whatever_door(place: Place) -> None:
    url = await place.gateway()

    async def one(asking: Awaitable[Any]) -> None:
        result = await asking
        assert (result[0] == 200) if isinstance(result, tuple) else result["type"] == "done", result

    async with starts(place.node) as started:
        async with place.taken(url):
            tasks: list[asyncio.Task[Any]] = []
            # One after the other, each in the queue before the next is sent, in an order that is not the right one.
            for asking in (
                post(url, "/v1/completions", {"prompt": "b", "priority": 1000}),
                post(url, "/v1/chat/completions", user() | {"priority": 2}),
                post(url, "/v1/responses", {"input": QUESTION, "priority": 5}),
                turn(url, priority=4),
                turn(url),
                post(url, "/v1/messages", user() | {"priority": 30}),
            ):
                tasks.append(asyncio.create_task(one(asking)))
                facts = await place.waiting(tasks)
        await asyncio.gather(*tasks)
    # First of all who took the slot; the turn that asks for none has the usual priority.
    assert started == [0, 0, 2, 4, 5, 30, 1000]
    # By the same way the scheduler learns what was asked, and no text of it.
    marks = TEXT_HINTS.index("question_marks")
    hints = [fact.features.hints for fact in facts if fact.features is not None]
    assert len(hints) == 6 and {len(hint) for hint in hints} == {len(HINTS)}
    assert [hint[marks] > 0 for hint in hints] == [False] + [True] * 5
    assert all(
        fact.features and not fact.features.question and fact.features.prompt_token_ids is None
        for fact in facts
    )


@pytest.mark.parametrize(
    ("priority", "reason"),
    [
        (-1, "from 0 to 1000"),
        (1001, "from 0 to 1000"),
        ("5", "integer"),
        (True, "integer"),
        (1.5, "integer"),
        ([1], "integer"),
    ],
)
async def test_another_priority_is_refused_in_the_api_s_own_words(
    place: Place, priority: Any, reason: str
) -> None:
    url = await place.gateway()
    status, answer = await post(url, "/v1/chat/completions", user() | {"priority": priority})
    error = answer["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "priority")
    assert reason in error["message"]
    status, answer = await post(url, "/v1/messages", user() | {"priority": priority})
    assert status == 400 and answer["type"] == "error" and reason in answer["error"]["message"]
    frame = await turn(url, priority=priority)
    assert frame["type"] == "error" and frame["code"] == "bad_request" and frame["id"].startswith("turn-")


async def test_where_the_operator_allows_it_a_client_goes_before_others(place: Place) -> None:
    url = await place.gateway(client_priority=True)

    async def one(priority: int) -> None:
        status, _ = await post(url, "/v1/completions", {"prompt": "b", "priority": priority})
        assert status == 200

    async with starts(place.node) as started:
        async with place.taken(url):
            tasks: list[asyncio.Task[Any]] = []
            for priority in (1, -1, -1000):
                tasks.append(asyncio.create_task(one(priority)))
                await place.waiting(tasks)
        await asyncio.gather(*tasks)
    assert started == [0, -1000, -1, 1]
    assert (await post(url, "/v1/completions", {"prompt": "b", "priority": -1001}))[0] == 400


async def test_a_key_s_weight_comes_to_the_scheduler(place: Place, tmp_path: Path) -> None:
    from gateway.access.auth import key_file_line

    file = tmp_path / "keys"
    file.write_text(
        "\n".join(key_file_line(name, key) for name, key in zip(("ada", "bob"), KEYS, strict=True))
    )
    open_url = await place.gateway()
    url = await place.gateway(api_key_file=file, tenant_weights=("ada=2.5",))
    async with place.taken(open_url):
        tasks = [
            asyncio.create_task(post(url, "/v1/completions", {"prompt": "b"}, key)) for key in reversed(KEYS)
        ]
        socket = asyncio.create_task(turn(url, priority=3))
        facts = await place.waiting(tasks)
    assert sorted(fact.context.weight for fact in facts) == [1.0, 2.5]
    assert len({fact.context.tenant for fact in facts}) == 2
    assert (await socket)["code"] == "unauthorized"
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]


async def test_what_was_learned_outlives_the_engine_and_the_node(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, url = place.node, await place.gateway()
    await engine_is_empty(node)
    lengths = node._lengths
    assert lengths is not None and lengths._path is not None
    folder = lengths._path.parent
    before = lengths.num_observed
    assert before > 0
    await break_next_step(node)
    assert (await post(url, "/v1/completions", {"prompt": "b"}))[0] == 503
    await is_ready(node)
    assert (await post(url, "/v1/completions", {"prompt": "b"}))[0] == 200
    await engine_is_empty(node)
    assert await node.run_on_engine(lambda driver: driver.scheduling.predictor) is lengths
    assert lengths.num_observed == before + 1
    # Another node on the same folder, with a predictor of the user's in front.
    await node.really_close()
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    for module in (
        "predict.custom_predictor",
        "driver.serving.engine_client",
    ):  # "hang" alone is to be late, not a slow machine
        monkeypatch.setattr(f"engine_bridge.{module}.PATIENCE_S", 4.0)
    config = config_of(folder, length_predictor="mine:Own")
    again = LocalNode(node_config(config))
    async with AsyncExitStack() as stack:
        services = await build_services(config, node=again, metrics=Metrics(CollectorRegistry()))
        stack.push_async_callback(again.close)
        await again.start()
        url = (await stack.enter_async_context(Server(services))).url
        assert again._lengths is not None and again._lengths.num_observed == before + 1
        await _own_predictor_is_asked_and_harms_nobody(Place(again, place.gateway), url)


async def _own_predictor_is_asked_and_harms_nobody(place: Place, url: str) -> None:
    own = place.node._lengths.own
    assert own is not None
    async with place.taken(url):
        tasks: list[asyncio.Task[Any]] = []
        for text in ("well", "fail", "hang", "after"):
            tasks.append(asyncio.create_task(post(url, "/v1/chat/completions", user(text))))
            facts = await place.waiting(tasks)
    assert {status for status, _ in await asyncio.gather(*tasks)} == {200}
    assert [(fact.guess.p50, fact.guess.p90) if fact.guess else None for fact in facts] == [
        (4, 4),
        None,
        None,
        None,
    ]
    assert (own.counts["failed"], own.counts["late"]) == (1, 1) and own.counts["refused"] >= 1
    mine = own._predictor
    assert [text for text, _ in mine.questions[-3:]] == ["well", "fail", "hang"]
    assert all(num > 0 for _, num in mine.questions[1:])
    sys.modules["mine"].release.set()


async def test_a_predictor_that_cannot_be_had_stops_the_start_with_a_clear_word(tmp_path: Path) -> None:
    node = LocalNode(node_config(config_of(tmp_path, length_predictor="no_such_module:Own")))
    with pytest.raises(PredictorRefused, match=r"no_such_module:Own cannot be imported.*PYTHONPATH"):
        await node.start()
    assert node.state == "failed"
    await node.close()
