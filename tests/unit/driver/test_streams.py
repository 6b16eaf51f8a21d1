import asyncio
from typing import Any

import pytest

from engine_bridge.driver.serving.streams import Streams
from engine_bridge.driver.vllm_api import RetryableRequestError
from engine_bridge.protocol.token_stream import TokenStream
from tests.unit.engine_bridge.test_token_stream import output


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
