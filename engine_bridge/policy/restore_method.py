"""The cheaper way to have KV back: load it, or compute it again. Pure: facts in, decisions out, seconds throughout.

On what steps and copies cost (`costs`) stand D3's choice between swapping and recomputing (`SwapOrRecompute`) and `FullCost`, in the place of
`kvtiers.policy.restore.FasterWins`. Doing both at once (E2) is not possible on vLLM 0.32: docs/decisions/0011.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from engine_bridge.policy.costs import BlockSize, CopyCost, PrefillCost
from kvtiers.policy.restore import (
    FasterWins,
    RestoreFacts,
    copy_s,
)


class Way(enum.Enum):
    """How a request gets its KV back."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


class LossFacts(Struct, frozen=True, kw_only=True):
    """A request that loses its device blocks, or would. Tokens are those with KV, from the first.

    num_kept_tokens: leading ones that are expected to be on the device still when it comes back. num_saved_tokens: leading ones in host memory
    already. num_host_blocks: for what is not saved yet. read_s: until what is saved is in host memory, where part of it lies on disk.
    """

    num_tokens: int
    num_kept_tokens: int = 0
    num_saved_tokens: int = 0
    num_host_blocks: int = 0
    read_s: float = 0.0


class LossDecision(Struct, frozen=True):
    """How it gets its KV back, what that takes, and what each way would. swap_s: None where it is not possible.

    num_recompute_tokens: leading ones, behind those kept. num_out_blocks: to be copied to host memory now.
    """

    way: Way
    expected_s: float
    swap_s: float | None
    recompute_s: float
    num_recompute_tokens: int
    num_out_blocks: int
    reason: str


@dataclass(frozen=True, slots=True)
class SwapOrRecompute:
    """D3: swap if host memory has room and it is faster, else recompute.

    Source: AdaptiveLLM Algorithm 1, lines 4 to 14, and formulas 2 to 4. Departs in KV that is saved (it is written through: whole blocks of it are
    not copied out again) or kept already.
    """

    prefill: PrefillCost
    shape: BlockSize
    link: CopyCost

    def decide(self, facts: LossFacts) -> LossDecision:
        options = self._options(facts)
        # Of equal ones the first: recompute.
        best = min(options, key=lambda option: option.seconds)
        seconds = {option.way: option.seconds for option in options}
        return LossDecision(
            way=best.way,
            expected_s=best.seconds,
            swap_s=seconds.get(Way.SWAP),
            recompute_s=seconds[Way.RECOMPUTE],
            num_recompute_tokens=best.num_recompute_tokens,
            num_out_blocks=best.num_out_blocks,
            reason=f"{best.way.value} is fastest" if len(options) > 1 else "no room in host memory",
        )

    def _options(self, facts: LossFacts) -> list[_Option]:
        """Recomputing, and what else is possible."""
        size = self.shape.block_size_tokens
        num_blocks = self.shape.num_blocks(facts.num_tokens)
        num_kept = min(max(facts.num_kept_tokens, 0), facts.num_tokens) // size
        num_lost = num_blocks - num_kept
        num_unsaved = min(max(num_blocks - facts.num_saved_tokens // size, 0), num_lost)
        num_tokens = facts.num_tokens - num_kept * size
        recompute_s = self.prefill.prefill_s(num_tokens, num_kept * size)
        options = [_Option(Way.RECOMPUTE, recompute_s, num_tokens, 0)]
        if num_unsaved <= facts.num_host_blocks:
            in_s = facts.read_s + self.link.in_s(num_lost * self.shape.block_bytes)
            options.append(_Option(Way.SWAP, self._out_s(num_unsaved) + in_s, 0, num_unsaved))
        return options

    def _out_s(self, num_blocks: int) -> float:
        return self.link.out_s(num_blocks * self.shape.block_bytes)


class _Option(NamedTuple):
    way: Way
    seconds: float
    num_recompute_tokens: int
    num_out_blocks: int


# -- restores of sessions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FullCost(FasterWins):
    """Load, wait or compute like `FasterWins`, with a prefill's cost by table instead of one rate.

    A `RestorePolicy`: give it to `KvTiers(policy=...)`.

    Args:
        prefill: None takes the facts' own rate.
        num_context_tokens: on the device before what is restored; the facts do not say.
    """

    prefill: PrefillCost | None = None
    num_context_tokens: int = 0

    def _cost_of(self, facts: RestoreFacts, num_blocks: int) -> float:
        if self.prefill is None:
            return super()._cost_of(facts, num_blocks)
        num_tokens = (facts.num_blocks - num_blocks) * facts.block_size_tokens + facts.num_tail_tokens
        num_context_tokens = self.num_context_tokens + num_blocks * facts.block_size_tokens
        return copy_s(facts, num_blocks) + self.prefill.prefill_s(num_tokens, num_context_tokens)
