"""The engine breaks: streams end with a clear error, it is rebuilt, the process lives."""

from __future__ import annotations

import asyncio
import time
import weakref

import aiohttp
import pytest

from engine_bridge.protocol.errors import EngineUnavailable
from engine_bridge.protocol.node import ChatMessage, GenerateRequest, RequestId, Sampling
from overture_client.chat import ChatClient
from overture_client.chat_frames import ChatError, Delta

from .conftest import MODEL, SharedNode, engine_has

LONG = {"temperature": 0, "max_tokens": 2000, "ignore_eos": True}


async def break_next_step(node: SharedNode) -> None:
    """Let the forward pass of the next step raise, as a kernel or a bad adapter would."""

    def sabotage(driver) -> None:
        def raises(*args, **kwargs):
            raise RuntimeError("injected fault")

        driver.engine.engine_core.engine_core.model_executor.execute_model = raises

    await node.run_on_engine(sabotage)


async def is_ready(node: SharedNode) -> None:
    async with asyncio.timeout(120):
        while node.state != "ready":
            await asyncio.sleep(0.05)


async def test_a_failed_step_ends_every_stream_and_the_engine_comes_back(
    node: SharedNode, chat: ChatClient, http: aiohttp.ClientSession
) -> None:
    first_words, stream_began = asyncio.Event(), asyncio.Event()
    session_id = None

    async def over_the_socket() -> str:
        nonlocal session_id
        with pytest.raises(ChatError) as raised:
            async for event in chat.ask("Hello!", sampling=LONG):
                session_id = getattr(event, "session_id", session_id)
                if isinstance(event, Delta):
                    first_words.set()
        assert raised.value.retryable
        return raised.value.code

    async def over_sse() -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True} | LONG
        async with http.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200
            stream_began.set()
            return await response.text()

    async def whole() -> tuple[int, str]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]} | LONG
        async with http.post("/v1/chat/completions", json=body) as response:
            return response.status, (await response.json())["error"]["message"]

    tasks = [asyncio.ensure_future(work()) for work in (over_the_socket, over_sse, whole)]
    await asyncio.gather(first_words.wait(), stream_began.wait(), engine_has(node, 3))
    num_rebuilds = node.num_rebuilds
    await break_next_step(node)
    async with asyncio.timeout(60):
        code, events, (status, message) = await asyncio.gather(*tasks)
    assert code == "engine_failed"
    assert '"error"' in events and "being rebuilt" in events and events.rstrip().endswith("[DONE]")
    assert status == 503 and "being rebuilt" in message
    if node.state != "ready":
        async with http.get("/readyz") as response:
            assert response.status == 503
    await is_ready(node)
    assert node.num_rebuilds == num_rebuilds + 1
    # The same session goes on, with adapters, and the history that was stored is still there.
    text = "".join(
        [
            e.text
            async for e in chat.ask(
                "Hello!", session_id=session_id, adapter="shout", sampling={"temperature": 0}
            )
            if isinstance(e, Delta)
        ]
    )
    assert text.isupper()


async def test_requests_during_a_rebuild_are_told_to_come_back(
    node: SharedNode, http: aiohttp.ClientSession
) -> None:
    running = asyncio.ensure_future(_generate(node, "r1"))
    await asyncio.sleep(0)
    while (await node.stats()).num_running == 0:
        await asyncio.sleep(0.01)
    await break_next_step(node)
    with pytest.raises(EngineUnavailable):
        await running
    with pytest.raises(EngineUnavailable) as raised:
        await _generate(node, "r2")
    assert raised.value.code == "engine_failed"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 503 and response.headers["Retry-After"]
    await is_ready(node)
    assert await _generate(node, "r3", max_tokens=3)


async def test_a_failed_engine_is_gone_before_the_next_one_is_built(
    node: SharedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device has no room for the KV of two."""

    def look(driver) -> list[weakref.ref]:
        return [weakref.ref(driver.engine.engine_core.engine_core), weakref.ref(driver.adapters)]

    refs = await node.run_on_engine(look)
    left: list[object] = []
    make = node._thread._make_driver

    def made() -> object:
        left.append([type(ref()).__name__ for ref in refs if ref() is not None])
        return make()

    monkeypatch.setattr(node._thread, "_make_driver", made)
    running = asyncio.ensure_future(_generate(node, "r4"))
    while (await node.stats()).num_running == 0:
        await asyncio.sleep(0.01)
    await break_next_step(node)
    with pytest.raises(EngineUnavailable):
        await running
    await is_ready(node)
    assert left == [[]]
    assert await _generate(node, "r5", max_tokens=3)


async def _generate(node: SharedNode, name: str, max_tokens: int = 2000) -> str:
    request = GenerateRequest(
        request_id=RequestId(name),
        messages=(ChatMessage("user", "Hello!"),),
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=True, temperature=0),
    )
    return "".join([delta.text async for delta in node.generate(request)])


async def test_an_idle_engine_uses_no_processor(node: SharedNode) -> None:
    def processor_s() -> float:
        """Processor time of the engine's thread, in seconds."""
        tid = node._thread._thread.native_id
        with open(f"/proc/self/task/{tid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / 100

    await _generate(node, "before", max_tokens=2)
    shares = []
    # One more step tells the worker that the request has ended, some time soon. An engine that never rests has no quiet stretch at all.
    for _ in range(5):
        used, started, steps = processor_s(), time.monotonic(), node.num_steps
        await asyncio.sleep(2)
        shares.append((processor_s() - used) / (time.monotonic() - started))
        if shares[-1] < 0.02 and node.num_steps == steps:
            break
    else:
        pytest.fail(f"the engine's thread was never at rest: {shares} of a core")
