"""Requests as policies and predictors are told of them, for tests that care about some of their fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_bridge.policy.scheduling.queue_policy import Running, Waiting
from engine_bridge.predict.length import LengthFeatures
from engine_bridge.protocol.asked import Asked
from engine_bridge.protocol.request_context import RequestContext


def waiting_facts(request_id: str, **fields: Any) -> Waiting:
    defaults: dict[str, Any] = {
        "arrived_s": 0.0,
        "weighted_size": 0.1,
        "size_tokens": 100,
        "num_blocks": 10,
        "duration_s": 1.0,
    }
    return Waiting(request_id=request_id, **(defaults | fields))


def running_facts(request_id: str, **fields: Any) -> Running:
    defaults: dict[str, Any] = {"num_blocks": 10, "predicted_end_s": 10.0}
    return Running(request_id=request_id, **(defaults | fields))


def features(
    num_prompt_tokens: int = 100,
    *,
    adapter: str = "",
    session: str = "",
    tenant: str = "",
    question: str = "",
    **fields: Any,
) -> LengthFeatures:
    context = RequestContext(tenant=tenant, session_id=session, adapter=adapter, asked=Asked(question))
    return LengthFeatures(num_prompt_tokens=num_prompt_tokens, context=context, **fields)


@dataclass(frozen=True)
class LinearPrefill:
    """A `PrefillCost` by one rate."""

    s_per_token: float

    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        return max(num_tokens, 0) * self.s_per_token
