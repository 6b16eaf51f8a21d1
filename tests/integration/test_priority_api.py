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

import pytest
import pytest_asyncio

from engine_bridge.driver.carried import facts_of
from engine_bridge.local_node import LocalNode
from engine_bridge.predict.custom_predictor import PredictorRefused
from engine_bridge.predict.hints import HINTS
from engine_bridge.protocol.asked import TEXT_HINTS
from engine_bridge.protocol.engine_request import EngineRequest
from gateway.access.key_file import key_file_line
from gateway.app import Server, node_config

from .conftest import SharedNode, connected, demo_config, engine_is_empty, served, settle, starts, told
from .facts import CHAT, COMPLETIONS, KEYS, MESSAGES, MODEL, RESPONSES, Http, Patch, bearer
from .test_engine_faults import break_next_step, is_ready

SHORT = {"model": MODEL, "max_tokens": 4, "temperature": 0}
QUESTION = "Is it true? Answer in 2 sentences."
_ids = itertools.count()
OWN = '''
import threading
from engine_bridge.protocol.engine_request import LengthGuess

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


async def post(server: Server, path: str, body: dict[str, Any], status: int = 200, key: str = "") -> Any:
    async with Http(server.url, headers=bearer(key)) as http:
        return await told(http.post(path, json=SHORT | body), status)


async def turn(server: Server, **fields: Any) -> dict[str, Any]:
    """The last frame of a turn over the chat socket."""
    async with connected(server, hello=False) as socket:
        await socket.send(type="hello")
        sampling = {"max_tokens": 4, "temperature": 0}
        await socket.ask(f"turn-{next(_ids)}", QUESTION, sampling=sampling, **fields)
        return await socket.receive("done", "error")


def user(text: str = QUESTION) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@dataclass
class Place:
    """One engine with one slot, and gateways in front of it."""

    node: SharedNode
    gateway: Callable[..., Awaitable[Server]]

    @asynccontextmanager
    async def taken(self, server: Server) -> AsyncIterator[None]:
        """While somebody else has the slot."""
        body = SHORT | {"prompt": "a", "max_tokens": 3900, "ignore_eos": True, "stream": True}
        async with Http(server.url) as http, http.post(COMPLETIONS, json=body) as answer:
            await answer.content.readany()
            yield
        # The client has left: the slot is free.

    async def waiting(self, num_requests: int) -> list[EngineRequest]:
        """What the scheduler was told of all who wait, once as many do."""

        def look(driver: Any) -> list[EngineRequest] | None:
            found = [facts_of(request) for request in driver.scheduling.queue]
            return found if len(found) >= num_requests else None

        return await settle(lambda: self.node.run_on_engine(look))

    async def queued(
        self, server: Server, *asked: Awaitable[Any]
    ) -> tuple[list[EngineRequest], list[int], list[Any]]:
        """Ask one after the other, each in the queue before the next is sent, while the slot is taken.

        Returns what the scheduler was told of them, priorities in the order of their starts (first that of who took the slot), and the replies.
        """
        async with starts(self.node) as started:
            async with self.taken(server):
                tasks = []
                for number, asking in enumerate(asked, 1):
                    tasks.append(asyncio.ensure_future(asking))
                    facts = await self.waiting(number)
            return facts, started, await asyncio.gather(*tasks)


def config_of(folder: Path, **changes: Any) -> Any:
    return demo_config(folder, scheduling_policy="priority", max_num_seqs=1, kv_host_gib=0, **changes)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    node = SharedNode(node_config(config_of(tmp_path_factory.mktemp("place"))))
    await node.start()
    async with AsyncExitStack() as stack:

        async def gateway(**changes: Any) -> Server:
            config = config_of(tmp_path_factory.mktemp("gateway"), **changes)
            return await stack.enter_async_context(served(config, node))

        yield Place(node, gateway)
    await node.really_close()


async def test_with_one_slot_the_lower_number_starts_first_by_whatever_door(place: Place) -> None:
    server = await place.gateway()
    facts, started, replies = await place.queued(
        server,
        # In an order that is not the right one.
        post(server, COMPLETIONS, {"prompt": "b", "priority": 1000}),
        post(server, CHAT, user() | {"priority": 2}),
        post(server, RESPONSES, {"input": QUESTION, "priority": 5}),
        turn(server, priority=4),
        turn(server),
        post(server, MESSAGES, user() | {"priority": 30}),
        # Dynamo's higher ones go first.
        post(server, CHAT, user() | {"nvext": {"agent_hints": {"priority": -6, "osl": 9}}}),
    )
    assert [reply["type"] for reply in replies[3:5]] == ["done"] * 2
    # The turn that asks for none has the usual priority.
    assert started == [0, 0, 2, 4, 5, 6, 30, 1000]
    # By the same way the scheduler learns what was asked, and no text of it.
    marks = TEXT_HINTS.index("question_marks")
    hints = [fact.hints for fact in facts]
    assert len(hints) == 7 and {len(hint) for hint in hints} == {len(HINTS)}
    assert [hint[marks] > 0 for hint in hints] == [False] + [True] * 6
    assert [fact.expected_tokens for fact in facts] == [None] * 6 + [9]
    assert not any(fact.question or fact.messages or fact.prompt_token_ids for fact in facts)


async def test_another_priority_is_refused_in_the_api_s_own_words(place: Place) -> None:
    server = await place.gateway()
    wrong = [(-1, "from 0 to 1000"), (1001, "from 0 to 1000")]
    for priority, reason in wrong + [(each, "integer") for each in ("5", True, 1.5, [1])]:
        error = (await post(server, CHAT, user() | {"priority": priority}, 400))["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "priority")
        assert reason in error["message"]
        answer = await post(server, MESSAGES, user() | {"priority": priority}, 400)
        assert answer["type"] == "error" and reason in answer["error"]["message"]
        frame = await turn(server, priority=priority)
        assert (frame["type"], frame["code"]) == ("error", "bad_request") and frame["id"].startswith("turn-")


async def test_where_the_operator_allows_it_a_client_goes_before_others(place: Place) -> None:
    server = await place.gateway(client_priority=True)
    asked = [post(server, COMPLETIONS, {"prompt": "b", "priority": each}) for each in (1, -1, -1000)]
    _, started, _ = await place.queued(server, *asked)
    assert started == [0, -1000, -1, 1]
    await post(server, COMPLETIONS, {"prompt": "b", "priority": -1001}, 400)


async def test_a_key_s_weight_comes_to_the_scheduler(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    lines = [key_file_line(name, key) for name, key in zip(("ada", "bob"), KEYS, strict=True)]
    file.write_text("\n".join(lines))
    server = await place.gateway(api_key_file=file, tenant_weights=("ada=2.5",))
    asked = [post(server, COMPLETIONS, {"prompt": "b"}, key=key) for key in reversed(KEYS)]
    facts, _, _ = await place.queued(await place.gateway(), *asked)
    assert sorted(fact.weight for fact in facts) == [1.0, 2.5]
    assert len({fact.tenant for fact in facts}) == 2
    assert (await turn(server, priority=3))["code"] == "unauthorized"


async def test_what_was_learned_outlives_engine_and_node(
    place: Place, tmp_path: Path, monkeypatch: Patch
) -> None:
    node, server = place.node, await place.gateway()
    await engine_is_empty(node)
    lengths = node._lengths
    before = lengths.num_observed
    assert before > 0
    await break_next_step(node)
    await post(server, COMPLETIONS, {"prompt": "b"}, 503)
    await is_ready(node)
    await post(server, COMPLETIONS, {"prompt": "b"})
    await engine_is_empty(node)
    assert await node.run_on_engine(lambda driver: driver.scheduling.predictor) is lengths
    assert lengths.num_observed == before + 1
    # Another node on the same folder, with a predictor of the user's in front.
    await node.really_close()
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    config = config_of(lengths._path.parent, length_predictor="mine:Own")
    again = SharedNode(node_config(config))
    await again.start()
    try:
        async with served(config, again) as server:
            assert again._lengths is not None and again._lengths.num_observed == before + 1
            await _own_predictor_is_asked_and_harms_nobody(Place(again, place.gateway), server, monkeypatch)
    finally:
        await again.really_close()


async def _own_predictor_is_asked_and_harms_nobody(place: Place, server: Server, monkeypatch: Patch) -> None:
    own = place.node._lengths.own

    async def say(text: str) -> None:
        # "hang" alone is to be late, not a slow machine; and "after" is to find the predictor late.
        patience_s = {"hang": 0.2, "after": 0.0}.get(text, 60.0)
        for module in ("predict.custom_predictor", "driver.serving.engine_client"):
            monkeypatch.setattr(f"engine_bridge.{module}.PATIENCE_S", patience_s)
        await post(server, CHAT, user(text))

    asked = [say(text) for text in ("well", "fail", "hang", "after")]
    facts, _, _ = await place.queued(server, *asked)
    guesses = [(fact.guess.p50, fact.guess.p90) if fact.guess else None for fact in facts]
    assert guesses == [(4, 4), None, None, None]
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
