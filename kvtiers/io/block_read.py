"""What a read of blocks asks for, and whom it tells: the same for a disk and for another node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtiers.io.records import Part
from kvtiers.io.turns import Turn
from kvtiers.keys import BlockKey


def ignore(_: Any) -> None:
    """Do nothing, as a callback."""


@dataclass(frozen=True, slots=True)
class BlockRead:
    """Blocks to read: `part(i, layer)` is filled for every key i and every layer from `first_layer` to before `end_layer`, in that order.

    All callbacks but `part` are called on the loop, `on_bytes` also while a cancelled read ends. An error that a callback raises ends the read.

    Attributes:
        keys: the blocks.
        part: returns a writable view of `layer_bytes` bytes; called in worker threads. Its memory belongs to the read until this returns or
            raises, also for bad blocks; a cancelled read waits for the threads that still write into it.
        first_layer: the first layer to read.
        end_layer: the layer behind the last one; None: to the end.
        on_layer: called once for each layer, in order, when it is verified for all blocks that are not bad.
        on_bad: called with a block that will not come; the store has forgotten it.
        on_bytes: called with the number of further bytes read.
        turn: is waited for before each portion that is asked for by itself; None: the read never gives way.
    """

    keys: Sequence[BlockKey]
    part: Part
    first_layer: int = 0
    end_layer: int | None = None
    on_layer: Callable[[int], None] = ignore
    on_bad: Callable[[int], None] = ignore
    on_bytes: Callable[[int], None] = ignore
    turn: Turn | None = None
