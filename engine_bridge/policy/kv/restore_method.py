"""The cheaper way to have KV back: load it, or compute it again. Pure: facts in, decisions out, seconds throughout.

D3's choice between swapping and recomputing (`SwapOrRecompute`) and `FullCost`, which replaces `kvtiers.policy.restore.FasterWins`, are based on
the times of steps and copies (`costs`). Doing both at once (E2) is not possible on vLLM 0.32: docs/decisions/0011.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import Struct

from engine_bridge.policy.costs.costs import PrefillCost
from kvtiers.policy.restore import FasterWins, RestoreFacts, copy_s


class Way(enum.Enum):
    """How a request gets its KV back."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


class LossDecision(Struct, frozen=True):
    """How a preempted request gets its KV back, and the predicted seconds of each way."""

    way: Way
    swap_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True)
class SwapOrRecompute:
    """Decides D3: swap if it is faster, else recompute.

    Source: AdaptiveLLM Algorithm 1, lines 4 to 14, and formulas 2 to 4. Departs in KV that is written through, so that a swap copies nothing out
    and needs no room, and in the KV that is kept on the device.

    Attributes:
        copy_in_s: predicts the seconds of a copy of this many bytes to the device.
    """

    prefill: PrefillCost
    block_size_tokens: int
    copy_in_s: Callable[[int], float]

    def decide(
        self, num_tokens: int, num_bytes: int, num_kept_tokens: int = 0, read_s: float = 0.0
    ) -> LossDecision:
        """Decide for the first `num_tokens` of a request, which have KV, that loses its device blocks, or would.

        num_bytes: that a copy of the KV which is not kept moves. num_kept_tokens: leading tokens that are expected to be still on the device when the
        request comes back. read_s: seconds until all is in host memory, where part of it lies on disk.
        """
        size = self.block_size_tokens
        num_kept = min(max(num_kept_tokens, 0), num_tokens) // size
        recompute_s = self.prefill.prefill_s(num_tokens - num_kept * size, num_kept * size)
        swap_s = read_s + self.copy_in_s(num_bytes)
        way = Way.SWAP if swap_s < recompute_s else Way.RECOMPUTE
        return LossDecision(way, swap_s, recompute_s)


# -- restores of sessions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FullCost(FasterWins):
    """Load, wait or compute like `FasterWins`, with a prefill's cost by table instead of one rate.

    A `RestorePolicy`: give it to `KvTiers(policy=...)`.
    """

    prefill: PrefillCost = field(kw_only=True)

    def _cost_of(self, facts: RestoreFacts, num_blocks: int) -> float:
        num_tokens = (facts.num_blocks - num_blocks) * facts.block_size_tokens + facts.num_tail_tokens
        num_context_tokens = facts.num_context_tokens + num_blocks * facts.block_size_tokens
        return copy_s(facts, num_blocks) + self.prefill.prefill_s(num_tokens, num_context_tokens)
