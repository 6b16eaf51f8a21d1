"""What `AdapterPlaces` decides, for whoever carries it out, in the order given. By then the core counts it as done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Load:
    """Begin to bring an adapter to host memory, from KV blocks if it is still there by then. Answer: `loaded` or `load_failed`."""

    adapter_id: int
    source: Literal["disk", "cached"]


@dataclass(frozen=True, slots=True)
class Fill:
    """Have steps compute with this adapter in this slot. Answer: `filled` when they can, `laid_out` when nothing is left to do."""

    adapter_id: int
    slot: int
    source: Literal["host", "cached"]


@dataclass(frozen=True, slots=True)
class LeaveSlot:
    """The adapter is in the slot no more. is_emptied: nobody follows it, its memory is to be given back."""

    adapter_id: int
    slot: int
    is_emptied: bool = False


@dataclass(frozen=True, slots=True)
class DropHost:
    """Give up its copy in host memory."""

    adapter_id: int


@dataclass(frozen=True, slots=True)
class WriteCopy:
    """Keep it in KV blocks that nobody needs, if there are any that it may have. Answer: `begun`, then `done` or `lost`.

    is_ahead: before anybody asks for it; no other copy makes room for it.
    """

    adapter_id: int
    is_ahead: bool = False


@dataclass(frozen=True, slots=True)
class DropCopy:
    """Give up its copy in KV blocks, whole or not."""

    adapter_id: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Its requests cannot be served: beside the pinned ones it has no room in host memory, whoever else leaves. They must be `released`."""

    adapter_id: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The version is gone."""

    adapter_id: int


Move = Load | Fill | LeaveSlot | DropHost | WriteCopy | DropCopy | Refuse | Forget
