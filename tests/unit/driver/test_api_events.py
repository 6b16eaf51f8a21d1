from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from engine_bridge.driver.apis.failures import is_clients
from engine_bridge.driver.serving.answer import Answer
from engine_bridge.driver.serving.api_events import ApiEvents
from engine_bridge.driver.serving.call import Call
from engine_bridge.driver.serving.entrance import Entrance
from engine_bridge.driver.serving.serving import _cancellable
from engine_bridge.driver.serving.streams import Streams
from engine_bridge.driver.vllm_api import RequestOutputKind, RetryableRequestError, get_max_tokens
from engine_bridge.protocol.node import (
    CallFigures,
    Dropped,
    KvSources,
    figures_of,
    is_for_gateway,
    token_ids_of,
    unpack_token_ids,
)
from engine_bridge.protocol.token_stream import TokenStream
from tests.unit.engine_bridge.test_token_stream import output


class Source:
    """A stream of events that notes that it was closed, and does something before each event."""

    def __init__(self, *steps: object) -> None:
        self._steps = iter(steps)
        self.is_closed = False

    async def __anext__(self) -> str:
        for step in self._steps:
            if isinstance(step, str):
                return step
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif callable(step):
                step()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.is_closed = True


class Client:
    """An engine's client whose requests are queued at once, or fail."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.log: list[tuple[str, bool]] = []
        self.limits = SimpleNamespace(max_answer_logprobs=100)

    async def queue(self, unique_id: str, *args: Any, **options: Any) -> None:
        self.log.append((f"queued {unique_id}", True))
        if self.failure is not None:
            raise self.failure

    def forget(self, unique_id: str, *, abort: bool) -> None:
        self.log.append((f"forgotten {unique_id}", abort))


class Outputs:
    """Outputs that are there already."""

    def __init__(self, *token_ids: int) -> None:
        self._left = list(token_ids)

    def get_nowait(self) -> Any:
        output = SimpleNamespace(token_ids=[self._left.pop(0)], logprobs=None)
        prompt = {"prompt_token_ids": [7, 7, 7], "num_cached_tokens": 2, "prompt_logprobs": None}
        return SimpleNamespace(finished=not self._left, outputs=[output], **prompt)


def answer(call: Call, client: Client, *token_ids: int) -> Answer:
    sampling = SimpleNamespace(output_kind=RequestOutputKind.DELTA)
    request = SimpleNamespace(sampling_params=sampling, prompt_token_ids=[7], mm_features=[])
    return Answer(client, call, "a", request, Outputs(*token_ids), None)  # type: ignore[arg-type]


def events_of(call: Call, source: Any) -> ApiEvents:
    return ApiEvents(call, source, lambda event: (event,), is_anthropic=False)


async def begun(call: Call, source: Any) -> ApiEvents:
    events = events_of(call, source)
    await events.begin()
    return events


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        (["created", Call.queued, "a", "b"], ["created", "a", "b"]),
        # It begins as soon as its request is queued, though no event has come.
        ([Call.queued, asyncio.Event(), "late"], ["late"]),
        # A stream that ends without a request begins with what it had.
        (["error"], ["error"]),
        ([Call.queued, "a", RuntimeError("gone")], ["a", 'event: error\ndata: {"error":']),
    ],
)
async def test_a_stream_begins_with_its_request(steps: list[Any], found: list[str]) -> None:
    call = Call()
    source = Source(*(partial(step, call) if step is Call.queued else step for step in steps))
    events = await begun(call, source)
    for step in steps:
        if isinstance(step, asyncio.Event):
            step.set()
    texts = [event.decode() async for event in events]
    assert [text[: len(want)] for text, want in zip(texts, found, strict=True)] == found
    assert source.is_closed and "gone" not in texts[-1]


async def test_an_answer_is_queued_before_the_first_event_is_made_and_forgotten_when_it_is_over() -> None:
    call, client = Call(), Client()
    made = answer(call, client, 1)
    await begun(call, Source())
    assert client.log == [("queued a", True)] and call.is_queued
    assert [output.outputs[0].token_ids async for output in made] == [[1]]
    assert client.log[1:] == [("forgotten a", False)]
    call.failed(ValueError("too late"))
    assert call.failure is None


@pytest.mark.parametrize("way", ["the call fails", "the request cannot be queued", "the source raises"])
async def test_a_failure_before_the_start_is_raised_and_closes_the_stream(way: str) -> None:
    call, error = Call(), ValueError("bad grammar")
    source = Source("created", lambda: call.failed(error), asyncio.Event())
    client = Client(error)
    if way == "the request cannot be queued":
        answer(call, client)
    elif way == "the source raises":
        source = Source(error)
    with pytest.raises(ValueError, match="bad grammar"):
        await begun(call, source)
    assert source.is_closed
    if way == "the request cannot be queued":
        assert call.failure is error and client.log[-1] == ("forgotten a", True)


async def test_a_reply_that_was_never_read_ends_its_answers() -> None:
    call, client, source = Call(), Client(), Source("a")
    answer(call, client, 1)
    await (await begun(call, source)).aclose()
    assert source.is_closed
    assert client.log == [("queued a", True), ("forgotten a", True)] and not call.answers


async def test_the_first_event_says_what_was_left_out_and_the_last_ones_tell_the_gateway_what_was_read() -> (
    None
):
    call, client = Call(history=b""), Client()
    made = answer(call, client, 1, 2)

    async def source() -> Any:
        async for _ in made:
            yield "a"

    events = events_of(call, source())
    events.dropped = Dropped(tools=2)
    await events.begin()
    first, *middle, figures, last = [event async for event in events]
    assert b"tools=2" in first and middle == [b"a", b"a"]
    assert [is_for_gateway(event) for event in (first, b"a", figures, last)] == [False, False, True, True]
    assert figures_of(figures) == CallFigures(KvSources(device=2, host=0, disk=0, recomputed=1), 2)
    packed = token_ids_of(last)
    assert packed is not None and unpack_token_ids(packed) == (7, 1, 2)


async def test_a_few_calls_of_a_tenant_are_made_ready_at_a_time_and_others_come_when_they_have_left() -> None:
    entrance = Entrance(num_at_once=2)
    first, second = [await entrance.enter("a") for _ in range(2)]
    third, stops = (asyncio.create_task(entrance.enter("a")) for _ in range(2))
    (await entrance.enter("b"))()  # another tenant's calls do not wait for them
    assert not third.done()
    stops.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stops
    first()
    first()  # a second time gives no second place
    leave = await third
    fourth = asyncio.create_task(entrance.enter("a"))
    await asyncio.sleep(0)
    assert not fourth.done()
    leave()
    second()
    (await fourth)()


async def test_an_output_that_cannot_be_read_ends_its_own_answer_and_no_other_one() -> None:
    def fails(output: Any) -> tuple[str, str]:
        raise KeyError("a parser of a model's")

    streams, answers = Streams(), {name: TokenStream() for name in "abc"}
    for name, answer in answers.items():
        streams.register(name, answer)
    answers["b"].split = fails
    streams.deliver([output(name, finish="stop") for name in "abc"])
    assert (await answers["a"].next()).text == "a" and (await answers["c"].next()).text == "c"
    with pytest.raises(RetryableRequestError, match="Send the request again"):
        async with asyncio.timeout(10):
            await answers["b"].next()


async def test_an_error_before_the_stream_keeps_the_place_where_it_was_raised() -> None:
    async def too_long() -> None:
        get_max_tokens(10, None, 11, {})

    with pytest.raises(ValueError, match="context length") as raised:
        await _cancellable(too_long())
    assert is_clients(raised.value)
