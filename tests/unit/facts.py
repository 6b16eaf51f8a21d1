"""Requests as policies and predictors are told of them, for tests that care about some of their fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_bridge.policy.scheduling.queue_policy import Running, Waiting
from engine_bridge.protocol.asked import Asked
from engine_bridge.protocol.engine_request import EngineRequest, LengthGuess
from kvtiers.policy.restore import RestoreFacts


def waiting_facts(request_id: str, **fields: Any) -> Waiting:
    defaults: dict[str, Any] = {
        "num_prompt_tokens": 50,
        "guess": LengthGuess(50, 100, "test"),
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
) -> EngineRequest:
    return EngineRequest(
        num_prompt_tokens=num_prompt_tokens,
        tenant=tenant,
        session_id=session,
        adapter=adapter,
        asked=Asked(question),
        **fields,
    )


@dataclass(frozen=True)
class LinearPrefill:
    """A `PrefillCost` by one rate."""

    s_per_token: float

    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        return max(num_tokens, 0) * self.s_per_token


def restore_facts(**changes: Any) -> RestoreFacts:
    """Of 64 blocks of 32 tokens, 384 KiB each (24 MiB), on disk: 0.41 s to compute at 5,000 tokens/s, 24 ms to read at 1 GB/s."""
    facts: dict[str, Any] = {
        "num_blocks": 64,
        "num_ready_blocks": 0,
        "num_tail_tokens": 32,
        "block_size_tokens": 32,
        "block_bytes": 384 << 10,
        "num_layers": 12,
        "num_ready_layers": 0,
        "disk_bytes_done": 0,
        "disk_bytes_left": 24 << 20,
        "disk_bytes_ahead": 0,
        "waited_s": 0.0,
        "prefill_s_per_token": 1 / 5000,
        "disk_bytes_per_s": 1e9,
        "host_bytes_per_s": 10e9,
    }
    return RestoreFacts(**(facts | changes))
