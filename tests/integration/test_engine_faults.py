"""The engine breaks: streams end with a clear error, it is rebuilt, the process lives."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine_bridge.protocol.errors import EngineUnavailable
from overture_client.chat import ChatClient
from overture_client.chat_frames import ChatError, Delta

from .conftest import COLLECTOR, SharedNode, ask, engine_has, settle, told
from .facts import BODY, CHAT, Http, Patch
from .nodes import generate

LONG = {"temperature": 0, "max_tokens": 2000, "ignore_eos": True}


async def break_next_step(node: SharedNode) -> None:
    """Let the forward pass of the next step raise, as a kernel or a bad adapter would."""

    def raises(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("injected fault")

    def sabotage(driver: Any) -> None:
        driver.engine.engine_core.engine_core.model_executor.execute_model = raises

    await node.run_on_engine(sabotage)


async def is_ready(node: SharedNode) -> None:
    await settle(lambda: node.state == "ready")


@contextmanager
def watched_rebuild(
    node: SharedNode, monkeypatch: Patch, refs: list[Any]
) -> Iterator[tuple[list[Any], list[bool]]]:
    """What of `refs` is left when the next engine is built; and of each look of the collector's for old garbage, whether it looks at all there is."""
    for name, real in COLLECTOR.items():
        monkeypatch.setattr(gc, name, real)
    left: list[Any] = []
    looks_at_all: list[bool] = []
    make = node._thread._make_driver

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            looks_at_all.append(gc.get_freeze_count() == 0)

    def made() -> object:
        # The event loop may have been reading a figure of what has failed when that was collected. Building collects again before it takes memory.
        for _ in range(20):
            if all(ref() is None for ref in refs):
                break
            time.sleep(0.1)
            gc.collect()
        left.append([type(ref()).__name__ for ref in refs if ref() is not None])
        gc.callbacks.append(note)
        try:
            return make()
        finally:
            gc.callbacks.remove(note)

    with monkeypatch.context() as patched:
        patched.setattr(node._thread, "_make_driver", made)
        yield left, looks_at_all


async def test_a_failed_step_ends_every_stream_and_the_engine_comes_back(
    node: SharedNode, chat: ChatClient, http: Http, monkeypatch: Patch
) -> None:
    """Requests meanwhile are told to come back. The failed engine is gone before the next is built, as a device has no room for the KV of two.

    The start of the next does not look through all that was imported each time it collects garbage.
    """
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
        async with http.post(CHAT, json=BODY | LONG | {"stream": True}) as response:
            assert response.status == 200
            stream_began.set()
            return await response.text()

    def look(driver: Any) -> list[weakref.ref[Any]]:
        return [weakref.ref(driver.engine.engine_core.engine_core), weakref.ref(driver.adapters)]

    tasks = [asyncio.ensure_future(work()) for work in (over_the_socket, over_sse)]
    whole = asyncio.ensure_future(told(http.post(CHAT, json=BODY | LONG), 503))
    await asyncio.gather(first_words.wait(), stream_began.wait(), engine_has(node, 3))
    num_rebuilds, refs = node.figures().num_rebuilds, await node.run_on_engine(look)
    with watched_rebuild(node, monkeypatch, refs) as (left, looks_at_all):
        await break_next_step(node)
        async with asyncio.timeout(60):
            code, events = await asyncio.gather(*tasks)
            error = (await whole)["error"]
        assert code == "engine_failed"
        assert '"error"' in events and "being rebuilt" in events and events.rstrip().endswith("[DONE]")
        assert "being rebuilt" in error["message"]
        with pytest.raises(EngineUnavailable) as raised:
            await generate(node, "Hello!")
        assert raised.value.code == "engine_failed"
        async with http.post(CHAT, json=BODY) as response:
            assert response.status == 503 and response.headers["Retry-After"]
        await told(http.get("/readyz"), 503)
        await is_ready(node)
    assert node.figures().num_rebuilds == num_rebuilds + 1
    assert node.progress.stage == "ready"
    assert left == [[]]
    assert looks_at_all.count(True) == 1 < len(looks_at_all)
    # The same session goes on, with adapters, and the history that was stored is still there.
    assert (await ask(chat, "Hello!", session_id=session_id, adapter="shout"))[0].isupper()


async def test_an_idle_engine_uses_no_processor(node: SharedNode) -> None:
    def processor_s() -> float:
        """Processor time of the engine's thread, in seconds."""
        tid = node._thread._thread.native_id
        with open(f"/proc/self/task/{tid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / 100

    await generate(node, "before", 2)
    shares = []
    # One more step tells the worker that the request has ended, some time soon. An engine that never rests has no quiet stretch at all.
    for _ in range(10):
        used, started, steps = processor_s(), time.monotonic(), node.figures().num_steps
        await asyncio.sleep(1)
        shares.append((processor_s() - used) / (time.monotonic() - started))
        if shares[-1] < 0.02 and node.figures().num_steps == steps:
            break
    else:
        pytest.fail(f"the engine's thread was never at rest: {shares} of a core")


async def test_an_engine_of_the_vllm_that_this_is_written_for_lacks_nothing(node: SharedNode) -> None:
    """Nor what only others have, such as one with a draft model: each start's log would say that vLLM has moved."""
    off = await node.run_on_engine(lambda driver: [feature.name for feature in driver._off])
    assert off == []
