"""vLLM's APIs for embeddings and scores over the engine thread."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

from pydantic import RootModel

from engine_bridge.bridge import EngineThread
from engine_bridge.calls.body_forms import without_nulls
from engine_bridge.driver.apis.bodies import Rejected, as_unusable, error_reply, parse
from engine_bridge.driver.apis.vocabulary import refuse_unknown_tokens
from engine_bridge.driver.pooling.engine import PoolingDriver, can_score
from engine_bridge.driver.serving.stream_failures import engine_failed
from engine_bridge.driver.vllm_api import (
    BaseModelPath,
    ChatTemplateConfig,
    EmbeddingCompletionRequest,
    OpenAIServingModels,
    RerankRequest,
    ScoreRequest,
    ServingEmbedding,
    ServingScores,
)
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import Api, JsonReply

# Chosen: 2,048 embeddings of 1,024 numbers take 44 MiB; a frame between the processes holds 256.
MOST_REPLY_BYTES = 128 << 20
# The second one keeps the thread at work meanwhile.
MOST_READ_AT_ONCE = 2
# The text of the tokenizers library, where a text is to be cut (max_tokens_per_doc) and its query alone is too long.
NO_ROOM = "Sequence to truncate too short"


@dataclass(slots=True)
class Call:
    """A call under way.

    turns: of its tenant's calls, to be read. num_tokens: of the prompts that its answer took. reading: its prompts that are split into tokens, or
    wait for that.
    """

    tenant: str
    turns: asyncio.Semaphore
    num_tokens: int = 0
    reading: list[asyncio.Future[Any]] = field(default_factory=list)


_CALL: ContextVar[Call] = ContextVar("call")


class ScoreBody(RootModel[ScoreRequest]):
    """The body of a call for scores, whose texts have one of four pairs of names."""


class PoolingClient:
    """The client that vLLM's serving classes ask for embeddings and scores, in place of its `EngineClient`.

    Args:
        thread: a started engine thread.
        engine: the `LLMEngine` of the first build, whose renderer and configuration are kept over rebuilds.
    """

    def __init__(self, thread: EngineThread[PoolingDriver], engine: Any) -> None:
        self._thread = thread
        self._sequence = itertools.count()
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._num_waiting: Counter[str] = Counter()
        self.renderer, self.vllm_config = engine.renderer, engine.vllm_config
        self.model_config, self.input_processor = engine.model_config, engine.input_processor
        refuse_unknown_tokens(self.renderer, self.model_config.get_vocab_size())

    def take(self, outputs: list[Any]) -> None:
        """Hand outputs to those who wait for them."""
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
        """Yield the output of one prompt. Closing the iterator drops the prompt.

        The more prompts of a tenant wait, the later its next one starts: so no tenant waits behind all inputs of another's call.
        """
        call, unique_id = _CALL.get(), f"{request_id}-{next(self._sequence)}"
        answer = self._waiting[unique_id] = asyncio.get_running_loop().create_future()
        priority = self._num_waiting[call.tenant]
        self._num_waiting[call.tenant] += 1
        try:
            await self._thread.call(lambda driver: driver.add(unique_id, prompt, pooling_params, priority))
            output = await answer
            call.num_tokens += len(output.prompt_token_ids)
            yield output
        finally:
            del self._waiting[unique_id]
            self._num_waiting[call.tenant] -= 1
            if not self._num_waiting[call.tenant]:
                del self._num_waiting[call.tenant]
            if not answer.done() or answer.cancelled():
                self._thread.submit(lambda driver: driver.abort(unique_id))

    async def is_tracing_enabled(self) -> bool:
        """Return False: the gateway's span covers the call."""
        return False


class PoolingServing:
    """Answers calls for embeddings, by OpenAI's API, and for scores, by vLLM's and Jina's, as far as the model makes them.

    Args:
        client: of the engine.
        tasks: what vLLM can use the model for.
        model_name, model_path: of the model.
        chat_template: by which it reads a query and a text; None: as vLLM puts them together without one.
    """

    def __init__(
        self,
        client: PoolingClient,
        tasks: tuple[str, ...],
        model_name: str,
        model_path: str,
        chat_template: str | None,
    ) -> None:
        models = OpenAIServingModels(client, [BaseModelPath(name=model_name, model_path=model_path)])
        template = ChatTemplateConfig(chat_template=chat_template)
        options: dict[str, Any] = {"request_logger": None, "chat_template_config": template}
        self._calls: dict[str, tuple[Any, Any]] = {}
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._max_model_len = client.model_config.max_model_len
        if "embed" in tasks:
            embeddings = ServingEmbedding(client, models, **options)
            self._calls["embeddings"] = EmbeddingCompletionRequest, embeddings
        if can_score(client, tasks):
            # Without what vLLM keeps of a query between prompts: it would have to be removed when a call ends early.
            scores = ServingScores(
                client, models, supported_tasks=tasks, enable_flash_late_interaction=False, **options
            )
            self._calls |= {"rerank": (RerankRequest, scores), "score": (ScoreBody, scores)}
        for processor in {answer.io_processor for _, answer in self._calls.values()}:
            read_in_turn(processor)

    async def serve(self, api: Api, body: Any, headers: Mapping[str, str], tenant: str) -> JsonReply:
        """Answer one call. A faulty call gets a reply that says the fault."""
        call = Call(tenant, self._turns.setdefault(tenant, asyncio.Semaphore(MOST_READ_AT_ONCE)))
        _CALL.set(call)
        raw_request = SimpleNamespace(headers=headers, state=SimpleNamespace())
        request_class, answer = self._calls[api]
        try:
            request = parse(request_class, without_nulls(body))
            reply = await answer(request.root if request_class is ScoreBody else request, raw_request)
            return JsonReply(200, _bounded(bytes(reply.body)), num_prompt_tokens=call.num_tokens)
        except Rejected as rejected:
            return error_reply(rejected.response, is_anthropic=False)
        except Exception as error:
            if NO_ROOM in str(error):
                length = self._max_model_len
                error = InvalidRequest(
                    f"The query leaves no room for a text: this model's maximum context length is {length:,} tokens."
                )
            return error_reply(as_unusable(error, body), is_anthropic=False)
        finally:
            for prompt in call.reading:
                prompt.cancel()


def read_in_turn(processor: Any) -> None:
    """Have a processor of vLLM's take a tenant's prompts one by one, and note them in `Call.reading`.

    One thread reads the prompts of all calls. vLLM gives it all prompts of a call at once, and has it go on with those of a call that was refused.
    """
    read = processor.render_async

    async def in_turn(call: Call, prompt: Any) -> Any:
        """Split a prompt into tokens once few of its tenant's are split."""
        async with call.turns:
            return await read(prompt)

    def render_async(prompt: Any) -> asyncio.Future[Any]:
        """Split a prompt into tokens, as vLLM does, behind few of its tenant's own, and where its call can end that."""
        call = _CALL.get()
        call.reading.append(asyncio.ensure_future(in_turn(call, prompt)))
        return call.reading[-1]

    processor.render_async = render_async


def _bounded(body: bytes) -> bytes:
    if len(body) > MOST_REPLY_BYTES:
        raise InvalidRequest(
            f"The reply takes {len(body):,} bytes, and may take {MOST_REPLY_BYTES:,}: send fewer inputs at once.",
            param="input",
        )
    return body
