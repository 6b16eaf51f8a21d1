"""The moves that `AdapterPlaces` decides. The caller carries them out in the order given; by then the core counts them as done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LoadToHost:
    """Begin to bring an adapter to host memory, from KV blocks if it is still there by then. Answer: `loaded` or `load_failed`."""

    adapter_id: int
    source: Literal["disk", "cached"]


@dataclass(frozen=True, slots=True)
class Fill:
    """Have steps compute with this adapter in this slot.

    Answer: `filled` when steps can compute with it, `laid_out` when no work is left for this fill.
    """

    adapter_id: int
    slot: int
    source: Literal["host", "cached"]


@dataclass(frozen=True, slots=True)
class LeaveSlot:
    """Take the adapter out of the slot. is_emptied: no adapter follows it, so the slot's memory is to be given back."""

    adapter_id: int
    slot: int
    is_emptied: bool = False


@dataclass(frozen=True, slots=True)
class DropHost:
    """Give up the adapter's copy in host memory."""

    adapter_id: int


@dataclass(frozen=True, slots=True)
class WriteCopy:
    """Copy the adapter into KV blocks that no request needs, if there are blocks that it may have. Answer: `begun`, then `done` or `lost`.

    Args:
        is_ahead: whether this happens before any request asks for the adapter; then no other copy makes room for it.
    """

    adapter_id: int
    is_ahead: bool = False


@dataclass(frozen=True, slots=True)
class DropCopy:
    """Give up the adapter's copy in KV blocks, whether it is complete or not."""

    adapter_id: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse the adapter's requests: beside the pinned adapters it has no room in host memory, even if all others leave.

    The caller must release those requests (`released`).
    """

    adapter_id: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget the adapter version: it is no longer held anywhere and no request names it."""

    adapter_id: int


Move = LoadToHost | Fill | LeaveSlot | DropHost | WriteCopy | DropCopy | Refuse | Forget
