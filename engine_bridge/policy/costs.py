"""What a step, a prefill, a swap and a restore cost, and the cheapest way to have KV back. Pure: facts in, decisions out, seconds throughout.

`StepTable` answers in microseconds what a step takes, and learns from each real one. On it stand `prefill_s`, D3's choice between swapping and
recomputing (`SwapOrRecompute`), E2's split (`split`), and `FullCost`, which takes the place of `kvtiers.policy.restore.FasterWins`.
"""

from __future__ import annotations

import enum
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from msgspec import Struct

from kvtiers.policy.restore import (
    PRIOR_HOST_BYTES_PER_S,
    Action,
    FasterWins,
    RestoreDecision,
    RestoreFacts,
    disk_s,
)

# Share of an error that one real step corrects. Chosen: seven steps take away half of it. Up to 0.56 a prediction cannot overshoot what was seen.
LEARNING_RATE = 0.1
# A step counts as no further off than so many times the usual error, which each step moves by this share. Chosen: a stall of the machine (collection,
# another tenant) then moves a prediction by a few per cent, and a lasting change is believed after some dozens of steps.
OUTLIER_ERRORS = 3.0
ERROR_RATE = 0.05
MIN_USUAL_ERROR = 0.02
# A long prefill's chunks beyond so many are sampled evenly: exact where a step's cost is linear in its context. Chosen.
MAX_CHUNK_LOOKUPS = 4


# -- steps -------------------------------------------------------------------------------------------------------------


class StepGrid(Struct, frozen=True, kw_only=True):
    """A table's content, to be stored as it is.

    The axes rise from 0: tokens prefilled in a step, requests that decode a token in it, tokens in KV that all of them attend to. seconds: by
    prefill, then decodes, then context. Of a step without work (0, 0) nothing is ever asked.
    """

    num_prefill_tokens: tuple[int, ...]
    num_decodes: tuple[int, ...]
    num_context_tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def axes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return self.num_prefill_tokens, self.num_decodes, self.num_context_tokens


