"""The question and the answer of an API call, read from its JSON: pure functions, so that a call can be kept as a turn of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from engine_bridge.calls.pictures import urls_of
from engine_bridge.protocol.node import Api, CallFigures, figures_of, token_ids_of
from gateway.errors import GatewayError
from gateway.sessions import StoredResponse, Turn

# Events with which the stream of a response ends. Source: OpenAI's Responses API.
_ENDS = ("response.completed", "response.incomplete", "response.failed")

# Characters of what an answer hands to tools that are kept while it is read. Chosen: tasks of helpers are of a page; files may be of megabytes.
MAX_ARGUMENT_CHARS = 1 << 18

# Anthropic's reasons of an answer's end, and that of functions, in the words of the chat socket. Source: Anthropic's "Handling stop reasons".
_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
}


def session_named(header: str | None, body: dict[str, Any]) -> str | None:
    """Return the session that a call names: in its header, in its body as `session_id`, or in the body's `metadata`; the first of these counts.

    Raises GatewayError for a non-string.
    """
    metadata = body.get("metadata")
    named = (
        header
        or body.get("session_id")
        or (metadata.get("session_id") if isinstance(metadata, dict) else None)
    )
    if named is not None and not isinstance(named, str):
        raise GatewayError("bad_request", "'session_id' must be a string.", param="session_id")
    return named or None


def question_of(api: Api, body: dict[str, Any]) -> str:
    """Return the text of the last user message, "" if there is none."""
    if api == "completions":
        prompt = body.get("prompt")
        return prompt if isinstance(prompt, str) else ""
    given = body.get("input")
    if api == "responses" and isinstance(given, str):
        return given
    message = _last_question(body.get("input" if api == "responses" else "messages"))
    return text_of(message.get("content"))


def shown_in(api: Api, body: dict[str, Any]) -> list[str]:
    """Return the `data:` URLs of the pictures in the message whose text `question_of` returns."""
    field = "input" if api == "responses" else "messages"
    return [url for url in urls_of({field: [_last_question(body.get(field))]}) if url.startswith("data:")]


def _last_question(messages: Any) -> dict[str, Any]:
    """Return the last user message, {} if there is none. One with nothing but Anthropic's results of tools is passed over."""
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            parts = content if isinstance(content, list) else []
            has_result = any(isinstance(part, dict) and part.get("type") == "tool_result" for part in parts)
            if text_of(content) or not has_result:
                return message
    return {}


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a string or a list of typed parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(
        part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)
    )


def as_items(body: dict[str, Any]) -> list[Any]:
    """Return `input` of a Responses call as a list of items."""
    value = body.get("input")
    return list(value) if isinstance(value, list) else [{"role": "user", "content": value}]


def is_reference(item: Any) -> bool:
    """Return whether an item of `input` is the name of a stored item. Source: OpenAI's "Item reference", whose type may be left out."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and not item.keys() - {"id", "type"})


def items_of(turns: Sequence[tuple[Turn, StoredResponse | None]]) -> list[Any]:
    """Return a response's whole conversation as items of a Responses call's `input`.

    Turns that were Responses calls give their very items, calls of tools and their results among them. Such a call without `previous_response_id` was
    a beginning: earlier turns of its session were not part of it.

    Args:
        turns: the turns of its session, up to and including it.
    """
    items: list[Any] = []
    for turn, response in turns:
        if response is not None:
            if response.previous is None:
                items = []
            items += orjson.loads(response.items)
            items += [as_input(item) for item in orjson.loads(response.reply).get("output") or []]
            continue
        items.append({"role": "user", "content": turn.content})
        if turn.answer:
            items.append({"role": "assistant", "content": turn.answer})
    return items


def as_input(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item of a stored response, to be given as input."""
    if item.get("type") == "message" and item.get("role") == "assistant":
        return {"role": "assistant", "content": text_of(item.get("content"))}
    return item


