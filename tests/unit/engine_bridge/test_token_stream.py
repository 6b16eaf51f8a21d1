import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine_bridge.protocol.node import Prompt
from engine_bridge.protocol.token_stream import TokenStream


def output(
    text: str, *, finish: str | None = None, num_tokens: int = 1, prompt: int = 10, cached: int = 4
) -> Any:
    """The parts of a vLLM RequestOutput that a stream reads; the request has the name of its text."""
    completion = SimpleNamespace(text=text, token_ids=list(range(num_tokens)), finish_reason=finish)
    figures = {"request_id": text, "prompt_token_ids": [0] * prompt, "num_cached_tokens": cached}
    metrics = SimpleNamespace(queued_ts=1.0, scheduled_ts=1.25)
    is_over = finish is not None
    return SimpleNamespace(outputs=[completion], finished=is_over, **figures, metrics=metrics)


async def test_what_comes_together_is_one_delta_and_the_last_one_has_the_figures_and_the_prompt() -> None:
    stream = TokenStream()
    stream.prompt = Prompt(b"", "kept", 3)
    stream.put(output("a"))
    first = await stream.next()
    assert (first.text, first.finish_reason, first.prompt, first.usage) == ("a", None, None, None)
    for letter in "bc":
        stream.put(output(letter))
    stream.put(output("d", finish="length"))
    last = await asyncio.wait_for(stream.next(), 60)
    assert (last.text, len(last.token_ids), last.prompt) == ("bcd", 3, stream.prompt)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (10, 4, 4)
    kv = last.timings.kv
    assert kv.device + kv.host + kv.disk + kv.recomputed == 10 and kv.device == 4
    assert last.timings.queue_ms == pytest.approx(250)
    assert last.timings.ttft_ms is not None and last.timings.ttft_ms <= last.timings.e2e_ms


@pytest.mark.parametrize("is_error", [False, True])
async def test_a_waiting_reader_gets_the_end_with_the_rest_or_the_error(is_error: bool) -> None:
    stream = TokenStream()
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    if is_error:
        stream.put(RuntimeError("engine gone"))
        with pytest.raises(RuntimeError, match="engine gone"):
            await waiting
        return
    stream.put(output("bc", finish="stop"))
    last = await asyncio.wait_for(waiting, 60)
    assert last.text == "bc" and last.finish_reason == "stop" and stream.is_ended_by_engine
    assert last.timings is not None and last.timings.tpot_ms is None, "one token has none"


async def test_stop_keeps_what_came_and_ignores_what_follows() -> None:
    stream = TokenStream()
    stream.put(output("b"))
    stream.stop()
    stream.put(output("c"))
    last = await stream.next()
    assert (last.text, last.finish_reason) == ("b", "stopped") and not stream.is_ended_by_engine
