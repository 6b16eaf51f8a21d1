"""Requests that the engine has taken, as the KV that the tiers hold for them is concerned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_bridge.core.kv.restoring import Restore
from engine_bridge.policy.kv.restore_method import Way
from kvtiers.keys import BlockKey


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the engine has taken. keys: of its whole blocks; the list grows as tokens come.

    session: the group that its KV is kept with; None: the requests that began with the same block. is_saved: whether its KV goes to the tiers; a
    draft, which its user has not sent yet, has KV on the device alone. may_load: False if only computing gives its results, such as log
    probabilities of its prompt. kv_from: the address of a node that may have its KV; "" for none.
    """

    request_id: str
    keys: Sequence[bytes]
    tenant: str = ""
    session: str | None = None
    weight: float = 1.0
    is_saved: bool = True
    may_load: bool = True
    kv_from: str = ""

    @property
    def group(self) -> str:
        """The name under which the KV is kept: the session, else the first block's hash, else the request's id."""
        if self.session is not None:
            return self.session
        return bytes(self.keys[0]).hex() if self.keys else self.request_id

    def block_keys(self, first: int, last: int) -> list[BlockKey]:
        """Keys of the blocks from `first` up to, but without, `last`."""
        return [BlockKey(bytes(key)) for key in self.keys[first:last]]


@dataclass(slots=True)
class Known:
    """One request. entered: the group that the store was told of. has_looked: whether `restore` is up to date with the tiers.

    num_offered: tokens whose blocks were offered to the tiers; None before it ran. way: chosen for its return when it was preempted.
    waits_for: requests that hold the host memory which its restore needs, STOPPED_READS, or TURN. num_waits: how often it has waited for others to
    give memory back. goes_whole: its restore goes in no pieces. turn_bytes: the size of its reads in its turn. common_tokens: see `Prefix`.
    lacking: blocks that did not come, though they were to be had. num_replans: how often a shorter prefix was looked for because of that.
    goes_beside: whether its restore was copied to the device beside the steps, which is tried once. repeat_tokens: the longest prefix that serves the
    same prompt asked again, whose last token is always computed.
    """

    request: NewRequest
    entered: str | None = None
    runs: bool = False
    has_looked: bool = False
    restore: Restore | None = None
    num_offered: int | None = None
    way: Way | None = None
    waits_for: set[str] = field(default_factory=set)
    num_waits: int = 0
    goes_whole: bool = False
    turn_bytes: int = 0
    common_tokens: int = 0
    lacking: set[BlockKey] = field(default_factory=set)
    num_replans: int = 0
    goes_beside: bool = False
    repeat_tokens: int = 0

    def take_restore(self) -> Restore | None:
        """Return the restore and keep it no longer."""
        restore, self.restore = self.restore, None
        return restore
