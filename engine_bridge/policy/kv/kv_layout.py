"""What a prefix of a conversation needs of each kind of layer, so that computing can go on behind it. Pure: facts in, decisions out.

A model's layers are of groups that keep their KV alike. Full attention looks at all blocks before a token, a window at the last ones, chunked
attention at those of the token's chunk. Recurrent layers have a state in place of KV, which one block holds as it is behind the block's last token.
An *entry* names one block of one group: a content hash and the group's number. A prefix can be used where
the entries that it needs are held, of every group. One group of full attention is the simple case: each of its leading blocks is of use by itself.
Source: vLLM's hybrid KV cache manager, which decides alike for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct

Entry = bytes
"""A block's content hash, and behind it the number of its group in GROUP_BYTES bytes."""
GROUP_BYTES = 4
LOOK_AT_ONCE = 256
"""So many blocks of full attention are looked up at a time, as those behind a gap are of no use. Chosen."""
Held = Callable[[Sequence[Entry]], Sequence[bool]]
"""Says of each entry whether it is held."""


StateAt = tuple[int, int, int]
"""A group of recurrent layers, the device's block that has their state, and the number of tokens that are in the state."""


class LayerGroup(Struct, frozen=True):
    """Layers that keep their KV alike, in blocks of their own.

    Attributes:
        kind: what their attention looks at: all tokens before one, a window of the last ones, or those of its chunk. "state": recurrent layers.
        block_tokens: tokens in a block; of a state, the tokens between two that may be kept.
        reach_tokens: the size of the window, which counts the token itself, or of a chunk; 0 for all tokens.
    """

    kind: Literal["all", "window", "chunk", "state"]
    block_tokens: int
    reach_tokens: int = 0

    def first_needed(self, num_tokens: int) -> int:
        """Return the first block that computing behind a prefix of `num_tokens` looks at."""
        if self.kind == "all":
            return 0
        if self.kind == "state":
            return max(num_tokens // self.block_tokens - 1, 0)
        if self.kind == "window":
            return max(num_tokens - self.reach_tokens + 1, 0) // self.block_tokens
        return num_tokens // self.reach_tokens * self.reach_tokens // self.block_tokens


class BlockAt(NamedTuple):
    """The place of an entry in a request: its group, and the number of its block there."""

    group: int
    block: int


class Prefix(NamedTuple):
    """A prefix of `num_tokens`, and the blocks that it needs, the ones of full attention first.

    common_tokens: the tokens of which full attention's blocks are held. Where they are more, others' requests began alike, and their windows at the
    place where they parted were not kept.
    """

    num_tokens: int
    blocks: Sequence[BlockAt]
    common_tokens: int


class KvLayout(Struct, frozen=True):
    """The groups of one engine's layers.

    Attributes:
        groups: by vLLM's numbers.
        hash_tokens: tokens that one content hash adds to those before it.
    """

    groups: tuple[LayerGroup, ...]
    hash_tokens: int

    @property
    def is_divisible(self) -> bool:
        """Whether each of a prefix's leading blocks is of use without those behind it."""
        return len(self.groups) == 1 and self.groups[0].kind == "all"

    @property
    def unit_tokens(self) -> int:
        """A prefix that is used again ends at a multiple of this number of tokens."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def full_group(self) -> int | None:
        """The first group that looks at all tokens; None where there is none."""
        return next((number for number, group in enumerate(self.groups) if group.kind == "all"), None)

    @property
    def state_groups(self) -> frozenset[int]:
        """The groups of recurrent layers."""
        return frozenset(number for number, group in enumerate(self.groups) if group.kind == "state")

    @property
    def blocks_per_token(self) -> float:
        """How many blocks a token of a long prefix adds. A window adds none; where no layer looks at all tokens, its blocks count."""
        full = [group for group in self.groups if group.kind == "all"]
        return sum(1 / group.block_tokens for group in full or self.groups)

    def capacity_tokens(self, num_blocks: int, longest_tokens: int) -> int:
        """Return the tokens of long prefixes for which `num_blocks` are enough, as vLLM counts them: those of as many of the longest as fit."""
        if self.is_divisible:
            return num_blocks * self.unit_tokens
        return num_blocks * longest_tokens // max(self.num_blocks(longest_tokens), 1)

    def sure_tokens(self, num_blocks: int) -> int:
        """Return the tokens for which `num_blocks` are enough however many requests share them: short ones profit from no window."""
        unit = self.unit_tokens
        return num_blocks // sum(unit // group.block_tokens for group in self.groups) * unit

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a request of this many tokens holds.

        A state takes at most two blocks: one in which the step computes, and one with the result of the step before.
        """
        return sum(
            min(-(-num_tokens // group.block_tokens), 2)
            if group.kind == "state"
            else -(-num_tokens // group.block_tokens) - group.first_needed(num_tokens)
            for group in self.groups
        )

    def entries(self, hashes: Sequence[bytes], blocks: Sequence[BlockAt]) -> list[Entry]:
        """Return the entries of these blocks of a request whose content has these hashes."""
        tails = [number.to_bytes(GROUP_BYTES, "big") for number in range(len(self.groups))]
        steps = [group.block_tokens // self.hash_tokens for group in self.groups]
        return [bytes(hashes[(index + 1) * steps[group] - 1]) + tails[group] for group, index in blocks]

    def leading_entries(self, hashes: Sequence[bytes]) -> list[Entry]:
        """Return the entries of the first group's blocks from the beginning on. Each hash is that of one block."""
        tail = bytes(GROUP_BYTES)
        return [bytes(block_hash) + tail for block_hash in hashes]

    def needed(self, start_tokens: int, num_tokens: int) -> list[BlockAt]:
        """Return the blocks that a prefix of `num_tokens` needs and one of `start_tokens` has not."""
        return [
            BlockAt(number, index)
            for number, group in self._full_first()
            for index in range(
                max(group.first_needed(num_tokens), start_tokens // group.block_tokens),
                num_tokens // group.block_tokens,
            )
        ]

    def longest(self, hashes: Sequence[bytes], start_tokens: int, last_tokens: int, held: Held) -> Prefix:
        """Return the longest prefix whose blocks are held, with the blocks that `start_tokens` do not have; none longer than those if none is.

        start_tokens: whose KV is there already, a multiple of `unit_tokens`. last_tokens: the longest prefix that is of use. held: asked about no
        more entries than it takes, as a long prompt has tens of thousands.
        """
        unit = self.unit_tokens
        num_tokens = min(last_tokens, len(hashes) * self.hash_tokens) // unit * unit
        full = [number for number, group in enumerate(self.groups) if group.kind == "all"]
        for number in full:
            block_tokens = self.groups[number].block_tokens
            first, last = start_tokens // block_tokens, num_tokens // block_tokens
            num_tokens = (first + self._num_leading(hashes, number, first, last, held)) * block_tokens
            num_tokens = num_tokens // unit * unit
        common_tokens = num_tokens if full else start_tokens
        if not all(held(self.entries(hashes, self._behind_full(start_tokens, num_tokens)))):
            num_tokens = self._shorter(hashes, start_tokens, num_tokens, held)
        return Prefix(num_tokens, self.needed(start_tokens, num_tokens), common_tokens)

    def _num_leading(self, hashes: Sequence[bytes], number: int, first: int, last: int, held: Held) -> int:
        """Return how many of a group's blocks from `first` on are held without a gap."""
        for start in range(first, last, LOOK_AT_ONCE):
            blocks = [BlockAt(number, block) for block in range(start, min(start + LOOK_AT_ONCE, last))]
            flags = held(self.entries(hashes, blocks))
            if not all(flags):
                return start - first + list(flags).index(False)
        return max(last - first, 0)

    def _behind_full(self, start_tokens: int, num_tokens: int) -> list[BlockAt]:
        return [at for at in self.needed(start_tokens, num_tokens) if self.groups[at.group].kind != "all"]

    def _shorter(self, hashes: Sequence[bytes], start_tokens: int, num_tokens: int, held: Held) -> int:
        """Return the longest prefix up to `num_tokens` for which windows and chunks are held; full attention's blocks are."""
        runs: list[tuple[LayerGroup, int, list[int]]] = []

        def shorten(num_tokens: int) -> int:
            """Return the length of the longest prefix, at most `num_tokens`, whose windows and chunks all `runs` hold."""
            while num_tokens > start_tokens and not all(_is_whole(*each, num_tokens) for each in runs):
                num_tokens -= self.unit_tokens
            return num_tokens

        for number, group in enumerate(self.groups):
            if group.kind != "all":
                # No shorter prefix looks at earlier blocks than the shortest of all does.
                first = max(group.first_needed(start_tokens), start_tokens // group.block_tokens)
                blocks = [BlockAt(number, block) for block in range(first, num_tokens // group.block_tokens)]
                runs.append((group, first, _runs(held(self.entries(hashes, blocks)))))
                num_tokens = shorten(num_tokens)  # so that less is asked of the next group
        return num_tokens

    def to_keep(
        self, start_tokens: int, end_tokens: int, ends: Sequence[int], computed_tokens: int
    ) -> list[BlockAt]:
        """Return which blocks of the tokens from `start_tokens` to `end_tokens` are worth keeping.

        Those are all blocks of full attention, and the blocks that a prefix of one of the lengths in `ends` needs. Later requests seldom look at
        the other ones. A state is there only where a step ends: behind `computed_tokens`.
        """
        return [
            BlockAt(number, index)
            for number, group in self._full_first()
            for index in range(start_tokens // group.block_tokens, end_tokens // group.block_tokens)
            if group.kind == "all"
            or any(_is_needed(group, index, end) for end in _ends_of(group, ends, computed_tokens))
        ]

    def state_blocks(self, states: Sequence[StateAt]) -> dict[BlockAt, int]:
        """Return the device's block of each of these states that is of use to a later prefix, as it ends with a block.

        Where content has hashes within a block, vLLM may also say that a block is whole whose state is that of a place within it: no state is taken.
        """
        return {
            BlockAt(group, num_tokens // self.hash_tokens - 1): block_id
            for group, block_id, num_tokens in states
            if self.groups[group].block_tokens == self.hash_tokens and num_tokens % self.hash_tokens == 0
        }

    def _full_first(self) -> list[tuple[int, LayerGroup]]:
        return sorted(enumerate(self.groups), key=lambda each: each[1].kind != "all")


def one_group(block_tokens: int) -> KvLayout:
    """Return the layout of layers that all look at all tokens."""
    return KvLayout((LayerGroup("all", block_tokens),), block_tokens)


def _runs(flags: Sequence[bool]) -> list[int]:
    """Return, for each flag, how many flags up to and with it are true without a gap."""
    lengths, length = [], 0
    for flag in flags:
        length = length + 1 if flag else 0
        lengths.append(length)
    return lengths


def _is_whole(group: LayerGroup, first: int, run: Sequence[int], num_tokens: int) -> bool:
    """Return whether a group's blocks from `first` on, whose runs are known, have all that a prefix of `num_tokens` needs."""
    last = num_tokens // group.block_tokens
    num_wanted = last - max(group.first_needed(num_tokens), first)
    return num_wanted <= 0 or run[last - first - 1] >= num_wanted


def _ends_of(group: LayerGroup, ends: Sequence[int], computed_tokens: int) -> Sequence[int]:
    """Return the lengths, of `ends`, of prefixes whose KV or state this group can keep after a step with `computed_tokens` tokens computed in all."""
    if group.kind != "state":
        return ends
    return [computed_tokens] if computed_tokens % group.block_tokens == 0 else []


def _is_needed(group: LayerGroup, index: int, end: int) -> bool:
    return group.first_needed(end) <= index < end // group.block_tokens
