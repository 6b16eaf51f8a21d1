"""vLLM's own OpenAI and Anthropic serving classes over our engine client, free of any web framework.

Templates, parsers, schemas and error bodies are vLLM's; this module is the way in (a parsed JSON body) and the way out (a JSON reply or an iterator
of server-sent events).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import msgspec
from msgspec.structs import asdict

from engine_bridge.calls.body_forms import usual_form
from engine_bridge.calls.context_overflow import ContextOverflow, dropped_event, shorter
from engine_bridge.calls.continuity import Continued
from engine_bridge.driver.apis.bodies import (
    ANTHROPIC_ERROR_EVENT,
    ERROR_EVENT,
    Rejected,
    as_error_response,
    as_unusable,
    error_reply,
    in_our_form,
    parse,
    tell_no_insides,
    without_insides,
)
from engine_bridge.driver.apis.chat import Chat
from engine_bridge.driver.apis.completions import CompletionBody, Completions
from engine_bridge.driver.apis.failures import as_bridge_error, too_long_or_invalid
from engine_bridge.driver.apis.messages import Messages
from engine_bridge.driver.apis.reasoning_split import ReasoningSplit
from engine_bridge.driver.apis.responses import ResponsesServing
from engine_bridge.driver.apis.tokenize_request import NoBody, TokenizeBody, tokenizer_facts
from engine_bridge.driver.apis.tool_calls import NO_FORM
from engine_bridge.driver.serving.call import CALL, ServingCall
from engine_bridge.driver.serving.call_start import CallStart, ClosingEvents, Entrance, StartedStream
from engine_bridge.driver.serving.continuing import CallIds
from engine_bridge.driver.serving.engine_client import BridgeEngineClient
from engine_bridge.driver.serving.served_adapters import ServedAdapters
from engine_bridge.driver.vllm_api import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
    BaseModelPath,
    ChatCompletionRequest,
    DetokenizeRequest,
    ErrorResponse,
    LoRARequest,
    OnlineRenderer,
    OpenAIServingModels,
    RequestOutputKind,
    ResponsesRequest,
    SamplingParams,
    ServingTokenization,
    _convert_stream_to_sse_events,
    create_error_response,
    get_max_tokens,
    with_sse_keep_alive,
)
from engine_bridge.policy.limits.request_limits import check_prompt, check_prompt_chars
from engine_bridge.protocol.api_errors import anthropic_words, is_too_long, unknown_model
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import (
    Api,
    ChatMessage,
    Dropped,
    GenerateRequest,
    JsonReply,
    Prompt,
    SseReply,
    pack_token_ids,
    token_ids_event,
)
from engine_bridge.protocol.request_context import RequestContext, passed_on
from engine_bridge.protocol.token_stream import Split

log = logging.getLogger(__name__)

# Ways in which a draft may continue: a word may grow, end or be followed by punctuation.
DRAFT_ENDS = ("s", " a", ".")
# Chosen: proxies cut a silent connection after 30 to 60 s; a comment is no event to any client.
KEEP_ALIVE_S = 15.0


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """The settings of the serving classes.

    Attributes:
        chat_template: the template's text; None: the tokenizer's template.
        keeps_token_ids: whether a session's prompts begin with the ids that it has, as far as they fit.
    """

    served_model_name: str
    model_path: str
    tool_parser: str = NO_FORM
    reasoning_parser: str = ""
    chat_template: str | None = None
    max_prompt_chars: int = 1 << 20
    context_overflow: ContextOverflow = "error"
    keeps_token_ids: bool = True


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn that is ready to be submitted.

    Attributes:
        prompt: the prompt's ids, for the keeper of the conversation.
        split: separates the model's reasoning from its answer, where the form of its reasoning is known.
    """

    engine_input: Any
    params: SamplingParams
    lora_request: LoRARequest | None
    prompt: Prompt
    split: Split | None = None


@dataclass(frozen=True, slots=True)
class _Endpoint:
    request_class: Any
    call: Callable[[Any, Any], Awaitable[Any]]
    is_anthropic: bool = False
    yields_objects: bool = False
    dump: Mapping[str, Any] | None = None


