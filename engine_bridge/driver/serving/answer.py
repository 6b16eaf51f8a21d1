"""One answer for vLLM's serving classes: its request is queued, then its outputs are read."""

from __future__ import annotations

from typing import Any, Protocol

from engine_bridge.driver.serving.call import Call
from engine_bridge.driver.vllm_api import (
    EngineCoreRequest,
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
    VLLMValidationError,
)
from engine_bridge.policy.limits.request_limits import RequestLimits


class AnswerQueue(Protocol):
    """Takes requests to the engine (`BridgeEngineClient`)."""

    limits: RequestLimits

    async def queue(
        self,
        unique_id: str,
        request: EngineCoreRequest,
        stream: Any,
        text: str | None,
        *,
        tenant: str,
        history: bytes | None,
    ) -> None:
        """Queue a validated request. Raises what stands against that."""

    def forget(self, unique_id: str, *, abort: bool) -> None:
        """Drop a stream; with `abort`, its request leaves the engine before the next step."""


class Answer:
    """The outputs of one request. Reading the first one queues the request, unless `begin` did it before.

    No generator: closing a generator that was never read does nothing, and its request would stay in the engine.
    """

    def __init__(
        self,
        client: AnswerQueue,
        call: Call,
        unique_id: str,
        request: EngineCoreRequest,
        collector: RequestOutputCollector,
        text: str | None,
    ) -> None:
        self._client, self._call = client, call
        self._unique_id, self._request, self._text = unique_id, request, text
        self._collector = collector
        self._history = call.take_history()
        self._continues = self._history is not None
        self._generated: list[int] = []
        self._has_begun = self._is_over = self._is_first = False
        call.answers[self] = None

    async def begin(self) -> None:
        """Queue the request. Raises what stands against that, which the call notes, too."""
        if self._has_begun:
            return
        self._has_begun = True
        try:
            await self._client.queue(
                self._unique_id,
                self._request,
                self._collector,
                self._text,
                tenant=self._call.request.tenant,
                history=self._history,
            )
        except BaseException as error:
            self.close()
            if isinstance(error, Exception):
                self._call.failed(error)
            raise
        self._call.queued()

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        try:
            await self.begin()
            output = self._collector.get_nowait() or await self._collector.get()
            if output.finished:
                self._end(abort=False)
            self._note(output)
        except BaseException:
            self.close()
            raise
        return output

    async def aclose(self) -> None:
        """Do as `close` does."""
        self.close()

    def close(self) -> None:
        """End the answer: its request leaves the engine before the next step."""
        if not self._is_over:
            self._end(abort=self._has_begun)

    def _end(self, *, abort: bool) -> None:
        self._is_over = True
        self._call.answers.pop(self, None)
        self._client.forget(self._unique_id, abort=abort)

    def _note(self, output: RequestOutput) -> None:
        """Keep what the call has to know of an output. Raises VLLMValidationError for an answer with too many log probabilities."""
        if self._call.first is None:
            self._call.first, self._is_first = output, True
        sampling = self._request.sampling_params
        # Outputs that are not deltas hold all tokens so far.
        is_whole = sampling is None or sampling.output_kind is not RequestOutputKind.DELTA
        if self._is_first:
            before = 0 if is_whole else self._call.num_answer_tokens
            self._call.num_answer_tokens = before + len(output.outputs[0].token_ids)
        if self._continues:
            if is_whole:
                self._generated.clear()
            self._generated += output.outputs[0].token_ids
            if output.finished and len(output.outputs) == 1:
                self._call.answered(self._request, self._generated)
        if sampling is not None and sampling.output_kind is RequestOutputKind.FINAL_ONLY:
            self._check_logprobs(output)

    def _check_logprobs(self, output: RequestOutput) -> None:
        """Refuse more log probabilities than a whole answer may have: vLLM formats them all at once, and all other requests wait for that."""
        sampling, most = self._request.sampling_params, self._client.limits.max_answer_logprobs
        positions = len(output.prompt_logprobs or ()) * ((sampling.prompt_logprobs or 0) + 1)
        for completion in output.outputs:
            positions += len(completion.logprobs or ()) * ((sampling.logprobs or 0) + 1)
        self._call.num_logprobs += positions
        if self._call.num_logprobs > most:
            raise VLLMValidationError(
                f"The answer has more than {most:,} log probabilities (max_answer_logprobs). Ask for a stream, "
                "for fewer tokens or for fewer log probabilities."
            )
