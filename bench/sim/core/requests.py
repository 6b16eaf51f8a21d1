"""A request on its way through a node."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from engine_bridge.predict.length import LengthGuess


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the traffic says of a request. adapter_id: None for the base model. max_answer_tokens: the client's bound, None without.

    priority: lower is more urgent, as in vLLM. session: whose prompts begin alike; empty for one that nothing follows.
    """

    request_id: str
    at_s: float
    num_prompt_tokens: int
    num_answer_tokens: int
    adapter_id: int | None = None
    max_answer_tokens: int | None = None
    tenant: str = ""
    priority: int = 0
    session: str = ""


class Timed:
    """What a request's times come to, in seconds."""

    __slots__ = ()
    arrival: Arrival
    first_token_s: float
    ended_s: float

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival.at_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """nan for an answer of one token."""
        num_gaps = self.arrival.num_answer_tokens - 1
        return (self.ended_s - self.first_token_s) / num_gaps if num_gaps else math.nan


class Guesser(Protocol):
    """Foretells the length of an answer."""

    def guess(self, arrival: Arrival) -> LengthGuess: ...

    def ended(self, arrival: Arrival) -> None:
        """It is known now."""
        ...