class StepTable:
    """Seconds of a step, by linear interpolation between grid points; more work never takes less time.

    Beyond the grid the last cell's slope goes on. Memory is that of the grid. Call it from one thread.

    Source: AdaptiveLLM §3.2 and §4.6 (prediction must cost under 1% of the run); the table, so that any regressor will do, and what it learns
    online are ours.

    Raises:
        ValueError: a grid whose axes do not rise from 0, whose sizes do not fit, or with times that are not finite.
    """

    def __init__(self, grid: StepGrid) -> None:
        _check(grid)
        self._prefill, self._decodes, self._context = grid.axes
        self._sizes = tuple(len(axis) for axis in grid.axes)
        self._seconds = _rising([max(seconds, 0.0) for seconds in grid.seconds], self._sizes)
        self.usual_error = 0.1
        """Mean share by which real steps differ from the prediction, recent ones first; each counted at no more than OUTLIER_ERRORS of it."""
        self.num_steps = 0

    @classmethod
    def of(
        cls,
        predict: Callable[[Sequence[tuple[int, int, int]]], Sequence[float]],
        num_prefill_tokens: Sequence[int],
        num_decodes: Sequence[int],
        num_context_tokens: Sequence[int],
    ) -> StepTable:
        """From a regressor: `predict` gets all grid points as (prefill tokens, decodes, context tokens) and gives seconds."""
        axes = (tuple(num_prefill_tokens), tuple(num_decodes), tuple(num_context_tokens))
        points = [(p, d, c) for p in axes[0] for d in axes[1] for c in axes[2]]
        # A step without work is never run, and no regressor has seen one.
        seconds = [float(s) if p or d else 0.0 for (p, d, _), s in zip(points, predict(points), strict=True)]
        return cls(
            StepGrid(
                num_prefill_tokens=axes[0],
                num_decodes=axes[1],
                num_context_tokens=axes[2],
                seconds=tuple(seconds),
            )
        )

    def grid(self) -> StepGrid:
        """As it is now, with what real steps have taught."""
        return StepGrid(
            num_prefill_tokens=self._prefill,
            num_decodes=self._decodes,
            num_context_tokens=self._context,
            seconds=tuple(self._seconds),
        )

    def step_s(self, num_prefill_tokens: int, num_decodes: int, num_context_tokens: int) -> float:
        """Predicted seconds of a step with so much work; 0 for one without."""
        if num_prefill_tokens <= 0 and num_decodes <= 0:
            return 0.0
        i, x = _locate(self._prefill, num_prefill_tokens)
        j, y = _locate(self._decodes, num_decodes)
        k, z = _locate(self._context, num_context_tokens)
        _, along_j, along_k = self._sizes
        seconds = self._seconds
        low = (i * along_j + j) * along_k + k
        high = low + along_j * along_k
        # Along the context, then the decodes, then the prefill: written out, since this is asked thousands of times a step.
        a = seconds[low] + z * (seconds[low + 1] - seconds[low])
        c = seconds[high] + z * (seconds[high + 1] - seconds[high])
        low += along_k
        high += along_k
        b = seconds[low] + z * (seconds[low + 1] - seconds[low])
        d = seconds[high] + z * (seconds[high + 1] - seconds[high])
        a += y * (b - a)
        c += y * (d - c)
        return max(a + x * (c - a), 0.0)

    def observe(
        self, num_prefill_tokens: int, num_decodes: int, num_context_tokens: int, seconds: float
    ) -> None:
        """A real step took so long: move the prediction a part of the way there, never past it. Steps without work or time are ignored."""
        work = (num_prefill_tokens, num_decodes, num_context_tokens)
        predicted = self.step_s(*work)
        if (num_prefill_tokens <= 0 and num_decodes <= 0) or not 0 < seconds < math.inf:
            return
        error = seconds - predicted
        usual = OUTLIER_ERRORS * self.usual_error * max(predicted, 1e-9)
        # What was never predicted (a table of zeros) is believed at once.
        believed = max(min(error, usual), -usual) if predicted > 0 else error
        self._correct(work, LEARNING_RATE * believed)
        share = min(abs(error) / max(predicted, 1e-9), OUTLIER_ERRORS * self.usual_error)
        self.usual_error = max(self.usual_error + ERROR_RATE * (share - self.usual_error), MIN_USUAL_ERROR)
        self.num_steps += 1

    def _correct(self, work: tuple[int, int, int], change_s: float) -> None:
        """Move the prediction at a point by a change, each corner of its cell by its weight in it."""
        axes = (self._prefill, self._decodes, self._context)
        places = [_locate(axis, amount) for axis, amount in zip(axes, work, strict=True)]
        shares = [min(share, 1.0) for _, share in places]  # beyond the grid: its edge
        (i, _), (j, _), (k, _) = places
        corners = []
        for up in itertools.product((0, 1), repeat=3):
            weight = math.prod(s if u else 1 - s for u, s in zip(up, shares, strict=True))
            corners.append(((i + up[0], j + up[1], k + up[2]), weight))
        norm = sum(weight * weight for _, weight in corners)
        targets = [
            (corner, self._seconds[self._index(*corner)] + change_s * weight / norm)
            for corner, weight in corners
            if weight > 0
        ]
        for corner, target in targets:
            if change_s > 0:
                self._raise_from(*corner, target)
            else:
                self._lower_from(*corner, max(target, 0.0))

    def _index(self, i: int, j: int, k: int) -> int:
        return (i * self._sizes[1] + j) * self._sizes[2] + k

    def _raise_from(self, i: int, j: int, k: int, least_s: float) -> None:
        """Everything with at least this much work takes at least so long. What already does, so does all beyond it."""
        for a in range(i, self._sizes[0]):
            for b in range(j, self._sizes[1]):
                at = self._index(a, b, k)
                end = at + self._sizes[2] - k
                if self._seconds[at] >= least_s:
                    if b == j:
                        return
                    break
                while at < end and self._seconds[at] < least_s:
                    self._seconds[at] = least_s
                    at += 1

    def _lower_from(self, i: int, j: int, k: int, most_s: float) -> None:
        """Everything with at most this much work takes at most so long."""
        for a in range(i, -1, -1):
            for b in range(j, -1, -1):
                at = self._index(a, b, k)
                end = at - k
                if self._seconds[at] <= most_s:
                    if b == j:
                        return
                    break
                while at >= end and self._seconds[at] > most_s:
                    self._seconds[at] = most_s
                    at -= 1


