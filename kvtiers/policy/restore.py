"""Load a prompt's KV, wait for more of it, or compute it again: whichever is expected to give the first token sooner.

The parts of a prompt, in blocks, behind the blocks of the device:  [ in host memory | on disk | new text ]. Loading from host starts now; blocks
on disk must be read first; all other tokens are prefilled. Loading runs layer by layer under the forward pass, so a restore may
start before its last layers have come.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

# Chosen priors, replaced by measurements: an SSD or better; a quarter of a laptop's memory bandwidth.
PRIOR_DISK_BYTES_PER_S = 500e6
PRIOR_HOST_BYTES_PER_S = 4e9
# Chosen high (one machine's own network gives 1.5 GB/s, measured): a peer that is never asked is never measured, and to find out that it is slower
# costs a request a few per cent of its prefill.
PRIOR_PEER_BYTES_PER_S = 10e9
# How fast it is forgotten that a peer was slow. Chosen: networks change seldom.
PEER_HALF_LIFE_S = 600.0
# Until a prefill was measured, take it for slow: loading is the safe guess on all machines known to us.
PRIOR_PREFILL_S_PER_TOKEN = 0.01
# One read from disk is about this large, or a layer of all blocks if that is more: before one has come back, nothing is known about its speed.
READ_BYTES = 4 << 20
# Share of the predicted time for computing that must suffice for the reading beneath it. Chosen: predictions are off by a fifth.
OVERLAP_SAFETY = 0.8


class Action(Enum):
    """Whether a restore begins now or waits."""

    LOAD = "load"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class RestoreFacts:
    """The facts when a request could start. Blocks are counted behind the ones that the device has."""

    num_blocks: int
    """Leading blocks that are, soon will be, or will pass through host memory."""
    num_ready_blocks: int
    """Leading blocks whose layers are all in host memory now."""
    num_tail_tokens: int
    """Tokens behind `num_blocks` that must be prefilled in any case."""
    block_size_tokens: int
    block_bytes: int
    num_layers: int
    num_ready_layers: int
    """Layers that all `num_blocks` have in host memory now."""
    disk_bytes_done: int
    """Bytes delivered to all requests since this one began to wait, by the disk or peer that it waits for; the next fields likewise."""
    disk_bytes_left: int
    disk_bytes_ahead: int
    """Bytes of other requests, which the disk reads first."""
    waited_s: float
    prefill_s_per_token: float | None
    disk_bytes_per_s: float | None
    host_bytes_per_s: float | None
    num_context_tokens: int = 0
    """Tokens before these blocks, whose KV the device has. Tokens computed behind them take longer."""
    is_from_peer: bool = False
    """Whether some blocks come from another node, whose speed is less certain than the disk's."""


@dataclass(frozen=True, slots=True)
class RestoreDecision:
    """LOAD `num_blocks` now (0: compute everything), or WAIT and ask again."""

    action: Action
    num_blocks: int
    reason: str
    expected_s: float
    """Predicted time to the first token from now on."""


class RestorePolicy(Protocol):
    """Chooses to load, to wait or to compute."""

    def decide(self, facts: RestoreFacts) -> RestoreDecision:
        """Return the decision for these facts."""
        ...


