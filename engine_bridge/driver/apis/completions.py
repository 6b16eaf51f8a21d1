"""Text completions as vLLM serves them, except that a prompt which is only repeated (`echo` with `max_tokens` 0) gets no answer and costs nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from engine_bridge.driver.vllm_api import (
    CompletionOutput,
    CompletionRequest,
    OpenAIServingCompletion,
    RequestOutput,
)


class CompletionBody(CompletionRequest):
    """The body of `/v1/completions`."""

    def to_sampling_params(self, *args: Any, **options: Any) -> Any:
        """Return vLLM's sampling parameters, with `max_tokens` 0 where nothing is to be computed: see `only_prompt`."""
        params = super().to_sampling_params(*args, **options)
        if self.is_echo_alone and params.prompt_logprobs is None:
            params.max_tokens = 0  # vLLM itself computes one token
        return params

    @property
    def is_echo_alone(self) -> bool:
        """Whether nothing but the prompt is asked for."""
        return bool(self.echo) and self.max_tokens == 0


async def only_prompt(prompt: Any, request_id: str, num_answers: int) -> AsyncGenerator[Any, None]:
    """Yield the output of a request for which nothing is computed."""
    yield _without_answer(
        RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=list(prompt["prompt_token_ids"]),
            prompt_logprobs=None,
            outputs=[CompletionOutput(number, "", [], None, None) for number in range(num_answers)],
            finished=True,
        )
    )


class Completions(OpenAIServingCompletion):
    """vLLM's class for text completions, used in the same way, with requests of `CompletionBody`."""

    def completion_stream_generator(
        self, request: Any, engine_inputs: Any, result_generator: Any, *args: Any, **options: Any
    ) -> Any:
        """Return the events of a stream."""
        results = _without_answers(result_generator) if request.is_echo_alone else result_generator
        return super().completion_stream_generator(request, engine_inputs, results, *args, **options)

    def request_output_to_completion_response(
        self, final_res_batch: Any, request: Any, *args: Any, **options: Any
    ) -> Any:
        """Return the whole reply.

        Its texts begin with their prompts if `echo` asks for that, also beside token ids, where vLLM leaves them out.
        """
        if request.is_echo_alone:
            final_res_batch = [_without_answer(result) for result in final_res_batch]
        reply = super().request_output_to_completion_response(final_res_batch, request, *args, **options)
        if request.echo and request.return_token_ids:
            prompts = [result.prompt or "" for result in final_res_batch for _ in result.outputs]
            for choice, prompt in zip(reply.choices, prompts, strict=True):
                choice.text = prompt + choice.text
        return reply


async def _without_answers(results: Any) -> AsyncGenerator[Any, None]:
    async for number, result in results:
        yield number, _without_answer(result)


def _without_answer(result: Any) -> Any:
    """Return the same result without the one token that had to be computed for its prompt's log probabilities."""
    for output in result.outputs:
        output.text, output.token_ids, output.logprobs = "", [], None
        output.stop_reason = None
        output.finish_reason = "length" if result.finished else None
    return result