def _check(grid: StepGrid) -> None:
    for axis in grid.axes:
        if len(axis) < 2 or axis[0] != 0 or any(b <= a for a, b in itertools.pairwise(axis)):
            raise ValueError("a step table's axes rise from 0 and have two points or more")
    if len(grid.seconds) != math.prod(len(axis) for axis in grid.axes):
        raise ValueError("a step table has one time for each grid point")
    if not all(math.isfinite(seconds) for seconds in grid.seconds):
        raise ValueError("a step table's times are finite")


def _rising(seconds: list[float], sizes: tuple[int, ...]) -> list[float]:
    """The same with each point at least as slow as those with less work: regressors such as forests are not monotone."""
    along_i, along_j, along_k = sizes
    for i in range(along_i):
        for j in range(along_j):
            for k in range(along_k):
                at = (i * along_j + j) * along_k + k
                before = [at - 1] * (k > 0) + [at - along_k] * (j > 0) + [at - along_j * along_k] * (i > 0)
                seconds[at] = max(seconds[at], *(seconds[b] for b in before)) if before else seconds[at]
    return seconds


def _locate(axis: Sequence[int], amount: int) -> tuple[int, float]:
    """The cell in which an amount lies, and how far into it as a share of its length: more than 1 beyond the last one."""
    at = bisect_right(axis, amount) - 1
    if at < 0:
        return 0, 0.0
    at = min(at, len(axis) - 2)
    low = axis[at]
    return at, (amount - low) / (axis[at + 1] - low)


# -- prefills ----------------------------------------------------------------------------------------------------------


class PrefillCost(Protocol):
    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        """Seconds to compute so many tokens of a request behind `num_context_tokens` that have their KV; 0 for none. Never less for more."""
        ...


@dataclass(frozen=True, slots=True)
class LinearPrefill:
    """By one rate, until steps are measured."""

    s_per_token: float

    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        return max(num_tokens, 0) * self.s_per_token


@dataclass(frozen=True, slots=True)
class TablePrefill:
    """What a prefill adds to the steps in which it runs, chunk by chunk.

    Source: AdaptiveLLM §3.2. Departs in counting only what it adds when requests decode beside it: their step would have been run anyway.

    Args:
        chunk_tokens: prefilled in a step at most.
        num_decodes, num_decode_context_tokens: of the requests that decode beside it, and the KV that they attend to.
    """

    table: StepTable
    chunk_tokens: int
    num_decodes: int = 0
    num_decode_context_tokens: int = 0

    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        if num_tokens <= 0:
            return 0.0
        num_chunks, num_rest = divmod(num_tokens, self.chunk_tokens)
        seconds = self._added_s(num_rest, num_context_tokens + num_chunks * self.chunk_tokens)
        num_looked = min(num_chunks, MAX_CHUNK_LOOKUPS)
        for look in range(num_looked):
            # The middle of each of `num_looked` equal runs of chunks.
            chunk = (look + 0.5) * num_chunks / num_looked - 0.5
            context = num_context_tokens + round(chunk * self.chunk_tokens)
            seconds += self._added_s(self.chunk_tokens, context) * num_chunks / num_looked
        return seconds

    def _added_s(self, num_tokens: int, num_context_tokens: int) -> float:
        if num_tokens <= 0:
            return 0.0
        beside = self.table.step_s(0, self.num_decodes, self.num_decode_context_tokens)
        context = num_context_tokens + self.num_decode_context_tokens
        return max(self.table.step_s(num_tokens, self.num_decodes, context) - beside, 0.0)


# -- swaps -------------------------------------------------------------------------------------------------------------