class Serving:
    """The API families of one node."""

    def __init__(self, client: BridgeEngineClient, options: ServingOptions) -> None:
        self._client, self._options = client, options
        self._entrance = Entrance()
        parsers: dict[str, Any] = {
            "request_logger": None,
            "chat_template": options.chat_template,
            "chat_template_content_format": "auto",
            # There always is a parser, so "auto" is accepted: some clients send it with every request.
            "enable_auto_tools": True,
            "tool_parser": options.tool_parser,
            "reasoning_parser": options.reasoning_parser,
        }
        base = BaseModelPath(options.served_model_name, options.model_path)
        self.models = OpenAIServingModels(client, [base])
        self.adapters = ServedAdapters(self.models, client.versions)
        self._renderer = OnlineRenderer(client.model_config, client.renderer, **parsers)
        self._chat = Chat(
            client,
            self.models,
            "assistant",
            online_renderer=self._renderer,
            enable_prompt_tokens_details=True,
            **parsers,
        )
        completion = Completions(
            client,
            self.models,
            online_renderer=self._renderer,
            request_logger=None,
            enable_prompt_tokens_details=True,
        )
        responses = ResponsesServing(client, self.models, self._renderer, **parsers)
        messages = Messages(
            client,
            self.models,
            "assistant",
            online_renderer=self._renderer,
            enable_prompt_tokens_details=True,
            **parsers,
        )
        tell_no_insides(self._chat, completion, responses, messages)
        self._endpoints: dict[str, _Endpoint] = {
            "chat": _Endpoint(ChatCompletionRequest, self._chat.create_chat_completion),
            "completions": _Endpoint(CompletionBody, completion.create_completion),
            "responses": _Endpoint(
                ResponsesRequest, responses.create_responses, yields_objects=True, dump={"by_alias": True}
            ),
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
        } | self._tokenization()

    def _tokenization(self) -> dict[str, _Endpoint]:
        tokenization = ServingTokenization(
            self.models,
            self._renderer,
            chat_template=self._options.chat_template,
            chat_template_content_format="auto",
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

    def warm_up(self) -> None:
        """Compile the chat template and load lazy parts of the tokenizer."""
        self._renderer.warmup()

    # -- API-shaped calls --------------------------------------------------------------------------------------------

    async def serve(
        self, api: Api, body: Any, headers: Mapping[str, str], context: RequestContext
    ) -> JsonReply | SseReply:
        """Answer one call; every failure becomes a reply in that API's own shape."""
        leave = await self._entrance.enter(context.tenant)
        start = CallStart(when_known=leave)
        goes_on = self._options.keeps_token_ids and bool(context.session_id)
        ids = CallIds(context.history_token_ids) if goes_on else None
        call = ServingCall(msgspec.structs.replace(context, history_token_ids=b""), start, ids)
        token = CALL.set(call)
        try:
            return await self._serve(api, body, headers, call, start)
        finally:
            CALL.reset(token)
            start.is_over.set()
            leave()

    async def _serve(
        self, api: Api, body: Any, headers: Mapping[str, str], call: ServingCall, start: CallStart
    ) -> JsonReply | SseReply:
        endpoint = self._endpoints[api]
        raw_request = SimpleNamespace(headers=passed_on(headers), state=SimpleNamespace())
        try:
            result, dropped = await self._fitting(api, body, raw_request, start)
            if isinstance(result, AsyncIterator):
                events = _convert_stream_to_sse_events(result) if endpoint.yields_objects else result
                stream = StartedStream(_in_call(call, events))
                await stream.begin(start)
                told = _telling(dropped, with_sse_keep_alive(stream.events(), KEEP_ALIVE_S))
                return SseReply(ClosingEvents(_encoded(told, endpoint, call.ids), stream))
        except Exception as error:
            response = as_error_response(error) if start.is_queued else as_unusable(error, body)
            result, dropped = response, Dropped()
        if isinstance(result, ErrorResponse):
            if endpoint.is_anthropic and _is_too_long(result):
                limit = self._client.model_config.max_model_len
                result.error.message = anthropic_words(result.error.message, limit)
            return error_reply(result, is_anthropic=endpoint.is_anthropic)
        reply = result.model_dump_json(**(endpoint.dump or {})).encode()
        return JsonReply(200, reply, call.ids.seen if call.ids is not None else b"", dropped)

    async def _fitting(self, api: Api, body: Any, raw_request: Any, start: CallStart) -> tuple[Any, Dropped]:
        """Return the call's result, and the parts that were left out so that its prompt fits.

        If no shorter version fits, the first error is returned.
        """
        options = self._options
        body = usual_form(api, body, self._client.model_config.max_model_len)
        result = first = await self._attempt(api, body, raw_request, start)
        if _is_too_long(first):
            versions = shorter(
                options.context_overflow, api, body, calls_tools=options.tool_parser != NO_FORM
            )
            for version, dropped in versions:
                result = await self._attempt(api, version, raw_request, start)
                if not _is_too_long(result):
                    log.info("left out of a prompt that is longer than the model's context: %s", dropped)
                    return result, dropped
        return first, Dropped()

    async def _attempt(self, api: Api, body: Any, raw_request: Any, start: CallStart) -> Any:
        """Return the result of vLLM's class. An unknown model and errors raised before the request is queued become an ErrorResponse."""
        endpoint = self._endpoints[api]
        try:
            check_prompt(api, body, self._options.max_prompt_chars)
            request = parse(endpoint.request_class, body)
            self._check_model(getattr(request, "model", None))
            result = await start.result_of(endpoint.call(request, raw_request))
        except Rejected as rejected:
            return rejected.response
        except Exception as error:
            if start.is_queued:
                raise
            return as_unusable(error, body)
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
        return unknown_model(name, [self._options.served_model_name, *sorted(self.models.lora_requests)])

    async def models_reply(self) -> JsonReply:
        """Return the reply to `GET /v1/models`: the model and its adapters."""
        return JsonReply(200, (await self.models.show_available_models()).model_dump_json().encode())

    # -- the gateway's own turns -------------------------------------------------------------------------------------

    async def prepare(self, request: GenerateRequest, stream_interval: int) -> Prepared:
        """Render and tokenise a turn as a chat completion would be. `stream_interval` is the number of tokens per output after the first.

        Raises:
            BridgeError: InvalidRequest for a turn that cannot be answered, or the server's own failure.
        """
        lora_request = self.lora_request(request.context.adapter)
        sampling = {name: value for name, value in asdict(request.sampling).items() if value is not None}
        max_tokens = sampling.pop("max_tokens", None)
        messages: Any = [{"role": m.role, "content": m.content} for m in request.messages]
        try:
            chat_request = ChatCompletionRequest(messages=messages, stream=True, **sampling)
            if request.prompt_token_ids is not None:
                engine_input: Any = {"prompt_token_ids": list(request.prompt_token_ids)}
                prompt = Prompt(pack_token_ids(request.prompt_token_ids), "given")
            else:
                engine_input = await self._render(chat_request)
                prompt = await self._continue(request, engine_input)
            prompt_len = len(engine_input["prompt_token_ids"])
            params = chat_request.to_sampling_params(
                self._max_tokens(max_tokens, prompt_len), self._chat.default_sampling_params
            )
        except Exception as error:
            raise as_bridge_error(error) from error
        params.output_kind = RequestOutputKind.DELTA
        params.stream_interval = stream_interval
        return Prepared(engine_input, params, lora_request, prompt, self._split(chat_request))

    def _split(self, chat_request: ChatCompletionRequest) -> Split | None:
        if not self._options.reasoning_parser:
            return None
        # Each request gets its own parser, as in OpenAIServingChat: parsers know how far their answer has come.
        parser = self._chat.parser_cls(
            self._client.renderer.get_tokenizer(),
            None,
            chat_template_kwargs={},
            model_config=self._client.model_config,
        )
        return ReasoningSplit(parser, chat_request)

    async def prepare_draft(self, request: GenerateRequest) -> Prepared:
        """Prepare the tokens with which the prompt will begin however the last message continues, for a request that only computes their KV.

        The message is rendered with several continuations: where they agree, further typing changes nothing. The last agreeing token is left out,
        because its other half may still come. Raises errors as `prepare` does.
        """
        if request.prompt_token_ids is not None:
            token_ids = list(request.prompt_token_ids)
        else:
            token_ids = await self._stable_ids(request)
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        prompt = Prompt(pack_token_ids(token_ids), "given")
        return Prepared(
            {"prompt_token_ids": token_ids}, params, self.lora_request(request.context.adapter), prompt
        )

    async def _stable_ids(self, request: GenerateRequest) -> list[int]:
        *earlier, draft = request.messages
        stable: list[int] | None = None
        for more in DRAFT_ENDS:
            message = ChatMessage(draft.role, draft.content + more)
            ids = await self._draft_ids(msgspec.structs.replace(request, messages=(*earlier, message)))
            stable = ids if stable is None else _common(stable, ids)
        return (stable or [])[:-1]

    async def _draft_ids(self, request: GenerateRequest) -> list[int]:
        messages: Any = [{"role": m.role, "content": m.content} for m in request.messages]
        try:
            engine_input = await self._render(ChatCompletionRequest(messages=messages))
            await self._continue(request, engine_input)
        except Exception as error:
            raise as_bridge_error(error) from error
        return list(engine_input["prompt_token_ids"])

    async def _continue(self, request: GenerateRequest, engine_input: Any) -> Prompt:
        """Put the ids of the history, as far as they fit, in front of `engine_input`, which is changed."""
        rendered = engine_input["prompt_token_ids"]
        # With only one message from the user there is no history to continue.
        is_first = not any(message.role == "assistant" for message in request.messages)
        made = Continued(rendered, "first" if is_first else "rendered", 0)
        keeps = self._options.keeps_token_ids and bool(request.history_token_ids)
        if keeps and engine_input["type"] == "token" and "prompt" in engine_input:
            made = await self._client.continuing.continued(
                request.history_token_ids, engine_input["prompt"], rendered
            )
            engine_input["prompt_token_ids"] = made.token_ids
        return Prompt(pack_token_ids(made.token_ids), made.origin, made.num_kept)

    async def _render(self, chat_request: ChatCompletionRequest) -> Any:
        num_chars = sum(len(str(message.get("content") or "")) for message in chat_request.messages)
        check_prompt_chars(num_chars, self._options.max_prompt_chars, "content")
        result = await self._renderer.render_chat(chat_request)
        if isinstance(result, ErrorResponse):
            raise too_long_or_invalid(result.error.message)
        return result[1][0]

    def _max_tokens(self, wanted: int | None, prompt_len: int) -> int:
        limit = self._client.model_config.max_model_len
        if prompt_len >= limit:
            raise _too_long(prompt_len, limit)
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


def _common(first: list[int], second: list[int]) -> list[int]:
    """Return the tokens with which both lists begin."""
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    return first[:count]


def _is_too_long(result: Any) -> bool:
    is_refused = (
        isinstance(result, ErrorResponse) and result.error.code == 400
    )  # other errors may quote a name of the client's
    return is_refused and is_too_long(result.error.message)


async def _telling(dropped: Dropped, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Yield `events` behind a comment that names the parts left out of their prompt."""
    try:
        if dropped:
            yield dropped_event(dropped)
        async for event in events:
            yield event
    finally:
        await events.aclose()


async def _in_call(call: ServingCall, events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield `events`, each made while CALL is `call`.

    Some of vLLM's generators first ask the engine when they are read, which may be in another task than the call's.
    """
    try:
        while True:
            token = CALL.set(call)
            try:
                event = await anext(events)
            except StopAsyncIteration:
                return
            finally:
                CALL.reset(token)
            yield event
    finally:
        await events.aclose()  # type: ignore[attr-defined]


async def _encoded(
    events: AsyncIterator[str], endpoint: _Endpoint, ids: CallIds | None
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events as bytes, and the call's token ids behind them (see `SseReply`).

    An error that a generator raises after its first byte becomes a last error event.
    """
    try:
        async for event in events:
            if endpoint.is_anthropic and event.startswith(ANTHROPIC_ERROR_EVENT):
                event = without_insides(event)
            yield in_our_form(event).encode() if event.startswith(ERROR_EVENT) else event.encode()
        if ids is not None and ids.seen:
            yield token_ids_event(ids.seen)
    except Exception as error:
        body = error_reply(as_error_response(error), is_anthropic=endpoint.is_anthropic).body.decode()
        yield f"event: error\ndata: {body}\n\n".encode()
    finally:
        await events.aclose()  # type: ignore[attr-defined]


def _too_long(prompt_len: int, limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"This conversation has {prompt_len} tokens; the model reads at most {limit}. Start a new chat or shorten it.",
        code="prompt_too_long",
    )
