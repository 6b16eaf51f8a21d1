"""vLLM's embeddings API over the engine thread."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from engine_bridge.bridge import EngineThread
from engine_bridge.calls.body_forms import without_nulls
from engine_bridge.driver.apis.bodies import Rejected, as_unusable, error_reply, parse
from engine_bridge.driver.apis.vocabulary import refuse_unknown_tokens
from engine_bridge.driver.embedding.engine import EmbeddingDriver
from engine_bridge.driver.serving.stream_failures import engine_failed
from engine_bridge.driver.vllm_api import (
    BaseModelPath,
    ChatTemplateConfig,
    EmbeddingCompletionRequest,
    OpenAIServingModels,
    ServingEmbedding,
)
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import JsonReply

# Chosen: 2,048 embeddings of 1,024 numbers take 44 MiB; a frame between the processes holds 256.
MOST_REPLY_BYTES = 128 << 20
_TENANT: ContextVar[str] = ContextVar("tenant")


class EmbeddingClient:
    """The client that vLLM's serving class asks for embeddings, in place of its `EngineClient`.

    Args:
        thread: a started engine thread.
        engine: the `LLMEngine` of the first build, whose renderer and configuration are kept over rebuilds.
    """

    def __init__(self, thread: EngineThread[EmbeddingDriver], engine: Any) -> None:
        self._thread = thread
        self._sequence = itertools.count()
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._num_waiting: Counter[str] = Counter()
        self.renderer, self.vllm_config = engine.renderer, engine.vllm_config
        self.model_config, self.input_processor = engine.model_config, engine.input_processor
        refuse_unknown_tokens(self.renderer, self.model_config.get_vocab_size())

    def take(self, outputs: list[Any]) -> None:
        """Hand embeddings to those who wait for them."""
        for output in outputs:
            answer = self._waiting.get(output.request_id)
            if answer is not None and not answer.done():
                answer.set_result(output)

    def fail_all(self) -> None:
        """End all prompts, because their engine has failed."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(engine_failed())

    async def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """Yield the embedding of one prompt. Closing the iterator drops the prompt.

        The more prompts of a tenant wait, the later its next one starts: so no tenant waits behind all inputs of another's call.
        """
        tenant, unique_id = _TENANT.get(""), f"{request_id}-{next(self._sequence)}"
        answer = self._waiting[unique_id] = asyncio.get_running_loop().create_future()
        priority = self._num_waiting[tenant]
        self._num_waiting[tenant] += 1
        try:
            await self._thread.call(lambda driver: driver.add(unique_id, prompt, pooling_params, priority))
            yield await answer
        finally:
            del self._waiting[unique_id]
            self._num_waiting[tenant] -= 1
            if not self._num_waiting[tenant]:
                del self._num_waiting[tenant]
            if not answer.done() or answer.cancelled():
                self._thread.submit(lambda driver: driver.abort(unique_id))

    async def is_tracing_enabled(self) -> bool:
        """Return False: the gateway's span covers the call."""
        return False


class EmbeddingServing(ServingEmbedding):
    """Answers calls of OpenAI's embeddings API.

    Args:
        client: of the engine.
        model_name, model_path: of the model.
    """

    def __init__(self, client: EmbeddingClient, model_name: str, model_path: str) -> None:
        models = OpenAIServingModels(client, [BaseModelPath(name=model_name, model_path=model_path)])
        template = ChatTemplateConfig()
        super().__init__(client, models, request_logger=None, chat_template_config=template)

    async def serve(self, body: Any, headers: Mapping[str, str], tenant: str) -> JsonReply:
        """Answer one call. A faulty call gets a reply that says the fault."""
        _TENANT.set(tenant)
        raw_request = SimpleNamespace(headers=headers, state=SimpleNamespace())
        try:
            request = parse(EmbeddingCompletionRequest, without_nulls(body))
            reply: JsonReply = await self(request, raw_request)
        except Rejected as rejected:
            return error_reply(rejected.response, is_anthropic=False)
        except Exception as error:
            return error_reply(as_unusable(error, body), is_anthropic=False)
        return reply

    def _build_response(self, ctx: Any) -> JsonReply:
        body = bytes(super()._build_response(ctx).body)
        if len(body) > MOST_REPLY_BYTES:
            raise InvalidRequest(
                f"The embeddings take {len(body):,} bytes, and a reply at most {MOST_REPLY_BYTES:,}: send fewer inputs at once.",
                param="input",
            )
        num_tokens = sum(len(output.prompt_token_ids) for output in ctx.final_res_batch)
        return JsonReply(200, body, num_prompt_tokens=num_tokens)
