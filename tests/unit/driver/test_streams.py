import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine_bridge.driver.serving.streams import Streams
from engine_bridge.driver.vllm_api import RetryableRequestError
from engine_bridge.protocol.token_stream import TokenStream


def output(text: str) -> Any:
    """The whole answer of the request of this name, as one output of vLLM's."""
    completion = SimpleNamespace(text=text, token_ids=[1], finish_reason="stop")
    figures = {"prompt_token_ids": [0], "num_cached_tokens": 0, "metrics": None}
    return SimpleNamespace(request_id=text, outputs=[completion], finished=True, **figures)


async def test_an_output_that_cannot_be_read_ends_its_own_answer_and_no_other_one() -> None:
    def fails(output: Any) -> tuple[str, str]:
        raise KeyError("a parser of a model's")

    streams, answers = Streams(), {name: TokenStream() for name in "abc"}
    for name, answer in answers.items():
        streams.register(name, answer)
    answers["b"].split = fails
    streams.deliver([output(name) for name in "abc"])
    assert (await answers["a"].next()).text == "a" and (await answers["c"].next()).text == "c"
    with pytest.raises(RetryableRequestError, match="Send the request again"):
        async with asyncio.timeout(10):
            await answers["b"].next()
