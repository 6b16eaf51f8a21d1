"""A request on its way through a node."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Protocol

from engine_bridge.policy.queue import Waiting
from engine_bridge.predict.length import LengthGuess


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the traffic says of a request. adapter_id: None for the base model. max_answer_tokens: the client's bound, None without.

    tenant, priority: told to the emulated node's policy; the lean one knows one tenant. session: whose prompts begin alike; empty for one that
    nothing follows.
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


class Stage(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"  # started, its adapter is on its way
    SWAPPING = "swapping"  # started, its KV is on its way back from host memory
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


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


@dataclass(slots=True, eq=False)
class Request(Timed):
    """One request in a node.

    base: what is fixed at arrival. sizes: input, predicted output, rank. num_done: tokens of the answer, up to date except while it decodes
    (`Node` counts steps then, from `decodes_from` on); they stay through a preemption. num_blocks: of KV, before it grows beyond them.
    grow_slot: the place in a block at which its growth falls, -1 while it has room. generation: counts its starts, so that what was
    planned for an earlier one can be told apart. num_front: tokens that are computed while those behind them are loaded, 0 where nothing is split;
    num_loaded: where what has come from host memory ends, 0 before. num_cached: blocks that a preemption left on the device; the node had taken
    cached_until blocks in all when the last of them is gone. num_found: tokens of them that its last start found.
    """

    arrival: Arrival
    rank: int
    guess: LengthGuess
    sizes: tuple[float, float, float]
    base: Waiting
    charged_tokens: int
    stage: Stage = Stage.WAITING
    num_done: int = 0
    num_prefilled: int = 0
    num_front: int = 0
    num_loaded: int = 0
    num_blocks: int = 0
    num_cached: int = 0
    cached_until: int = 0
    num_found: int = 0
    grow_slot: int = -1
    decodes_from: int = 0
    generation: int = 0
    is_bypasser: bool = False
    num_preempted: int = 0
    started_s: float = 0.0
    first_started_s: float = math.nan
    first_token_s: float = math.nan
    ended_s: float = math.nan
    found_adapter: str = ""
    """Of its first start: `here`, `coming` or `missing`."""

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far: what a start has to compute."""
        return self.arrival.num_prompt_tokens + self.num_done

    @property
    def num_unfilled(self) -> int:
        """Of these, or of the front: still to be computed."""
        return (self.num_front or self.num_tokens) - self.num_prefilled

    @property
    def queued_s(self) -> float:
        return self.first_started_s - self.arrival.at_s


class Guesser(Protocol):
    """Foretells the length of an answer."""

    def guess(self, arrival: Arrival) -> LengthGuess: ...

    def ended(self, arrival: Arrival) -> None:
        """It is known now."""
        ...
