"""Prompts of the gateway's own turns: messages rendered as a chat completion's are, which begin with the token ids that the session has."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import chain, takewhile
from typing import Any

import msgspec
from msgspec.structs import asdict

from engine_bridge.calls import pictures
from engine_bridge.calls.context_overflow import shorter
from engine_bridge.calls.continuity import MAX_SPELLING, Continued
from engine_bridge.driver.apis.failures import too_long_or_invalid
from engine_bridge.driver.apis.media import PICTURE_MESSAGE, check_sizes, is_of_a_picture
from engine_bridge.driver.serving.engine_client import BridgeEngineClient
from engine_bridge.driver.serving.entrance import Entrance
from engine_bridge.driver.serving.options import ServingOptions
from engine_bridge.driver.serving.picture_prompts import as_dicts, beginning, num_chars, pictures_in
from engine_bridge.driver.vllm_api import ChatCompletionRequest, ErrorResponse, OnlineRenderer
from engine_bridge.policy.limits.request_limits import check_prompt_chars
from engine_bridge.protocol.api_errors import is_too_long
from engine_bridge.protocol.engine_request import EngineRequest
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import Dropped, Prompt, num_token_ids, pack_token_ids

# Ways in which a draft may continue: a word may grow, end or be followed by punctuation.
DRAFT_ENDS = ("s", " a", ".")
NOTHING_DROPPED = Dropped()


class TurnPrompts:
    """Makes the prompts of turns.

    Args:
        renderer: vLLM's, which refuses a prompt that is longer than the context.
        reading: where calls wait whose pictures are read.
    """

    def __init__(
        self,
        client: BridgeEngineClient,
        options: ServingOptions,
        renderer: OnlineRenderer,
        parsers: Mapping[str, Any],
        reading: Entrance,
    ) -> None:
        self._client, self._options, self._renderer, self._reading = client, options, renderer, reading
        roomy = copy(client.model_config)
        roomy.max_model_len *= MAX_SPELLING
        self._roomy_renderer = OnlineRenderer(roomy, client.renderer, **parsers)

    async def of_turn(
        self, request: EngineRequest, sampling: Mapping[str, Any]
    ) -> tuple[ChatCompletionRequest, Any, Prompt]:
        """Return a turn as a chat completion, its prompt as vLLM's engine takes it, and how that was made.

        It begins with the session's ids, as far as they fit, and lacks parts where it would be too long. Only what the model would read counts: the
        usual encoding of the same text may be longer. Raises InvalidRequest, `prompt_too_long` where no shorter version fits or none may be made.
        """
        body = {"messages": as_dicts(request.messages)} | offered(request)
        limit = self._client.model_config.max_model_len
        shorter_ones = shorter(self._options.context_overflow, "chat", body, calls_tools=bool(request.tools))
        for version, dropped in chain([(body, Dropped())], shorter_ones):
            chat_request = ChatCompletionRequest(
                **version,
                stream=True,
                add_generation_prompt=not request.goes_on,
                continue_final_message=request.goes_on,
                **sampling,
            )
            try:
                may_fit = self._may_fit_by_its_ids(request, dropped)
                engine_input = await self.rendered(chat_request, version["messages"], may_be_longer=may_fit)
            except Exception as error:
                if not is_too_long(str(error)):
                    raise
                continue
            prompt = await self._continue(request, engine_input, dropped)
            if len(engine_input["prompt_token_ids"]) < limit:
                return chat_request, engine_input, prompt
        raise too_long(limit)

    async def of_draft(self, request: EngineRequest) -> Any:
        """Return the prompt, as vLLM's engine takes it, up to where it stays the same however the last message continues.

        It is for a request that only computes KV. The message is rendered with several continuations: where they agree, further typing changes
        nothing. The last agreeing token is left out, because its other half may still come. Raises errors as `of_turn` does, and vLLM's own.
        """
        if request.prompt_token_ids is not None:
            return {"prompt_token_ids": list(request.prompt_token_ids)}
        *earlier, draft = request.messages
        stable: list[int] | None = None
        engine_input: Any = {}
        for more in DRAFT_ENDS:
            message = msgspec.structs.replace(draft, content=draft.content + more)
            again = msgspec.structs.replace(request, messages=(*earlier, message))
            _, engine_input, _ = await self.of_turn(again, {})
            ids = engine_input["prompt_token_ids"]
            stable = list(ids) if stable is None else _common(stable, ids)
        return beginning(engine_input, len(stable or [0]) - 1)

    async def rendered(
        self,
        chat_request: ChatCompletionRequest,
        messages: Sequence[Any] = (),
        *,
        may_be_longer: bool = False,
    ) -> Any:
        """Return the prompt of these messages as vLLM's engine takes it. They are given apart, since the request wraps their parts.

        may_be_longer: than the context, which is then for the caller to check.
        """
        check_prompt_chars(num_chars(messages), self._options.max_prompt_chars, "content")
        body = {"messages": messages}
        if pictures.urls_of(body):
            result = await self._render_pictures(chat_request, body)
        else:
            renderer = self._roomy_renderer if may_be_longer else self._renderer
            result = await renderer.render_chat(chat_request)
        if isinstance(result, ErrorResponse):
            raise too_long_or_invalid(result.error.message)
        return result[1][0]

    async def _render_pictures(self, chat_request: ChatCompletionRequest, body: Any) -> Any:
        """Render a conversation with pictures as the chat completions API does. Raises InvalidRequest for pictures that are not read."""
        pictures.check_pictures(body, self._client.max_images)
        await asyncio.to_thread(check_sizes, pictures.urls_of(body), "pictures")
        leave = await self._reading.enter("")
        try:
            return await self._renderer.render_chat(chat_request)
        except Exception as error:
            if is_of_a_picture(error):
                raise InvalidRequest(PICTURE_MESSAGE, param="pictures") from error
            raise
        finally:
            leave()

    def _may_fit_by_its_ids(self, request: EngineRequest, dropped: Dropped) -> bool:
        """Return whether a prompt may fit that begins with the session's ids, however long the usual encoding of its text is."""
        num_known = num_token_ids(request.history_token_ids)
        fits = 0 < num_known < self._client.model_config.max_model_len
        return fits and self._options.keeps_token_ids and dropped == NOTHING_DROPPED

    async def _continue(self, request: EngineRequest, engine_input: Any, dropped: Dropped) -> Prompt:
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
        packed = pack_token_ids(made.token_ids, pictures_in(engine_input))
        return Prompt(packed, made.origin, made.num_kept, dropped)


def offered(request: EngineRequest) -> dict[str, Any]:
    """Return the field of a chat completion with the tools that a turn offers; nothing where it offers none."""
    tools = [{"type": "function", "function": asdict(tool)} for tool in request.tools]
    return {"tools": tools} if tools else {}


def _common(first: list[int], second: list[int]) -> list[int]:
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    return first[:count]


def too_long(limit: int) -> InvalidRequest:
    """Return the error for a conversation that is longer than `limit` tokens."""
    return InvalidRequest(
        f"This conversation is longer than the {limit:,} tokens that the model reads. Start a new chat, or shorten it.",
        code="prompt_too_long",
    )
