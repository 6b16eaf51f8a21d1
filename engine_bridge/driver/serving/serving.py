"""vLLM's own OpenAI and Anthropic serving classes over our engine client, free of any web framework.

Templates, parsers, schemas and error bodies are vLLM's; this module is the way in (a parsed JSON body) and the way out (a JSON reply or an iterator
of server-sent events).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import msgspec
from msgspec.structs import asdict

from engine_bridge.calls import pictures
from engine_bridge.calls.body_forms import usual_form
from engine_bridge.calls.context_overflow import shorter
from engine_bridge.calls.prompt_embeds import embeddings_of
from engine_bridge.driver.apis.bodies import (
    Rejected,
    as_error_response,
    as_unusable,
    error_reply,
    parse,
    tell_no_insides,
)
from engine_bridge.driver.apis.chat import Chat, chunks_of
from engine_bridge.driver.apis.chat_template import follow_template
from engine_bridge.driver.apis.completions import CompletionBody, Completions
from engine_bridge.driver.apis.embeddings import check_embeddings
from engine_bridge.driver.apis.media import check_sizes
from engine_bridge.driver.apis.messages import Messages
from engine_bridge.driver.apis.output_split import OutputSplit
from engine_bridge.driver.apis.responses import ResponsesServing, sse_text
from engine_bridge.driver.apis.tokenize_request import NoBody, TokenizeBody, tokenizer_facts
from engine_bridge.driver.apis.tool_calls import NO_FORM, is_strict, refuses_calls
from engine_bridge.driver.serving.api_events import ApiEvents, ended
from engine_bridge.driver.serving.call import CALL, Call
from engine_bridge.driver.serving.engine_client import BridgeEngineClient
from engine_bridge.driver.serving.entrance import Entrance
from engine_bridge.driver.serving.options import ServingOptions
from engine_bridge.driver.serving.served_adapters import ServedAdapters
from engine_bridge.driver.serving.turn_prompts import TurnPrompts, offered, too_long
from engine_bridge.driver.vllm_api import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
    BaseModelPath,
    ChatCompletionRequest,
    DetokenizeRequest,
    EngineCoreRequest,
    ErrorResponse,
    LoRARequest,
    OnlineRenderer,
    OpenAIServingModels,
    RequestOutputKind,
    ResponsesRequest,
    ServingTokenization,
    create_error_response,
    get_max_tokens,
)
from engine_bridge.policy.limits.request_limits import check_prompt
from engine_bridge.protocol.api_errors import anthropic_words, is_too_long, unknown_model
from engine_bridge.protocol.engine_request import EngineRequest, passed_on
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import (
    Api,
    Dropped,
    JsonReply,
    Prompt,
    SseReply,
    pack_token_ids,
)
from engine_bridge.protocol.token_stream import TokenStream

log = logging.getLogger(__name__)

# Calls of all tenants whose pictures are read at once: decoded pictures take memory. Chosen.
READING_PICTURES = 2


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One API: the class of its requests, vLLM's method that answers them, and the form of what comes back.

    Attributes:
        texts: makes server-sent events of a request and one event of its stream.
        dump: options by which a whole reply becomes JSON.
    """

    request_class: Any
    call: Callable[[Any, Any], Awaitable[Any]]
    is_anthropic: bool = False
    texts: Callable[[Any, Any], Iterable[str]] = lambda request, event: (event,)
    dump: Mapping[str, Any] | None = None