@dataclass(frozen=True, slots=True)
class FasterWins:
    """Wait for the disk only while that is predicted to be faster than prefilling its blocks.

    The wait itself corrects the prediction: a disk that delivers less than expected is given up after the time in which one
    read should have come, so that a hung disk costs a few per cent of a prefill.

    Source: AdaptiveLLM §3.3 (swap or recompute by predicted cost), for restores; SYMPHONY §4.2 (start when the first layers are there).

    Args:
        overlaps: start a restore while its last layers are still on their way; False waits for all (the baseline).
        max_wait_s: bound of any wait for the disk.
    """

    overlaps: bool = True
    max_wait_s: float = 10.0

    def decide(self, facts: RestoreFacts) -> RestoreDecision:
        """Return the way with the earliest predicted first token."""
        now_s = self._cost_of(facts, facts.num_ready_blocks)
        all_s = self._cost_of(facts, facts.num_blocks)
        if facts.num_ready_blocks == facts.num_blocks:
            if facts.num_blocks and all_s > self._cost_of(facts, 0):
                return RestoreDecision(Action.LOAD, 0, "copying is slower", self._cost_of(facts, 0))
            return RestoreDecision(Action.LOAD, facts.num_blocks, "in host memory", all_s)
        left_s = disk_s(facts)
        if facts.waited_s > self._longest_wait_s(facts) or left_s + all_s >= now_s:
            num_blocks = facts.num_ready_blocks if now_s < self._cost_of(facts, 0) else 0
            return RestoreDecision(
                Action.LOAD, num_blocks, "disk is slower", self._cost_of(facts, num_blocks)
            )
        if self.overlaps and self._can_overlap(facts, left_s, all_s):
            return RestoreDecision(Action.LOAD, facts.num_blocks, "layers come in time", all_s)
        return RestoreDecision(Action.WAIT, facts.num_blocks, "on its way from disk", left_s + all_s)

    def _longest_wait_s(self, facts: RestoreFacts) -> float:
        """Return the longest wait: for a peer at most the time of computing all, so that a peer at most doubles a request's time."""
        return min(self.max_wait_s, self._cost_of(facts, 0)) if facts.is_from_peer else self.max_wait_s

    def _cost_of(self, facts: RestoreFacts, num_blocks: int) -> float:
        """Return the seconds to the first token when `num_blocks` are loaded from host and the rest is prefilled."""
        num_tokens = (facts.num_blocks - num_blocks) * facts.block_size_tokens + facts.num_tail_tokens
        return copy_s(facts, num_blocks) + num_tokens * (
            facts.prefill_s_per_token if facts.prefill_s_per_token is not None else PRIOR_PREFILL_S_PER_TOKEN
        )

    def _can_overlap(self, facts: RestoreFacts, left_s: float, compute_s: float) -> bool:
        """Return whether each layer is there by the time that the forward pass needs it."""
        num_left = facts.num_layers - facts.num_ready_layers
        if facts.num_ready_layers == 0 or facts.prefill_s_per_token is None or not num_left:
            return False
        layer_compute_s = OVERLAP_SAFETY * compute_s / facts.num_layers
        first_in_time = left_s / num_left <= facts.num_ready_layers * layer_compute_s
        return first_in_time and left_s <= (facts.num_layers - 1) * layer_compute_s


def disk_s(facts: RestoreFacts) -> float:
    """Return the predicted seconds until this request's blocks are read, by the measured rate or, if lower, by the rate of this wait."""
    rate = facts.disk_bytes_per_s or PRIOR_DISK_BYTES_PER_S
    if facts.waited_s > 0:
        layer_bytes = facts.num_blocks * facts.block_bytes / max(facts.num_layers, 1)
        rate = min(rate, (facts.disk_bytes_done + max(READ_BYTES, layer_bytes)) / facts.waited_s)
    return (facts.disk_bytes_ahead + facts.disk_bytes_left) / rate


def copy_s(facts: RestoreFacts, num_blocks: int) -> float:
    """Return the predicted seconds to copy `num_blocks` from host memory to the device."""
    return num_blocks * facts.block_bytes / (facts.host_bytes_per_s or PRIOR_HOST_BYTES_PER_S)


def is_worth_fetching(
    block_bytes: int, block_size_tokens: float, bytes_per_s: float, prefill_s_per_token: float | None
) -> bool:
    """Return whether a peer gives a block sooner than it is computed. Measured on two cores: from 0.125 GB/s on."""
    seconds = prefill_s_per_token if prefill_s_per_token is not None else PRIOR_PREFILL_S_PER_TOKEN
    return block_bytes / bytes_per_s < block_size_tokens * seconds