def listed_items(items: Sequence[Any], response_id: str) -> list[dict[str, Any]]:
    """Return input items as `/v1/responses/{id}/input_items` lists them: each with a type and an id, and texts as parts."""
    listed = []
    for number, item in enumerate(items):
        shown = dict(item) if isinstance(item, dict) else {"role": "user", "content": str(item)}
        shown.setdefault("type", "message")
        shown["id"] = shown.get("id") or f"item_{response_id}_{number}"
        if shown["type"] == "message" and isinstance(shown.get("content"), str):
            kind = "output_text" if shown.get("role") == "assistant" else "input_text"
            shown["content"] = [{"type": kind, "text": shown["content"]}]
        listed.append(shown)
    return listed


def reply_of_turn(turn: Turn, response_id: str, model: str) -> dict[str, Any]:
    """Return the response object of a turn of which only the texts are stored."""
    usage = turn.usage or {}
    num_prompt, num_answer = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    is_done = turn.status == "done"
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(turn.created_at),
        "status": "completed" if is_done else "incomplete",
        "model": turn.adapter or model,
        "output": [_message(turn.answer, response_id, is_done=is_done)] if turn.answer else [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": usage.get("cached_tokens", 0)},
            "output_tokens": num_answer,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_answer,
        },
    }


def _message(text: str, response_id: str, *, is_done: bool) -> dict[str, Any]:
    return {
        "type": "message",
        "id": f"msg_{response_id}",
        "role": "assistant",
        "status": "completed" if is_done else "incomplete",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def with_previous(event: bytes, previous: str) -> bytes:
    """Return an event of a Responses stream whose response object names the response before it.

    The gateway has resolved that name, so vLLM has null there.
    """
    head, mark, data = event.partition(b"data: {")
    if not mark or b'"previous_response_id"' not in data:
        return event
    value = orjson.loads(b"{" + data)
    if not isinstance(value.get("response"), dict):
        return event
    value["response"]["previous_response_id"] = previous
    return head + b"data: " + orjson.dumps(value) + b"\n\n"


class AnswerReader:
    """Gathers the answer of one call from its JSON body or from its server-sent events.

    Attributes:
        is_complete: whether the server said that the answer was over.
        tools: the tools that it calls: the name of each by the call's id.
        token_ids: all ids that the engine read and wrote, packed; b"" where they are not known.
        figures: what it cost; None where that is not known.
        num_choices: answers seen of it. num_events: JSON events seen of it, each a token or more of an answer.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._parts: list[str] = []
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self.response_id: str | None = None
        self.is_complete = False
        self.tools: dict[str, str] = {}
        self._arguments: dict[Any, list[str]] = {}
        self._num_argument_chars = 0
        self.token_ids = b""
        self.figures: CallFigures | None = None
        self.num_choices = self.num_events = 0
        self._response: dict[str, Any] | None = None

    @property
    def answer(self) -> str:
        """The answer's text so far (of the first choice)."""
        return "".join(self._parts)

    @property
    def arguments(self) -> list[str]:
        """What the answer hands to tools, in the order of its calls: JSON, as far as it came."""
        return ["".join(parts) for parts in self._arguments.values()]

    @property
    def has_begun(self) -> bool:
        """Whether there is something to keep: text, the id of a response, or the end of an answer, which may be a call of a tool alone."""
        return bool(self._parts) or self.is_complete or self.response_id is not None

    @property
    def reply(self) -> dict[str, Any] | None:
        """The response object of a Responses call as far as it is known; None before it began, and for other calls."""
        if self._response is None or self.is_complete:
            return self._response
        output = [_message(self.answer, self.response_id or "", is_done=False)] if self._parts else []
        return self._response | {"output": output, "status": "incomplete"}

    def feed(self, event: bytes) -> None:
        """Take one server-sent event. Lines that hold no JSON (comments, `[DONE]`) are ignored, except the node's comments."""
        self.token_ids = token_ids_of(event) or self.token_ids
        self.figures = figures_of(event) or self.figures
        for line in event.split(b"\n"):
            if line.startswith(b"data: {"):
                self.num_events += 1
                try:
                    self._on_event(orjson.loads(line[6:]))
                except orjson.JSONDecodeError:
                    continue

    def feed_json(self, body: bytes, token_ids: bytes = b"", figures: CallFigures | None = None) -> None:
        """Take a whole reply."""
        self.token_ids, self.figures = token_ids, figures
        value = orjson.loads(body)
        self.is_complete = True
        if self._api in ("chat", "completions"):
            self._on_choices(value, "message")
        elif self._api == "messages":
            self._parts.append(text_of(value.get("content")))
            for block in value.get("content") or []:
                self._note_tool(block, block.get("id"))
                self._note_arguments(block.get("id"), block.get("input"))
            self._note_end(value.get("stop_reason"), value.get("usage"))
        else:
            self._on_response(value)

    def _on_event(self, value: dict[str, Any]) -> None:
        kind = value.get("type")
        if self._api in ("chat", "completions"):
            self._on_choices(value, "delta")
        elif kind == "content_block_start":
            block = value.get("content_block") or {}
            self._note_tool(block, block.get("id"))
        elif kind == "content_block_delta":
            delta = value.get("delta", {})
            self._parts.append(delta.get("text") or "")
            self._note_arguments(value.get("index"), delta.get("partial_json"))
        elif kind == "message_delta":
            self._note_end(value.get("delta", {}).get("stop_reason"), value.get("usage"))
        elif kind == "message_stop":
            self.is_complete = True
        elif kind == "response.output_text.delta":
            self._parts.append(value.get("delta") or "")
        elif kind in ("response.created", *_ENDS):
            response = self._response = value.get("response", {})
            self.response_id = response.get("id") or self.response_id
            if kind in _ENDS:
                self.is_complete = True
                self._note_items(response)
                self._note_end(_end_of(response), response.get("usage"))

    def _on_choices(self, value: dict[str, Any], field: str) -> None:
        for choice in value.get("choices") or []:
            index = choice.get("index", 0)
            self.num_choices = max(self.num_choices, index + 1)
            if index != 0:
                continue
            said = choice if self._api == "completions" else choice.get(field) or {}
            if text := said.get("text" if self._api == "completions" else "content"):
                self._parts.append(text)
            for call in said.get("tool_calls") or []:
                tool = call.get("function") or {}
                self._note_tool(tool, call.get("id"))
                self._note_arguments(call.get("index", call.get("id")), tool.get("arguments"))
            if choice.get("finish_reason"):
                self.is_complete = True
                self._note_end(choice["finish_reason"], None)
        self._note_end(None, value.get("usage"))

    def _on_response(self, value: dict[str, Any]) -> None:
        self._response = value
        self.response_id = value.get("id")
        for item in value.get("output") or []:
            if item.get("type") == "message":
                self._parts.append(text_of(item.get("content")))
        self._note_items(value)
        self._note_end(_end_of(value), value.get("usage"))

    def _note_items(self, response: dict[str, Any]) -> None:
        for item in response.get("output") or []:
            self._note_tool(item, item.get("call_id"))
            self._note_arguments(item.get("call_id"), item.get("arguments"))

    def _note_tool(self, tool: dict[str, Any], call_id: str | None) -> None:
        """Note a call of a tool; anything without a name or an id is none."""
        if call_id and tool.get("name"):
            self.tools[call_id] = tool["name"]

    def _note_arguments(self, call: Any, arguments: Any) -> None:
        """Note what is handed to a tool, or the next piece of it: JSON, or in a whole reply of Anthropic's API an object. Too much is left out."""
        if not arguments or self._num_argument_chars >= MAX_ARGUMENT_CHARS:
            return
        piece = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        self._num_argument_chars += len(piece)
        self._arguments.setdefault(call, []).append(piece)

    def _note_end(self, reason: str | None, usage: dict[str, Any] | None) -> None:
        self.finish_reason = _REASONS.get(reason or "", reason) or self.finish_reason
        self.usage = _usage(usage) or self.usage


def _end_of(response: dict[str, Any]) -> str:
    """Return why a response ended."""
    return "length" if response.get("status") == "incomplete" else "stop"


def _usage(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the token counts of any of the three APIs under the chat socket's names."""
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    # Anthropic's `input_tokens` leave out tokens that were read from a cache or written to one.
    cached = sum(usage.get(name) or 0 for name in ("cache_read_input_tokens", "cache_creation_input_tokens"))
    return {
        "prompt_tokens": usage.get("prompt_tokens", usage.get("input_tokens", 0) + cached),
        "completion_tokens": usage.get("completion_tokens", usage.get("output_tokens", 0)),
        "cached_tokens": details.get("cached_tokens", usage.get("cache_read_input_tokens")) or 0,
    }
