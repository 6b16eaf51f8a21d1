"""A rank's side of the KV tiers: it copies its part of blocks between its own cache and the region that all ranks share, and decides nothing."""

from __future__ import annotations

import mmap
import os
import sys
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_bridge.driver.kv.step_copies import StepCopies
from engine_bridge.driver.memory import block_copy
from engine_bridge.driver.ranks.messages import CopiesMade, RankMoves, RegionCopy, StepAnswers
from engine_bridge.policy.costs.costs import Copied

if TYPE_CHECKING:
    from engine_bridge.driver.kv.layer_groups import LayerFacts, Layers
    from engine_bridge.driver.memory.block_copy import BlockCopier


class PartCopier:
    """The copier of one rank. A slot of the shared region has the part of each rank, one behind the other.

    Args:
        copier: copies rows of the region, which is seen as a row for each part of each slot.
    """

    def __init__(self, copier: BlockCopier, rank: int, num_ranks: int) -> None:
        self._copier, self._rank, self._num_ranks = copier, rank, num_ranks
        self.out, self.back = copier.out, copier.back
        self.overlaps, self.ask, self.rest = copier.overlaps, copier.ask, copier.rest
        self.flush, self.end_step = copier.flush, copier.end_step

    def to_host(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy a layer's device blocks into this rank's part of slots."""
        self._copier.to_host(layer, blocks, self._rows(slots))

    def to_device(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy this rank's part of slots into a layer's device blocks."""
        self._copier.to_device(layer, blocks, self._rows(slots))

    def _rows(self, slots: Sequence[int]) -> list[int]:
        return [slot * self._num_ranks + self._rank for slot in slots]


class RankCopies(StepCopies):
    """The copies of one rank, in steps and between them."""

    def __init__(self, layers: Layers, state_groups: Collection[int], *, by_layer: bool) -> None:
        super().__init__(layers, state_groups, by_layer=by_layer)
        self._copier: PartCopier | None = None
        self._moves = RankMoves()
        # The numbers of copies that have ended, and whether all was copied. A CUDA device's waiter adds to them.
        self._ended: deque[tuple[int, bool]] = deque()
        self._told = Copied(), Copied()

    def facts(self) -> LayerFacts:
        """Return how this rank keeps its KV. Raises CannotHave."""
        return self._layers.facts()

    def attach(self, path: str, num_slots: int, rank: int, num_ranks: int) -> None:
        """Map the region of `num_slots` slots that the engine's process shares under this path. Raises OSError."""
        row_bytes = self._layers.facts().region_bytes
        fd = os.open(path, os.O_RDWR)
        try:
            memory = mmap.mmap(fd, max(num_slots * num_ranks * row_bytes, 1))
        finally:
            os.close(fd)
        num_rows = num_slots * num_ranks
        region = np.frombuffer(memory, dtype=np.uint8, count=num_rows * row_bytes).reshape(
            num_rows, row_bytes
        )
        waiter = thread_on(self._layers.regions[0].device, "kv-copies")
        made = block_copy.make_copier(self._layers.regions, region, waiter.submit)
        self._copier = PartCopier(made, rank, num_ranks)

    # -- in a step ---------------------------------------------------------------------------------------------------

    @property
    def copier(self) -> PartCopier:
        """The copier of this rank's part."""
        assert self._copier is not None, "a step that copies before there is a region"
        return self._copier

    def begin(self, moves: RankMoves) -> None:
        """Take over a step's loads and saves."""
        self._moves = moves
        self.begin_copies(moves.saves)

    @property
    def has_loads(self) -> bool:
        """Whether the step loads anything."""
        return bool(self._moves.load_blocks)

    def load_region(self, region: int) -> None:
        """Copy a region of all blocks to load to the device."""
        if self.has_loads:
            slots = [of_block[region] for of_block in self._moves.load_slots]
            self.copier.to_device(region, self._moves.load_blocks, slots)

    def end(self) -> None:
        """Note, once the step's copies are made, that they are: the next answer says so."""
        moves, self._moves = self._moves, RankMoves()
        if not moves.number:
            return
        if sys.exception() is None:
            self.save_rest()
        self._end_copies(moves.number, is_right=self.has_saved_all)

    def take_failed(self) -> set[int]:
        """Return no blocks: a rank loads only what host memory has."""
        return set()

    def take_answers(self) -> StepAnswers | None:
        """Return the copies made since the last call; None for none."""
        ended = dict(self._ended.popleft() for _ in range(len(self._ended)))
        if not ended:
            return None
        failed = {number for number, is_right in ended.items() if not is_right}
        return StepAnswers(dict.fromkeys(ended, 1), failed, self._take_made())

    # -- between steps -----------------------------------------------------------------------------------------------

    def carry_out(self, number: int, copies: Sequence[RegionCopy]) -> StepAnswers | None:
        """Begin copies, which no step waits for, and answer by this number once they are made. Returns what `take_answers` does."""
        for each in copies:
            move = self.copier.to_device if each.is_to_device else self.copier.to_host
            move(each.region, each.blocks, each.slots)
        self._end_copies(number, is_right=True)
        return self.take_answers()

    def _end_copies(self, number: int, *, is_right: bool) -> None:
        """Note, once copies are made, that they are: the next answer says so."""
        self.copier.end_step(
            lambda: self._ended.append((number, is_right)), lambda: self._ended.append((number, False))
        )

    def _take_made(self) -> CopiesMade:
        """Return what this rank has copied since the last call."""
        before, now = self._told, (copy(self.copier.out), copy(self.copier.back))
        self._told = now
        return CopiesMade(now[0].since(before[0]), now[1].since(before[1]))


def thread_on(device: torch.device, name: str) -> ThreadPoolExecutor:
    """Return a thread of this name whose calls of CUDA are this device's.

    CUDA takes those of any other thread for the first GPU's, and makes a context there, some hundred MB for each rank that no start has allowed for.
    Source: vLLM's `WorkerProc.async_output_busy_loop`.
    """
    if device.type != "cuda":
        return ThreadPoolExecutor(1, name)
    return ThreadPoolExecutor(1, name, torch.cuda.set_device, (device,))
