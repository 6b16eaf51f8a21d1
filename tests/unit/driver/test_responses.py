"""Log probabilities of responses are those of their texts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from vllm.logprobs import Logprob

from engine_bridge.driver.apis.responses import ResponsesServing, _of_the_text
from engine_bridge.driver.vllm_api import CompletionOutput, ResponsesRequest

REQUEST = {"input": "Hello!", "include": ["message.output_text.logprobs"]}


def output(finish_reason: str | None, stop_reason: Any = None) -> CompletionOutput:
    words = {1: "Hi", 2: "<end>"}
    logprobs: Any = [{number: Logprob(-0.5, decoded_token=word)} for number, word in words.items()]
    return CompletionOutput(
        0, "Hi", list(words), None, logprobs, finish_reason=finish_reason, stop_reason=stop_reason
    )


def tokens_of(found: CompletionOutput) -> list[str]:
    responses = ResponsesServing.__new__(ResponsesServing)
    responses.return_tokens_as_token_ids = False
    (item,) = responses._make_response_output_items(ResponsesRequest(**REQUEST), found, None)
    return [token.token for token in item.content[0].logprobs]


def test_the_token_that_ends_an_answer_is_left_out() -> None:
    assert tokens_of(output("stop")) == ["Hi"]
    assert tokens_of(output("length")) == ["Hi", "<end>"]
    assert tokens_of(output("stop", "a stop string")) == ["Hi", "<end>"]


async def test_so_it_is_of_a_streams_last_piece() -> None:
    async def contexts() -> AsyncIterator[Any]:
        for reason in (None, "stop"):
            yield SimpleNamespace(last_output=SimpleNamespace(outputs=[output(reason)]))

    pieces = [context.last_output.outputs[0] async for context in _of_the_text(contexts())]
    assert [len(piece.logprobs) for piece in pieces] == [2, 1]
    responses = ResponsesServing.__new__(ResponsesServing)
    responses.return_tokens_as_token_ids = False
    last = responses._create_response_logprobs(
        token_ids=pieces[1].token_ids, logprobs=pieces[1].logprobs, tokenizer=None
    )
    assert [token.token for token in last] == ["Hi"]