class Serving:
    """The API families of one node."""

    def __init__(self, client: BridgeEngineClient, options: ServingOptions) -> None:
        self._client, self._options = client, options
        self._entrance, self._reading = Entrance(), Entrance(READING_PICTURES)
        parsers: dict[str, Any] = {
            "request_logger": None,
            "chat_template": options.chat_template,
            "chat_template_content_format": options.chat_template_content_format,
            # There always is a parser, so "auto" is accepted: some clients send it with every request.
            "enable_auto_tools": True,
            "tool_parser": options.tool_parser,
            "reasoning_parser": options.reasoning_parser,
            "default_chat_template_kwargs": dict(options.default_chat_template_kwargs),
        }
        client.use_reasoning_parser(options.reasoning_parser)
        bases = [BaseModelPath(name, options.model_path) for name in options.model_names]
        self.models = OpenAIServingModels(client, bases)
        self.adapters = ServedAdapters(self.models, client.versions)
        self._renderer = OnlineRenderer(client.model_config, client.renderer, **parsers)
        self._prompts = TurnPrompts(client, options, self._renderer, parsers, self._reading)
        switches = dict.fromkeys(options.api_switches, True)
        shared = {"online_renderer": self._renderer, "enable_prompt_tokens_details": True, **switches}
        self._chat = Chat(client, self.models, "assistant", **shared, **parsers)
        completion = Completions(client, self.models, request_logger=None, **shared)
        responses = ResponsesServing(client, self.models, self._renderer, **switches, **parsers)
        messages = Messages(client, self.models, "assistant", **shared, **parsers)
        tell_no_insides(self._chat, completion, responses, messages)
        self._endpoints = self._apis(completion, responses, messages) | self._tokenization()

    def _apis(
        self, completion: Completions, responses: ResponsesServing, messages: Messages
    ) -> dict[str, _Endpoint]:
        return {
            "chat": _Endpoint(ChatCompletionRequest, self._chat.create_chat_completion, texts=chunks_of),
            "completions": _Endpoint(CompletionBody, completion.create_completion),
            "responses": _Endpoint(
                ResponsesRequest, responses.create_responses, texts=sse_text, dump={"by_alias": True}
            ),
            "input_tokens": _Endpoint(ResponsesRequest, responses.count_tokens),
            "messages": _Endpoint(
                AnthropicMessagesRequest,
                messages.create_messages,
                is_anthropic=True,
                dump={"exclude_none": True},
            ),
            "count_tokens": _Endpoint(
                AnthropicCountTokensRequest,
                messages.count_tokens,
                is_anthropic=True,
                dump={"exclude_none": True},
            ),
        }

    def _tokenization(self) -> dict[str, _Endpoint]:
        tokenization = ServingTokenization(
            self.models,
            self._renderer,
            chat_template=self._options.chat_template,
            chat_template_content_format=self._options.chat_template_content_format,
            default_chat_template_kwargs=dict(self._options.default_chat_template_kwargs),
        )

        async def tell_tokenizer(*_: Any) -> Any:
            """Return the tokenizer's facts."""
            found = await tokenization.get_tokenizer_info()
            return tokenizer_facts(found, self._client.renderer.get_tokenizer())

        return {
            "tokenize": _Endpoint(TokenizeBody, tokenization.create_tokenize),
            "detokenize": _Endpoint(DetokenizeRequest, tokenization.create_detokenize),
            "tokenizer_info": _Endpoint(NoBody, tell_tokenizer),
        }

    @property
    def reasoning_parser(self) -> str:
        """The name of vLLM's parser; "" for a model that does not reason."""
        return self._options.reasoning_parser

    @property
    def can_use_tools(self) -> bool:
        """Whether calls of tools that the model writes can be read, and contents are split, so that no result can spell a special token."""
        return self._options.tool_parser != NO_FORM and bool(self._client.continuing.known)

    def warm_up(self) -> None:
        """Compile the chat template, find out what it takes, and load lazy parts of the tokenizer."""
        follow_template(self._client.renderer, self._client.model_config, self._options.chat_template)
        self._renderer.warmup()

    async def check_template_arguments(self) -> None:
        """Render a message with the operator's arguments, if there are any. Raises InvalidRequest where the chat template fails with them."""
        if not self._options.default_chat_template_kwargs:
            return
        try:
            await self._prompts.rendered(
                ChatCompletionRequest(messages=[{"role": "user", "content": "Hello!"}])
            )
        except Exception as error:
            raise InvalidRequest(
                f"default_chat_template_kwargs: the chat template fails with these arguments: {error}"
            ) from error

    # -- API-shaped calls --------------------------------------------------------------------------------------------

    async def serve(
        self, api: Api, body: Any, headers: Mapping[str, str], request: EngineRequest
    ) -> JsonReply | SseReply:
        """Answer one call; every failure becomes a reply in that API's own shape."""
        leave = await self._entrance.enter(request.tenant)
        if pictures.urls_of(body):
            leave = await self._also_reading(leave)
        goes_on = self._options.keeps_token_ids and request.keeps_ids
        call = Call(
            msgspec.structs.replace(request, history_token_ids=b""),
            history=request.history_token_ids if goes_on else None,
            when_known=leave,
        )
        token = CALL.set(call)
        reply: JsonReply | SseReply | None = None
        try:
            reply = await self._serve(api, body, headers, call)
        finally:
            CALL.reset(token)
            leave()
            if not isinstance(reply, SseReply):
                call.close()
        return reply

    async def _also_reading(self, leave: Callable[[], None]) -> Callable[[], None]:
        """Wait for a place at reading pictures, of which there are few for all tenants. Returns what leaves both places."""
        try:
            read = await self._reading.enter("")
        except BaseException:
            leave()
            raise

        def leave_both() -> None:
            """Give both places back."""
            read()
            leave()

        return leave_both

    async def _serve(
        self, api: Api, body: Any, headers: Mapping[str, str], call: Call
    ) -> JsonReply | SseReply:
        endpoint = self._endpoints[api]
        raw_request = SimpleNamespace(headers=passed_on(headers), state=SimpleNamespace())
        try:
            result, dropped = await self._fitting(api, body, raw_request, call)
            if isinstance(result, ApiEvents):
                result.dropped = dropped
                await result.begin()
                return SseReply(result)
        except Exception as error:
            response = as_error_response(error) if call.is_queued else as_unusable(error, body)
            result, dropped = response, Dropped()
        if isinstance(result, ErrorResponse):
            if endpoint.is_anthropic and _is_too_long(result):
                limit = self._client.model_config.max_model_len
                result.error.message = anthropic_words(result.error.message, limit)
            return error_reply(result, is_anthropic=endpoint.is_anthropic)
        reply = result.model_dump_json(**(endpoint.dump or {})).encode()
        return JsonReply(200, reply, call.seen, dropped, figures=call.figures)

    async def _fitting(self, api: Api, body: Any, raw_request: Any, call: Call) -> tuple[Any, Dropped]:
        """Return the call's result, and the parts that were left out so that its prompt fits.

        If no shorter version fits, the first error is returned.
        """
        options = self._options
        body = usual_form(api, body, self._client.model_config.max_model_len)
        pictures.check_pictures(body, self._client.max_images)
        if urls := pictures.urls_of(body):
            await asyncio.to_thread(check_sizes, urls, pictures.where(body))
        if embeddings := embeddings_of(api, body):
            await asyncio.to_thread(check_embeddings, embeddings, self._client.model_config)
        result = first = await self._attempt(api, body, raw_request, call)
        if _is_too_long(first):
            versions = shorter(
                options.context_overflow, api, body, calls_tools=options.tool_parser != NO_FORM
            )
            for version, dropped in versions:
                result = await self._attempt(api, version, raw_request, call)
                if not _is_too_long(result):
                    log.info("left out of a prompt that is longer than the model's context: %s", dropped)
                    return result, dropped
        return first, Dropped()

    async def _attempt(self, api: Api, body: Any, raw_request: Any, call: Call) -> Any:
        """Return the result of vLLM's class. An unknown model and errors raised before the request is queued become an ErrorResponse."""
        endpoint = self._endpoints[api]
        try:
            check_prompt(api, body, self._options.max_prompt_chars, pictures.num_chars(body))
            request = parse(endpoint.request_class, body)
            self._check_model(getattr(request, "model", None))
            if refuses_calls(request):
                # A model that sees tools calls them, whatever the request says, and the call would be text.
                call.banned_token = self._options.call_opener
            call.is_strict = is_strict(request)
            result = await _cancellable(endpoint.call(request, raw_request))
            if call.failure is not None:
                raise call.failure
        except Rejected as rejected:
            return rejected.response
        except Exception as error:
            if call.is_queued:
                raise
            return as_unusable(error, body)
        if isinstance(result, AsyncIterator):
            texts = partial(endpoint.texts, request)
            return ApiEvents(call, result, texts, is_anthropic=endpoint.is_anthropic)
        return result

    def _check_model(self, name: str | None) -> None:
        """Refuse a model that is not served. vLLM would quote the name in its log, however long. Raises Rejected."""
        if name and not self.models.is_base_model(name) and name not in self.models.lora_requests:
            raise Rejected(
                create_error_response(
                    self._unknown_model(name), "NotFoundError", HTTPStatus.NOT_FOUND, param="model"
                )
            )

    def _unknown_model(self, name: str) -> str:
        return unknown_model(name, [*self._options.model_names, *sorted(self.models.lora_requests)])

    async def models_reply(self) -> JsonReply:
        """Return the reply to `GET /v1/models`: the model and its adapters."""
        return JsonReply(200, (await self.models.show_available_models()).model_dump_json().encode())

    # -- the gateway's own turns -------------------------------------------------------------------------------------

    async def submit(
        self, request: EngineRequest, stream: TokenStream, stream_interval: int
    ) -> tuple[str, EngineCoreRequest] | None:
        """Render and tokenise a turn as a chat completion would be, and register it for `stream` without queueing it yet.

        stream: takes the answer; it is told of the prompt, and how to tell the model's reasoning from its answer. stream_interval: tokens per output
        after the first one. Returns what `BridgeEngineClient.submit` does; None where the stream was stopped meanwhile. Raises InvalidRequest for a
        turn that cannot be answered; also vLLM's own errors.
        """
        lora_request = self.lora_request(request.adapter)
        sampling = {name: value for name, value in asdict(request.sampling).items() if value is not None}
        max_tokens = sampling.pop("max_tokens", None)
        ids = request.prompt_token_ids
        if ids is not None and request.goes_on:
            is_spelled = await self._client.continuing.spells(ids, request.messages[-1].content)
            ids = ids if is_spelled else None
        if ids is not None:
            chat_request = ChatCompletionRequest(messages=[], stream=True, **offered(request), **sampling)
            if request.tools:  # as vLLM's renderer does for a rendered prompt
                chat_request = self._parser(chat_request).adjust_request(chat_request)
            engine_input: Any = {"prompt_token_ids": list(ids)}
            stream.prompt = Prompt(pack_token_ids(ids), "given")
        else:
            chat_request, engine_input, stream.prompt = await self._prompts.of_turn(request, sampling)
        prompt_len = len(engine_input["prompt_token_ids"])
        params = chat_request.to_sampling_params(
            self._max_tokens(max_tokens, prompt_len), self._chat.default_sampling_params
        )
        params.output_kind = RequestOutputKind.DELTA
        params.stream_interval = stream_interval
        if (split := self._split(chat_request, request)) is not None:
            stream.split, stream.calls = split, split.calls
        await self._client.check_grammar(params, request.tenant)
        if stream.is_over:
            return None
        self._client.check_ready()
        return self._client.submit(
            engine_input, params, request.request_id, stream, request=request, lora_request=lora_request
        )

    async def draft_prompt(self, request: EngineRequest) -> Any:
        """Return the beginning of a turn's prompt, as vLLM's engine takes it, that stays as it is however the last message continues."""
        return await self._prompts.of_draft(request)

    def _split(self, chat_request: ChatCompletionRequest, request: EngineRequest) -> OutputSplit | None:
        """Return what tells reasoning, text and calls of tools apart in an answer; None where there is only text."""
        # An answer that goes on is past its reasoning, where it had some.
        has_reasoning = bool(self._options.reasoning_parser) and not request.goes_on
        if not has_reasoning and not request.tools:
            return None
        return OutputSplit(self._parser(chat_request), chat_request)

    def _parser(self, chat_request: ChatCompletionRequest) -> Any:
        """Return a parser for one answer, as in OpenAIServingChat: parsers know how far their answer has come."""
        return self._chat.parser_cls(
            self._client.renderer.get_tokenizer(),
            chat_request.tools,
            chat_template_kwargs=self._renderer.effective_chat_template_kwargs(chat_request),
            model_config=self._client.model_config,
        )

    def _max_tokens(self, wanted: int | None, prompt_len: int) -> int:
        limit = self._client.model_config.max_model_len
        if prompt_len >= limit:
            raise too_long(limit)
        return get_max_tokens(limit, wanted, prompt_len, self._chat.default_sampling_params)

    def serves(self, adapter: str) -> bool:
        """Return whether requests for this adapter are let in."""
        return adapter in self.models.lora_requests

    def lora_request(self, adapter: str) -> LoRARequest | None:
        """Return the adapter of this name, None for the base model ("" or its own name). Raises InvalidRequest."""
        if not adapter or self.models.is_base_model(adapter):
            return None
        lora_request = self.models.lora_requests.get(adapter)
        if lora_request is None:
            raise InvalidRequest(self._unknown_model(adapter), param="adapter", code="unknown_model")
        return lora_request


def _is_too_long(result: Any) -> bool:
    if not isinstance(result, ErrorResponse) or result.error.code != 400:
        return False  # other errors may quote a name of the client's
    return is_too_long(result.error.message)


async def _cancellable(calling: Awaitable[Any]) -> Any:
    """Return the result of vLLM's class. When the caller is cancelled, so is `calling`, of whose cancellation vLLM makes a reply."""
    task = asyncio.ensure_future(calling)
    try:
        await asyncio.wait({task})
        return task.result()
    finally:
        await ended(task)
