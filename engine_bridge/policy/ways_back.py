"""The cheapest way to have KV back: load it, compute it again, or both at once. Pure: facts in, decisions out, seconds throughout.

On what steps and copies cost (`costs`) stand D3's choice between swapping and recomputing (`SwapOrRecompute`), E2's split (`split`), and `FullCost`,
which takes the place of `kvtiers.policy.restore.FasterWins`.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from engine_bridge.policy.costs import BlockSize, Link, PrefillCost
from kvtiers.policy.restore import (
    Action,
    FasterWins,
    RestoreDecision,
    RestoreFacts,
    copy_s,
    disk_s,
)


class Way(enum.Enum):
    """How a request gets its KV back. SPLIT: the front is recomputed while the back is loaded."""

    SWAP = "swap"
    RECOMPUTE = "recompute"
    SPLIT = "split"


class SplitFacts(Struct, frozen=True, kw_only=True):
    """What is to come back: `num_blocks` behind `num_context_tokens` that the device holds, before `num_tail_tokens` that are computed anyway.

    overlap: how fast each of computing and loading goes while both do, against going alone: 1 where they do not disturb each other (a GPU and
    its copy engine), 0.5 where they might as well take turns (a CPU whose memory is the link).
    """

    num_blocks: int
    block_size_tokens: int
    num_context_tokens: int
    num_tail_tokens: int
    load_s_per_block: float
    load_setup_s: float = 0.0
    overlap: float = 1.0


class SplitDecision(Struct, frozen=True):
    """Recompute the first blocks and load the others at the same time. Seconds: until the tail is computed, too, as for the two pure ways."""

    way: Way
    num_recompute_blocks: int
    num_load_blocks: int
    expected_s: float
    load_s: float
    recompute_s: float


def split(facts: SplitFacts, prefill: PrefillCost) -> SplitDecision:
    """How many leading blocks to recompute while the others are loaded: where both end together, unless a pure way is faster.

    Computing takes longer with each block and loading less, so they meet in one place, found by bisection in log2(num_blocks) looks. Best of
    all splits where overlap is 1; below that the best of both pure ways and this one, which is the best of all where costs are linear. With
    equal costs more is loaded: the device has other work.

    Source: E2 is ours; Jin et al., Compute or Load KV Cache? Why not both? (Cake, 2024) meets in the middle by running both ends.
    """
    num = facts.num_blocks
    meet = bisect_left(
        range(num), True, key=lambda at: _compute_s(facts, prefill, at) >= _load_s(facts, num - at)
    )
    load_s, recompute_s = _split_s(facts, prefill, 0), _split_s(facts, prefill, num)
    times = {0: load_s, num: recompute_s}
    for at in (meet - 1, meet):
        if 0 < at < num:
            times[at] = _split_s(facts, prefill, at)
    best = min(times, key=lambda at: (times[at], at))
    way = Way.SWAP if best == 0 else Way.RECOMPUTE if best == num else Way.SPLIT
    return SplitDecision(way, best, num - best, times[best], load_s, recompute_s)


def _compute_s(facts: SplitFacts, prefill: PrefillCost, num_blocks: int) -> float:
    return prefill.prefill_s(num_blocks * facts.block_size_tokens, facts.num_context_tokens)


def _load_s(facts: SplitFacts, num_blocks: int) -> float:
    return facts.load_setup_s + num_blocks * facts.load_s_per_block if num_blocks > 0 else 0.0


def _split_s(facts: SplitFacts, prefill: PrefillCost, num_recompute: int) -> float:
    """Seconds until the tail is computed, when so many leading blocks are recomputed."""
    num_tokens = facts.num_blocks * facts.block_size_tokens
    if num_recompute == facts.num_blocks:  # one prefill, the tail is its end
        return prefill.prefill_s(num_tokens + facts.num_tail_tokens, facts.num_context_tokens)
    tail_s = prefill.prefill_s(facts.num_tail_tokens, facts.num_context_tokens + num_tokens)
    compute_s = _compute_s(facts, prefill, num_recompute)
    load_s = _load_s(facts, facts.num_blocks - num_recompute)
    # Both run until the shorter is done, each at the pace of `overlap`; the rest of the longer one goes on alone.
    return max(compute_s, load_s) + min(compute_s, load_s) * (1 / facts.overlap - 1) + tail_s


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
    """How it gets its KV back, what that takes, and what each way would. swap_s, split_s: None where it is not possible.

    num_recompute_tokens: leading ones, behind those kept. num_out_blocks: to be copied to host memory now.
    """

    way: Way
    expected_s: float
    swap_s: float | None
    recompute_s: float
    split_s: float | None
    num_recompute_tokens: int
    num_out_blocks: int
    reason: str


@dataclass(frozen=True, slots=True)
class SwapOrRecompute:
    """D3: swap if host memory has room and it is faster, else recompute; with `can_split`, both at once where that is faster still.

    Source: AdaptiveLLM Algorithm 1, lines 4 to 14, and formulas 2 to 4. Departs in KV that is saved (it is written through: whole blocks of it are
    not copied out again) or kept already, and in the split (E2).
    """

    prefill: PrefillCost
    shape: BlockSize
    link: Link
    can_split: bool = False
    overlap: float = 1.0

    def decide(self, facts: LossFacts) -> LossDecision:
        options = self._options(facts)
        # Of equal ones the first: recompute, swap, split.
        best = min(options, key=lambda option: option.seconds)
        seconds = {option.way: option.seconds for option in options}
        return LossDecision(
            way=best.way,
            expected_s=best.seconds,
            swap_s=seconds.get(Way.SWAP),
            recompute_s=seconds[Way.RECOMPUTE],
            split_s=seconds.get(Way.SPLIT),
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
            if self.can_split:
                options += self._split(num_lost, num_kept * size, num_unsaved, facts.read_s)
        return options

    def _split(
        self, num_lost: int, num_context_tokens: int, num_unsaved: int, read_s: float
    ) -> list[_Option]:
        """The best split, if it is not a pure way. Unsaved blocks are the last ones, so they are loaded and copied out first."""
        found = split(
            SplitFacts(
                num_blocks=num_lost,
                block_size_tokens=self.shape.block_size_tokens,
                num_context_tokens=num_context_tokens,
                num_tail_tokens=0,
                load_s_per_block=self.shape.block_bytes / self.link.h2d_bytes_per_s,
                load_setup_s=self.link.setup_s + read_s,
                overlap=self.overlap,
            ),
            self.prefill,
        )
        if found.way is not Way.SPLIT:
            return []
        num_out = min(num_unsaved, found.num_load_blocks)
        num_recompute_tokens = found.num_recompute_blocks * self.shape.block_size_tokens
        return [_Option(Way.SPLIT, self._out_s(num_out) + found.expected_s, num_recompute_tokens, num_out)]

    def _out_s(self, num_blocks: int) -> float:
        return self.link.out_s(num_blocks * self.shape.block_bytes)


class _Option(NamedTuple):
    way: Way
    seconds: float
    num_recompute_tokens: int
    num_out_blocks: int


# -- restores of sessions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SplitRestore(RestoreDecision):
    """LOAD, where the first `num_front_blocks` of `num_blocks` are computed while the others are loaded.

    Whoever does not know of the split and loads all `num_blocks` is right, only slower.
    """

    num_front_blocks: int = 0


@dataclass(frozen=True)
class FullCost(FasterWins):
    """Load, wait or compute like `FasterWins`, with a prefill's cost by table instead of one rate; with `can_split`, both at once (E2).

    A `RestorePolicy`: give it to `KvTiers(policy=...)`. A split is found where nothing of the restore has come yet or everything has: blocks come
    from disk front first, so that later the front is there already.

    Args:
        prefill: None takes the facts' own rate.
        num_context_tokens: on the device before what is restored; the facts do not say.
        can_split: the driver knows `SplitRestore`.
    """

    prefill: PrefillCost | None = None
    num_context_tokens: int = 0
    can_split: bool = False
    overlap: float = 1.0

    def decide(self, facts: RestoreFacts) -> RestoreDecision:
        decision = super().decide(facts)
        is_whole = facts.num_ready_blocks in (0, facts.num_blocks)
        if not self.can_split or self.prefill is None or not is_whole or facts.num_blocks < 2:
            return decision
        found = split(self._split_facts(facts), self.prefill)
        if found.way is not Way.SPLIT or found.expected_s >= decision.expected_s:
            return decision
        reason = "front is computed while the back is loaded"
        return SplitRestore(
            Action.LOAD, facts.num_blocks, reason, found.expected_s, found.num_recompute_blocks
        )

    def _split_facts(self, facts: RestoreFacts) -> SplitFacts:
        all_bytes = facts.disk_bytes_ahead + facts.disk_bytes_left
        # What other requests read first is waited for once; one's own bytes are spread over the blocks.
        ahead = facts.disk_bytes_ahead / all_bytes if all_bytes else 0.0
        return SplitFacts(
            num_blocks=facts.num_blocks,
            block_size_tokens=facts.block_size_tokens,
            num_context_tokens=self.num_context_tokens,
            num_tail_tokens=facts.num_tail_tokens,
            load_s_per_block=copy_s(facts, 1) + disk_s(facts) * (1 - ahead) / facts.num_blocks,
            load_setup_s=disk_s(facts) * ahead,
            overlap=self.overlap,
        )

    def _cost_of(self, facts: RestoreFacts, num_blocks: int) -> float:
        if self.prefill is None:
            return super()._cost_of(facts, num_blocks)
        num_tokens = (facts.num_blocks - num_blocks) * facts.block_size_tokens + facts.num_tail_tokens
        num_context_tokens = self.num_context_tokens + num_blocks * facts.block_size_tokens
        return copy_s(facts, num_blocks) + self.prefill.prefill_s(num_tokens, num_context_tokens)