class KvShape(Struct, frozen=True, kw_only=True):
    """hidden_kv: KV heads · head size. Of one shard, where the model is spread over devices."""

    num_layers: int
    hidden_kv: int
    block_size_tokens: int
    dtype_bytes: int

    @property
    def block_bytes(self) -> int:
        """Source: AdaptiveLLM formula 3; with hidden_kv for its hidden size, since models share KV heads between query heads now."""
        return 2 * self.num_layers * self.hidden_kv * self.block_size_tokens * self.dtype_bytes

    def num_blocks(self, num_tokens: int) -> int:
        return -(-max(num_tokens, 0) // self.block_size_tokens)


class Link(Struct, frozen=True, kw_only=True):
    """Between device and host, as measured. setup_s: of a copy of any size, each way."""

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    setup_s: float = 0.0

    def out_s(self, num_bytes: int) -> float:
        return self.setup_s + num_bytes / self.d2h_bytes_per_s if num_bytes > 0 else 0.0

    def in_s(self, num_bytes: int) -> float:
        return self.setup_s + num_bytes / self.h2d_bytes_per_s if num_bytes > 0 else 0.0


def swap_s(num_tokens: int, shape: KvShape, link: Link, num_saved_tokens: int = 0) -> float:
    """Seconds to bring a request's KV to host memory and back.

    Source: AdaptiveLLM formulas 2 to 4. Departs in `num_saved_tokens`, leading ones whose KV is in host memory already (it is written through):
    their whole blocks are not copied out again.
    """
    num_out = shape.num_blocks(num_tokens) - max(num_saved_tokens, 0) // shape.block_size_tokens
    in_bytes = shape.num_blocks(num_tokens) * shape.block_bytes
    return link.out_s(num_out * shape.block_bytes) + link.in_s(in_bytes)


# -- load, recompute, or both ------------------------------------------------------------------------------------------


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
    already. num_host_blocks: for what is not saved yet.
    """

    num_tokens: int
    num_kept_tokens: int = 0
    num_saved_tokens: int = 0
    num_host_blocks: int = 0


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

    Source: AdaptiveLLM Algorithm 1, lines 4 to 14. Departs in KV that is saved or kept already, and in the split (E2).
    """

    prefill: PrefillCost
    shape: KvShape
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
            swap = self._out_s(num_unsaved) + self.link.in_s(num_lost * self.shape.block_bytes)
            options.append(_Option(Way.SWAP, swap, 0, num_unsaved))
            if self.can_split:
                options += self._split(num_lost, num_kept * size, num_unsaved)
        return options

    def _split(self, num_lost: int, num_context_tokens: int, num_unsaved: int) -> list[_Option]:
        """The best split, if it is not a pure way. Unsaved blocks are the last ones, so they are loaded and copied out first."""
        found = split(
            SplitFacts(
                num_blocks=num_lost,
                block_size_tokens=self.shape.block_size_tokens,
                num_context_tokens=num_context_tokens,
                num_tail_tokens=0,
                load_s_per_block=self.shape.block_bytes / self.link.h2d_bytes_per_s,
                load_setup_s=self.link.setup_s,
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
        host_s = facts.block_bytes / (facts.host_bytes_per_s or PRIOR_HOST_BYTES_PER_S)
        all_bytes = facts.disk_bytes_ahead + facts.disk_bytes_left
        # What other requests read first is waited for once; one's own bytes are spread over the blocks.
        ahead = facts.disk_bytes_ahead / all_bytes if all_bytes else 0.0
        return SplitFacts(
            num_blocks=facts.num_blocks,
            block_size_tokens=facts.block_size_tokens,
            num_context_tokens=self.num_context_tokens,
            num_tail_tokens=facts.num_tail_tokens,
            load_s_per_block=host_s + disk_s(facts) * (1 - ahead) / facts.num_blocks,
            load_setup_s=disk_s(facts) * ahead,
            overlap=self.overlap,
        )

    def _cost_of(self, facts: RestoreFacts, num_blocks: int) -> float:
        if self.prefill is None:
            return super()._cost_of(facts, num_blocks)
        host_s = num_blocks * facts.block_bytes / (facts.host_bytes_per_s or PRIOR_HOST_BYTES_PER_S)
        num_tokens = (facts.num_blocks - num_blocks) * facts.block_size_tokens + facts.num_tail_tokens
        num_context_tokens = self.num_context_tokens + num_blocks * facts.block_size_tokens
        return host_s + self.prefill.prefill_s(num_tokens, num_context_tokens)
