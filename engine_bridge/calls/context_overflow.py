"""What a call leaves out when its prompt does not fit into the model's context. Pure: JSON bodies of the three chat APIs in and out.

Clients with a long history or dozens of tools know nothing of the context of the model that they talk to. A setting says what may go: nothing,
tools that the model cannot call or that are most of the prompt, or the oldest turns as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from engine_bridge.calls.pictures import urls_of
from engine_bridge.policy.limits.request_limits import measure
from engine_bridge.protocol.node import Api, Dropped

ContextOverflow = Literal["error", "drop-tools", "drop-oldest"]

# Where each API has its turns. The other APIs have none.
_TURNS: Mapping[Api, str] = {"chat": "messages", "responses": "input", "messages": "messages"}
_TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
_INSTRUCTING = ("system", "developer")
# Each try keeps this share of the turns' characters. Dropping more at a time than is needed leaves room for the turns to come and takes few
# tries: 13 for a conversation 40 times too long.
_KEPT_SHARE = 0.75
# A picture's share of a conversation, as text of a thousand tokens. Chosen: what models make of a photograph.
PICTURE_CHARS = 4000


_EVENT = ": overture left out "


def dropped_event(dropped: Dropped) -> str:
    """Return a server-sent comment that names the parts left out of a stream's prompt. Clients may show it; SDKs skip comments."""
    return f"{_EVENT}{dropped}\n\n"


def dropped_of(event: bytes) -> Dropped:
    """Return the parts that `dropped_event` named; an empty `Dropped` for any other event."""
    text = event.decode() if event.startswith(_EVENT.encode()) else ""
    return Dropped.parse(text.removeprefix(_EVENT).strip())


def shorter(
    setting: ContextOverflow, api: Api, body: Any, *, calls_tools: bool
) -> Iterator[tuple[Any, Dropped]]:
    """Yield ever shorter versions of a body whose prompt is too long, each with the parts that it leaves out of the first one.

    setting: which parts may be left out. calls_tools: whether the model knows a form of tool calls. Then its tools are left out only where they are
    longer than the conversation: there they take at least half of the context, so that no conversation could get far with them. All tools are left
    out at once, so that the model is never shown a part of them.
    """
    turns = _TURNS.get(api)
    if setting == "error" or turns is None or not isinstance(body, dict):
        return
    num_tools = 0
    goes = not calls_tools or _num_chars([body.get("tools")]) > _num_chars([body.get(turns)])
    if goes and not _demands_tool(body.get("tool_choice")):
        num_tools = _length(body.get("tools"))
    if num_tools:
        body = {name: value for name, value in body.items() if name not in _TOOL_FIELDS}
        yield body, Dropped(num_tools)
    messages = body.get(turns)
    if setting != "drop-oldest" or not isinstance(messages, list):
        return
    for kept in _without_oldest(messages):
        yield body | {turns: kept}, Dropped(num_tools, len(messages) - len(kept))


def _without_oldest(messages: list[Any]) -> Iterator[list[Any]]:
    """Yield ever fewer messages: the oldest turns go, instructions and the last turn stay."""
    kept = _turns_of(messages)
    sizes = [_num_chars(turn) for turn in kept]
    while len(kept) > 1:
        limit = sum(sizes) * _KEPT_SHARE
        kept, sizes = kept[1:], sizes[1:]
        while len(kept) > 1 and sum(sizes) > limit:
            kept, sizes = kept[1:], sizes[1:]
        stays = {id(message) for turn in kept for message in turn}
        yield [message for message in messages if _role(message) in _INSTRUCTING or id(message) in stays]


def _turns_of(messages: Sequence[Any]) -> list[list[Any]]:
    """Return messages by turn: a person's message with all that followed from it, so that no tool's result stands without its call."""
    turns: list[list[Any]] = []
    for message in messages:
        if _role(message) in _INSTRUCTING:
            continue
        if not turns or (_role(message) == "user" and not _is_tool_result(message)):
            turns.append([])
        turns[-1].append(message)
    return turns


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _is_tool_result(message: Any) -> bool:
    """Return whether a user's message is a tool's result: Anthropic's API sends them so."""
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    return any(isinstance(block, dict) and block.get("type") == "tool_result" for block in blocks)


def _num_chars(turn: Sequence[Any]) -> int:
    """Return the characters of some messages, a picture counted as the text that takes equally many tokens."""
    seen = urls_of({"messages": turn})
    return sum(measure(message)[1] for message in turn) - sum(map(len, seen)) + PICTURE_CHARS * len(seen)


def _demands_tool(choice: Any) -> bool:
    """Return whether a call must answer with a tool: a tool's name, OpenAI's "required", Anthropic's "any"."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return kind not in (None, "auto", "none")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0
