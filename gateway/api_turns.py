"""What an API call asked and what came back, read from its JSON: pure functions, so that a call can be kept as a turn of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from engine_bridge.node import Api
from gateway.errors import GatewayError
from gateway.sessions import Turn


def session_named(header: str | None, body: dict[str, Any]) -> str | None:
    """The session that a call names: the header goes before the body's `session_id`. Raises GatewayError for a non-string."""
    named = header or body.get("session_id")
    if named is not None and not isinstance(named, str):
        raise GatewayError("bad_request", "'session_id' must be a string.", param="session_id")
    return named or None


def question_of(api: Api, body: dict[str, Any]) -> str:
    """The text of the last user message, "" if there is none."""
    if api == "completions":
        prompt = body.get("prompt")
        return prompt if isinstance(prompt, str) else ""
    given = body.get("input")
    if api == "responses" and isinstance(given, str):
        return given
    messages = body.get("input" if api == "responses" else "messages")
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and message.get("role") == "user":
            return text_of(message.get("content"))
    return ""


def text_of(content: Any) -> str:
    """The text of a message's content, which is a string or a list of typed parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(
        part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)
    )


def history_as_input(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Turns as items of a Responses call's `input`."""
    items = []
    for turn in turns:
        items.append({"role": "user", "content": turn.content})
        if turn.answer:
            items.append({"role": "assistant", "content": turn.answer})
    return items


class AnswerReader:
    """Gathers the answer of one call from its JSON body or from its server-sent events.

    Attributes:
        answer: the text so far (of the first choice).
        is_complete: the server said that it was over.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._parts: list[str] = []
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self.response_id: str | None = None
        self.is_complete = False

    @property
    def answer(self) -> str:
        return "".join(self._parts)

    @property
    def has_answer(self) -> bool:
        return bool(self._parts)

    def feed(self, event: bytes) -> None:
        """Take one server-sent event. What is not JSON (comments, `[DONE]`) is passed over."""
        for line in event.split(b"\n"):
            if line.startswith(b"data: {"):
                try:
                    self._on_event(orjson.loads(line[6:]))
                except orjson.JSONDecodeError:
                    continue

    def feed_json(self, body: bytes) -> None:
        """Take a whole reply."""
        value = orjson.loads(body)
        self.is_complete = True
        if self._api in ("chat", "completions"):
            self._on_choices(value, "message")
        elif self._api == "messages":
            self._parts.append(text_of(value.get("content")))
            self._note_end(value.get("stop_reason"), value.get("usage"))
        else:
            self._on_response(value)

    def _on_event(self, value: dict[str, Any]) -> None:
        kind = value.get("type")
        if self._api in ("chat", "completions"):
            self._on_choices(value, "delta")
        elif kind == "content_block_delta":
            self._parts.append(value.get("delta", {}).get("text") or "")
        elif kind == "message_delta":
            self._note_end(value.get("delta", {}).get("stop_reason"), value.get("usage"))
        elif kind == "message_stop":
            self.is_complete = True
        elif kind == "response.output_text.delta":
            self._parts.append(value.get("delta") or "")
        elif kind in ("response.created", "response.completed"):
            response = value.get("response", {})
            self.response_id = response.get("id") or self.response_id
            if kind == "response.completed":
                self.is_complete = True
                self._note_end("stop", response.get("usage"))

    def _on_choices(self, value: dict[str, Any], field: str) -> None:
        for choice in value.get("choices") or []:
            if choice.get("index", 0) != 0:
                continue
            text = (
                choice.get("text") if self._api == "completions" else (choice.get(field) or {}).get("content")
            )
            if text:
                self._parts.append(text)
            if choice.get("finish_reason"):
                self.is_complete = True
                self.finish_reason = choice["finish_reason"]
        self._note_end(None, value.get("usage"))

    def _on_response(self, value: dict[str, Any]) -> None:
        self.response_id = value.get("id")
        for item in value.get("output") or []:
            if item.get("type") == "message":
                self._parts.append(text_of(item.get("content")))
        self._note_end("stop", value.get("usage"))

    def _note_end(self, reason: str | None, usage: dict[str, Any] | None) -> None:
        self.finish_reason = reason or self.finish_reason
        self.usage = _usage(usage) or self.usage


def _usage(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    """The three families' token counts under the chat socket's names."""
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return {
        "prompt_tokens": usage.get("prompt_tokens", usage.get("input_tokens", 0)),
        "completion_tokens": usage.get("completion_tokens", usage.get("output_tokens", 0)),
        "cached_tokens": details.get("cached_tokens", usage.get("cache_read_input_tokens")) or 0,
    }
