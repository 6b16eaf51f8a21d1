"""Merging of deltas and the figures of one answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine_bridge.protocol.node import Prompt
from engine_bridge.protocol.token_stream import TokenStream


def output(
    text: str, *, finish: str | None = None, num_tokens: int = 1, prompt: int = 10, cached: int = 4
) -> Any:
    """The parts of a vLLM RequestOutput that a stream reads."""
    completion = SimpleNamespace(text=text, token_ids=list(range(num_tokens)), finish_reason=finish)
    return SimpleNamespace(
        outputs=[completion],
        finished=finish is not None,
        prompt_token_ids=[0] * prompt,
        num_cached_tokens=cached,
        metrics=SimpleNamespace(queued_ts=1.0, scheduled_ts=1.25),
    )


async def test_what_comes_together_is_one_delta() -> None:
    stream = TokenStream()
    stream.put(output("a"))
    assert (await stream.next()).text == "a"
    for letter in "bcd":
        stream.put(output(letter))
    merged = await asyncio.wait_for(stream.next(), 60)
    assert merged.text == "bcd" and len(merged.token_ids) == 3 and merged.finish_reason is None


async def test_a_waiting_reader_gets_the_end_with_the_rest() -> None:
    stream = TokenStream()
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.put(output("b"))
    stream.put(output("c", finish="stop"))
    last = await asyncio.wait_for(waiting, 60)
    assert last.text == "bc" and last.finish_reason == "stop" and stream.is_ended_by_engine


async def test_figures_add_up() -> None:
    stream = TokenStream()
    stream.put(output("a"))
    stream.put(output("b", finish="length"))
    last = await stream.next()
    assert last.usage is not None and last.timings is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (10, 2, 4)
    kv = last.timings.kv
    assert kv.device + kv.host + kv.disk + kv.recomputed == 10 and kv.device == 4
    assert last.timings.queue_ms == pytest.approx(250)
    assert last.timings.ttft_ms is not None and last.timings.ttft_ms <= last.timings.e2e_ms


async def test_stop_keeps_what_came_and_ignores_what_follows() -> None:
    stream = TokenStream()
    stream.put(output("a"))
    await stream.next()
    stream.put(output("b"))
    stream.stop()
    stream.put(output("c"))
    last = await stream.next()
    assert (last.text, last.finish_reason) == ("b", "stopped") and not stream.is_ended_by_engine


async def test_the_last_delta_tells_the_prompt() -> None:
    """And none before it."""
    stream = TokenStream()
    stream.prompt = Prompt(b"", "kept", 3)
    stream.put(output("a"))
    assert (await stream.next()).prompt is None
    stream.put(output("b", finish="stop"))
    assert (await stream.next()).prompt == Prompt(b"", "kept", 3)


async def test_an_error_reaches_a_waiting_reader() -> None:
    stream = TokenStream()
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.put(RuntimeError("engine gone"))
    with pytest.raises(RuntimeError, match="engine gone"):
        await waiting


async def test_one_token_has_no_tpot() -> None:
    stream = TokenStream()
    stream.put(output("a", finish="stop"))
    last = await stream.next()
    assert last.timings is not None and last.timings.tpot_ms is None
