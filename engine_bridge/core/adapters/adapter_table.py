"""The facts known of each adapter version, and the memory that all of them take together. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from engine_bridge.protocol.node import AdapterPlace


@dataclass(slots=True, eq=False)
class Version:
    """One version of an adapter, and where it is besides the disk.

    Attributes:
        room: the share of the steps' room that it takes, in the units of `Rules.step_room`.
        host_bytes: size of its copy in host memory; None without a copy.
        copy: state of its copy in KV blocks.
        num_layouts: number of layouts from its host copy that are under way on the loader's thread.
        is_put_back: whether it was put back for a measurement; that ends with its next request.
        requests: ids of its requests in the engine, the oldest first, and the time in seconds at which each came.
    """

    id: int
    num_bytes: int
    room: int
    last_used_s: float
    is_pinned: bool = False
    is_removed: bool = False
    is_loading: bool = False
    host_bytes: int | None = None
    copy: Literal["none", "writing", "whole"] = "none"
    slot: int | None = None
    is_filled: bool = False
    num_layouts: int = 0
    is_put_back: bool = False
    requests: dict[str, float] = field(default_factory=dict)

    @property
    def place(self) -> AdapterPlace:
        """The nearest of the places where the version is."""
        if self.slot is not None:
            return "slot"
        if self.host_bytes is not None:
            return "host"
        return "cached" if self.copy == "whole" else "disk"

    @property
    def oldest_request_s(self) -> float:
        """The time at which the oldest of its requests came, in seconds; 0 without any request."""
        return next(iter(self.requests.values()), 0.0)

    @property
    def is_host_copy_read(self) -> bool:
        """Whether the copy in host memory is being read, so that it must stay."""
        return self.num_layouts > 0 or self.copy == "writing"


class AdapterTable:
    """The known versions by id, and the slots. Iterating takes a snapshot."""

    def __init__(self, num_slots: int) -> None:
        self.slots: list[int | None] = [None] * num_slots
        """The id of the adapter in each slot; None for an empty slot."""
        self.host_bytes = 0
        """Size of all copies in host memory."""
        self.reserved_bytes = 0
        """Host memory that is reserved for loads that are under way."""
        self.num_loads = 0
        self._versions: dict[int, Version] = {}

    def __len__(self) -> int:
        return len(self._versions)

    def __iter__(self) -> Iterator[Version]:
        return iter(list(self._versions.values()))

    def __getitem__(self, adapter_id: int) -> Version:
        return self._versions[adapter_id]

    def get(self, adapter_id: int) -> Version | None:
        """Return the version with this id, or None if it is unknown."""
        return self._versions.get(adapter_id)

    def add(self, version: Version) -> None:
        """Add a version; one with the same id is replaced."""
        self._versions[version.id] = version

    def remove(self, version: Version) -> None:
        """Remove a version that holds no memory any more."""
        del self._versions[version.id]

    def begin_load(self, version: Version) -> None:
        """Note that a version is being read from disk, and reserve host memory for it."""
        version.is_loading = True
        self.num_loads += 1
        self.reserved_bytes += version.num_bytes

    def end_load(self, version: Version, host_bytes: int | None) -> None:
        """Note that a load has ended. host_bytes: size of the copy that now lies in host memory; None: the load failed."""
        version.is_loading = False
        self.num_loads -= 1
        self.reserved_bytes -= version.num_bytes
        version.host_bytes = host_bytes
        self.host_bytes += host_bytes or 0

    def leave_host(self, version: Version) -> None:
        """Note that a version has no copy in host memory any more. Without a copy nothing changes."""
        self.host_bytes -= version.host_bytes or 0
        version.host_bytes = None

    def enter_slot(self, version: Version, slot: int) -> None:
        """Give a device slot to a version whose weights are yet to be written there."""
        self.slots[slot], version.slot, version.is_filled = version.id, slot, False

    def leave_slot(self, version: Version) -> int:
        """Take a version out of its slot, and return the number of that slot."""
        slot = version.slot
        assert slot is not None
        self.slots[slot], version.slot, version.is_filled = None, None, False
        return slot

    def check(self, host_capacity_bytes: int) -> None:
        """Check that the books balance. Raises AssertionError: they do not balance."""
        versions = list(self._versions.values())
        assert self.host_bytes == sum(v.host_bytes or 0 for v in versions), "bytes lost or counted twice"
        assert self.reserved_bytes == sum(v.num_bytes for v in versions if v.is_loading), "reserved bytes"
        assert self.host_bytes + self.reserved_bytes <= host_capacity_bytes, "host memory is bounded"
        assert self.num_loads == sum(v.is_loading for v in versions), "loads"
        owners = {v.id: v.slot for v in versions if v.slot is not None}
        assert owners == {i: slot for slot, i in enumerate(self.slots) if i is not None}, "slots"
        assert not any(v.is_filled and v.slot is None for v in versions), "filled without a slot"
