"""What routing is told of a request: its estimated length, and which nodes have its adapter. Nothing is tokenised here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_bridge.policy.adapters.adapter_places import AdapterAt
from engine_bridge.policy.nodes.routing import RequestEstimate
from engine_bridge.protocol.engine_request import EngineRequest
from engine_bridge.protocol.node import Advisory, num_token_ids
from engine_bridge.protocol.urgency import is_urgent

# English text. Chosen.
CHARS_PER_TOKEN = 4
# The expected length of the first answer, and the share by which each answer changes the expected length of the next. Chosen.
FIRST_ANSWER_TOKENS, SMOOTHING = 256.0, 0.05
# Where the calls of OpenAI's and Anthropic's APIs have their texts, and their bounds of answers.
_TEXTS = ("messages", "input", "prompt", "system", "instructions")
_BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Text lies no deeper: messages have parts, and a part may be a tool's result that has parts, too.
_MAX_DEPTH = 8


class Asks:
    """Makes estimates of requests, and learns how long answers are.

    Args:
        find_adapter: returns where an adapter is; None for the base model, and for an unknown adapter.
    """

    def __init__(self, find_adapter: Callable[[str], AdapterAt | None]) -> None:
        self._find_adapter = find_adapter
        self._answer_tokens = FIRST_ANSWER_TOKENS

    def answered(self, num_tokens: int) -> None:
        """Learn from an answer of `num_tokens` tokens."""
        self._answer_tokens += SMOOTHING * (num_tokens - self._answer_tokens)

    def of_request(self, name: str, request: EngineRequest) -> RequestEstimate:
        """Return what routing looks at for a chat turn. With its history as token ids, only the question is estimated."""
        num_tokens = len(request.prompt_token_ids or ())
        if request.messages:
            history = num_token_ids(request.history_token_ids)
            # With its ids, all but the question is known; else the texts have to tell.
            texts = request.messages[-1:] if history else request.messages
            num_tokens = history + sum(len(message.content) for message in texts) // CHARS_PER_TOKEN
        return self._estimate(name, num_tokens, request, request.sampling.max_tokens)

    def of_body(self, name: str, body: object, request: EngineRequest) -> RequestEstimate:
        """Return what routing looks at for an API call; its length is estimated from the texts of its body."""
        fields: dict[str, Any] = body if isinstance(body, dict) else {}
        num_tokens = int(sum(_tokens(fields.get(field)) for field in _TEXTS))
        bounds = [fields[name] for name in _BOUNDS if isinstance(fields.get(name), int)]
        return self._estimate(name, num_tokens, request, min(bounds, default=None))

    def of_advisory(self, advisory: Advisory) -> RequestEstimate:
        """Return what routing looks at for an advisory request, which asks for no tokens."""
        asker = EngineRequest(adapter=advisory.adapter or "", priority=advisory.priority or 0)
        num_tokens = num_token_ids(advisory.token_ids)
        return self._estimate(advisory.advisory_id, num_tokens, asker, None)

    def _estimate(
        self, name: str, num_tokens: int, request: EngineRequest, max_tokens: int | None
    ) -> RequestEstimate:
        num_answer = int(self._answer_tokens)
        found = self._find_adapter(request.adapter)
        return RequestEstimate(
            request_id=name,
            num_prompt_tokens=num_tokens,
            num_answer_tokens=num_answer if max_tokens is None else max(min(num_answer, max_tokens), 1),
            rank=found.rank if found is not None else 0,
            is_urgent=is_urgent(request.priority),
            adapter_load_s=found.load_s if found is not None else {},
            # An adapter that does not exist may be refused by any node.
            usual_load_s=None if found is not None else 0.0,
        )


def _tokens(value: Any, depth: int = 0) -> float:
    """Return the estimated number of tokens of a JSON value's texts; lists of numbers are taken for token ids."""
    if isinstance(value, str):
        return len(value) / CHARS_PER_TOKEN
    if depth > _MAX_DEPTH or not value:
        return 0.0
    if isinstance(value, list):
        if isinstance(value[0], int):
            return len(value)
        return sum(_tokens(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return sum(_tokens(value.get(field), depth + 1) for field in ("content", "text", "input", "output"))
    return 0.0
