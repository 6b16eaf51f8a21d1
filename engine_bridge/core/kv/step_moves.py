"""What one step of the engine copies between the device and host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine_bridge.core.kv.restoring import LoadBlocks
from kvtiers.blocks import Save


@dataclass(slots=True)
class SaveJob:
    """The device's `block_ids` go to the slots of `save` in the next step. The code that copies them commits or abandons the save.

    groups: for each of the blocks, the group of layers whose KV it holds.
    """

    save: Save
    block_ids: list[int]
    groups: list[int]


@dataclass(slots=True)
class StepMoves:
    """The loads and saves of one step.

    ended: called once the copies have ended, and told whether they were made. Until then the device's blocks that are saved must not be overwritten.
    """

    loads: list[LoadBlocks] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    ended: Callable[[bool], None] = lambda is_made: None
