"""The chunks of a chat completion's stream in the form in which clients know them: one thing in each. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from engine_bridge.calls.old_functions import with_function_call

_DATA = "data: "


def ends_with_stop_token(finish_reason: str | None, stop_reason: Any) -> bool:
    """Return whether the last token of an answer is a token that ends it, and so no part of its text. A stop string has no such token."""
    return finish_reason in ("stop", "tool_calls") and not isinstance(stop_reason, str)


def split_event(event: str, *, has_stop_token: bool = False, has_functions: bool = False) -> Iterator[str]:
    """Return an event of a chat completion's stream as one or more events whose chunks hold one thing each.

    Args:
        event: the event.
        has_stop_token: whether the text holds the token that ended it; if not, that token has no log probability in the last chunk either.
        has_functions: whether the call offered functions, in the place of tools.
    """
    if not event.startswith(_DATA + '{"id":'):  # `[DONE]`, an error
        yield event
        return
    chunk = msgspec.json.decode(event[len(_DATA) :])
    for piece in single_chunks(chunk, has_stop_token=has_stop_token):
        told = with_function_call(piece) if has_functions else piece
        yield f"{_DATA}{msgspec.json.encode(told).decode()}\n\n"


def single_chunks(chunk: dict[str, Any], *, has_stop_token: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a chunk as chunks of one thing each: text or reasoning, one tool call's next piece, the reason of the end. OpenAI's server does the same.

    Clients read the first entry of `delta.tool_calls` only, or pass over a delta that comes with a `finish_reason`: they would lose arguments.
    """
    choices = chunk.get("choices") or []
    if len(choices) != 1:
        yield chunk
        return
    choice: dict[str, Any] = choices[0]
    reason, stop_reason = choice.get("finish_reason"), choice.get("stop_reason")
    logprobs = choice.get("logprobs")
    if logprobs and ends_with_stop_token(reason, stop_reason) and not has_stop_token:
        logprobs["content"] = logprobs["content"][:-1]
        if not logprobs["content"]:
            choice["logprobs"] = None
    deltas = list(single_deltas(choice["delta"]))
    if reason is not None and not deltas and (choice.get("logprobs") or choice.get("token_ids")):
        deltas = [{}]
    # Fields of the whole chunk go with its first piece, the reason of the end with its last one.
    carried = {name: value for name, value in choice.items() if name not in ("stop_reason", "delta")}
    before = {name: value for name, value in chunk.items() if name != "system_fingerprint"}
    for number, delta in enumerate(deltas):
        own = carried if number == 0 else {"index": choice["index"], "logprobs": None}
        yield before | {"choices": [own | {"delta": delta, "finish_reason": None}]}
    if reason is not None or not deltas:
        last = {"index": choice["index"], "delta": {}, "logprobs": None, "finish_reason": reason}
        yield chunk | {"choices": [last | ({"stop_reason": stop_reason} if "stop_reason" in choice else {})]}


def thought_of(said: dict[str, Any]) -> dict[str, Any]:
    """Return the reasoning of a message or a delta under both names that clients look for; nothing where there is none.

    Source: `reasoning_content` is DeepSeek's name, and was vLLM's up to 0.15; `reasoning` is OpenRouter's, and vLLM's since.
    """
    thought = said.get("reasoning")
    return {"reasoning": thought, "reasoning_content": thought} if thought else {}


def single_deltas(delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a delta's parts: the reasoning, all other fields but tool calls, then each call once, with all of its fields."""
    if thought := thought_of(delta):
        yield thought
    own = ("reasoning", "tool_calls")
    rest = {name: value for name, value in delta.items() if name not in own and value not in (None, "")}
    if rest:
        yield rest
    for entry in merged_calls(delta.get("tool_calls") or []):
        yield {"tool_calls": [entry]}


def merged_calls(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the pieces of tool calls, one for each index in the order in which they came. Arguments of the same call are joined."""
    calls: dict[int, dict[str, Any]] = {}
    for entry in entries:
        known = {name: value for name, value in entry.items() if value is not None}
        call = calls.setdefault(entry["index"], {"index": entry["index"], "function": {"arguments": ""}})
        function = known.pop("function", None) or {}
        arguments = call["function"]["arguments"] + (function.get("arguments") or "")
        named = {name: value for name, value in function.items() if value is not None}
        call |= known | {"function": call["function"] | named | {"arguments": arguments}}
    return list(calls.values())
