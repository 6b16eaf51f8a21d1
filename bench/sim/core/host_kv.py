"""Host memory for the KV of preempted requests, and the link to it. What is worth copying is decided by `engine_bridge.policy.ways_back`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from bench.sim.core.clock import Clock
from bench.sim.core.links import SharedLink
from engine_bridge.policy.preemption import RunningFacts
from engine_bridge.policy.ways_back import LossDecision, LossFacts, SwapOrRecompute
from kvtiers.policy.restore import RestoreDecision, RestoreFacts, RestorePolicy


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What a node is given. costs: predicts the ways in which a victim's KV may come back. restore: decides it where KV was written through."""

    num_blocks: int
    costs: SwapOrRecompute
    restore: RestorePolicy | None = None


class HostKv:
    """KV of requests that do not run, in blocks of host memory.

    Out has a direction of the link for itself; in shares its own with adapters that are loaded. Of KV that was written through, copies of requests
    that run fill what nobody else needs and count for nothing: those of whoever is preempted next are taken to be among them, as far as there is
    room for them then. The live engine keeps what was used last, and has a disk below.

    Args:
        into: host to device.
    """

    def __init__(self, clock: Clock, memory: HostMemory, block_bytes: int, into: SharedLink) -> None:
        self.num_blocks = memory.num_blocks
        self.into = into
        self.out = SharedLink(clock, memory.costs.link.d2h_bytes_per_s, memory.costs.link.setup_s)
        self.most_blocks = 0
        self.errors: list[float] = []
        """Of each copy: what was predicted for it over what it took, minus 1."""
        self._clock, self._memory, self._block_bytes = clock, memory, block_bytes
        self._held: dict[str, int] = {}
        self._used = 0
        # The costs learn nothing here, so the same question has the same answer.
        self._decided: dict[tuple[int, int, int], LossDecision] = {}

    @property
    def free_blocks(self) -> int:
        return self.num_blocks - self._used

    def held(self, request_id: str) -> int:
        """Blocks of a request, its first ones."""
        return self._held.get(request_id, 0)

    def holders(self) -> set[str]:
        return set(self._held)

    # -- memory

    def save(self, request_id: str, num_blocks: int) -> None:
        """What was written through of a request that leaves: its first blocks, as many as there is room for. What it has already stays."""
        num_held = self.held(request_id)
        self._hold(request_id, max(min(num_blocks, num_held + self.free_blocks), num_held))

    def drop(self, request_id: str) -> int:
        """Forget a request's blocks. Returns how many."""
        num_blocks = self._held.pop(request_id, 0)
        self._used -= num_blocks
        return num_blocks

    def _hold(self, request_id: str, num_blocks: int) -> None:
        """Raises RuntimeError if there is no room: the caller was told."""
        self.drop(request_id)
        if num_blocks > self.free_blocks:
            raise RuntimeError(f"{num_blocks} blocks for host memory with {self.free_blocks} free")
        if num_blocks:
            self._held[request_id] = num_blocks
            self._used += num_blocks
            self.most_blocks = max(self.most_blocks, self._used)

    # -- copies

    def copy_out(self, request_id: str, num_blocks: int, done: Callable[[float], None]) -> None:
        """Copy a request's KV here; `done` is called when the device may forget it."""
        self._hold(request_id, num_blocks)
        num_bytes = num_blocks * self._block_bytes
        self.out.transfer(num_bytes, self._timed(self._memory.costs.link.out_s(num_bytes), done))

    def copy_in(self, num_blocks: int, done: Callable[[float], None]) -> None:
        """Copy so many blocks to the device. They stay held until they are dropped."""
        num_bytes = num_blocks * self._block_bytes
        self.into.transfer(num_bytes, self._timed(self._memory.costs.link.in_s(num_bytes), done))

    def _timed(self, predicted_s: float, done: Callable[[float], None]) -> Callable[[float], None]:
        began_s = self._clock.now

        def ended(now: float) -> None:
            self.errors.append(predicted_s / (now - began_s) - 1)
            done(now)

        return ended

    # -- decisions

    def with_ways(self, facts: RunningFacts, num_tokens: int) -> RunningFacts:
        """A running request's facts with what each way would take, as predicted. Who is still coming back has its KV here already."""
        num_held, costs = self.held(facts.request_id), self._memory.costs
        num_unsaved = costs.shape.num_blocks(num_tokens) - num_held
        key = (num_tokens, num_held, min(self.free_blocks, num_unsaved))
        decision = self._decided.get(key)
        if decision is None:
            size = costs.shape.block_size_tokens
            loss = LossFacts(num_tokens=num_tokens, num_saved_tokens=num_held * size, num_host_blocks=key[2])
            decision = self._decided[key] = costs.decide(loss)
        return msgspec.structs.replace(
            facts,
            recompute_s=decision.recompute_s,
            swap_s=decision.swap_s,
            split_s=decision.split_s,
            num_host_blocks=max(num_unsaved, 0),
        )

    def decide_restore(self, num_blocks: int, num_tail_tokens: int) -> RestoreDecision:
        """How much of what is held to load, and how much to compute. The link is taken to be shared with what is on it now."""
        policy, shape = self._memory.restore, self._memory.costs.shape
        assert policy is not None, "only what was written through is asked about"
        return policy.decide(
            RestoreFacts(
                num_blocks=num_blocks,
                num_ready_blocks=num_blocks,
                num_tail_tokens=num_tail_tokens,
                block_size_tokens=shape.block_size_tokens,
                block_bytes=self._block_bytes,
                num_layers=shape.num_layers,
                num_ready_layers=shape.num_layers,
                disk_bytes_done=0,
                disk_bytes_left=0,
                disk_bytes_ahead=0,
                waited_s=0.0,
                prefill_s_per_token=None,
                disk_bytes_per_s=None,
                host_bytes_per_s=self.into.bytes_per_s / (1 + self.into.num_transfers),
            )
        )

    def check_invariants(self) -> None:
        """Raises AssertionError if blocks are lost, or more than there are."""
        assert self._used == sum(self._held.values()), "host blocks lost or counted twice"
        assert 0 <= self._used <= self.most_blocks <= self.num_blocks, "more host blocks than there are"
        assert all(num > 0 for num in self._held.values()), "held, but nothing"
