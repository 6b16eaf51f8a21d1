"""What a prefix needs of each kind of attention, against a reading of it token by token."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.kv.kv_layout import BlockAt, KvLayout, LayerGroup, one_group

HASH_TOKENS = 4


@st.composite
def groups(draw: st.DrawFn) -> LayerGroup:
    block_tokens = HASH_TOKENS * draw(st.sampled_from([1, 2, 4]))
    kind = draw(st.sampled_from(["all", "window", "chunk", "state"]))
    if kind == "window":
        return LayerGroup("window", block_tokens, draw(st.integers(1, 40)))
    # vLLM wants chunks of whole blocks.
    return LayerGroup(kind, block_tokens, block_tokens * draw(st.integers(1, 4)) if kind == "chunk" else 0)


layouts = st.lists(groups(), min_size=1, max_size=3).map(lambda found: KvLayout(tuple(found), HASH_TOKENS))


def sees(group: LayerGroup, token: int) -> set[int]:
    """The tokens before this one that its attention looks at; of a state, the last token that is in it."""
    if group.kind == "state":
        return set(range(max(token - 1, 0), token))
    if group.kind == "window":
        return set(range(max(token - group.reach_tokens + 1, 0), token))
    return set(range(token // group.reach_tokens * group.reach_tokens if group.kind == "chunk" else 0, token))


def needed(layout: KvLayout, num_tokens: int) -> set[BlockAt]:
    return {
        BlockAt(number, token // group.block_tokens)
        for number, group in enumerate(layout.groups)
        for token in sees(group, num_tokens)
    }


@given(layouts, st.integers(0, 10), st.integers(0, 10))
def test_a_prefix_needs_what_the_next_token_looks_at(layout: KvLayout, num: int, num_there: int) -> None:
    num_tokens, there = num * layout.unit_tokens, min(num, num_there) * layout.unit_tokens
    assert set(layout.needed(0, num_tokens)) == needed(layout, num_tokens)
    # Later tokens look at nothing before, so what the device has of a shorter prefix is all that is left out.
    left = {
        at
        for at in needed(layout, num_tokens)
        if (at.block + 1) * layout.groups[at.group].block_tokens > there
    }
    assert set(layout.needed(there, num_tokens)) == left
    # Beside the state that is needed, the one before is held.
    num_more = sum(num_tokens > group.block_tokens for group in layout.groups if group.kind == "state")
    assert layout.num_blocks(num_tokens) == len(needed(layout, num_tokens)) + num_more


@given(layouts, st.data())
def test_the_longest_prefix_is_the_longest_whose_blocks_are_all_held(
    layout: KvLayout, data: st.DataObject
) -> None:
    num_hashes = data.draw(st.integers(0, 40))
    hashes = [b"%d" % number for number in range(num_hashes)]
    num_tokens = num_hashes * HASH_TOKENS
    last = data.draw(st.integers(0, num_tokens))
    start = data.draw(st.integers(0, last // layout.unit_tokens)) * layout.unit_tokens
    blocks = [
        BlockAt(number, block)
        for number, group in enumerate(layout.groups)
        for block in range(num_tokens // group.block_tokens)
    ]
    lost = data.draw(st.sets(st.sampled_from(blocks), max_size=3)) if blocks else set()
    held = set(layout.entries(hashes, [at for at in blocks if at not in lost]))
    assert len(held) == len(blocks) - len(lost), "each block has a name of its own"
    prefix = layout.longest(hashes, start, last, lambda entries: [entry in held for entry in entries])
    lengths = range(start, last + 1, layout.unit_tokens)
    best = max(each for each in lengths if not lost.intersection(layout.needed(start, each)))
    assert prefix.num_tokens == best and list(prefix.blocks) == layout.needed(start, best)
    assert best <= max(prefix.common_tokens, best)


@given(layouts, st.integers(0, 20), st.integers(0, 20))
def test_what_is_kept_serves_a_prefix_that_ends_with_the_step(layout: KvLayout, first: int, num: int) -> None:
    start, end = first * HASH_TOKENS, (first + num) * HASH_TOKENS
    kept, unit = set(layout.to_keep(start, end, [end], end)), layout.unit_tokens
    if end % unit == 0:
        # Blocks that began before `start` and end behind it are of this step.
        whole = {
            at for at in needed(layout, end) if (at.block + 1) * layout.groups[at.group].block_tokens > start
        }
        assert whole <= kept
    for at in kept:
        group = layout.groups[at.group]
        assert start < (at.block + 1) * group.block_tokens <= end
        assert group.kind == "all" or at.block >= group.first_needed(end)
    # A step that goes on behind `end` leaves no state there.
    beyond = layout.to_keep(start, end, [end], end + 1)
    assert set(beyond) == {at for at in kept if at.group not in layout.state_groups}


@given(layouts, st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_blocks_that_are_surely_enough_are(layout: KvLayout, lengths: list[int]) -> None:
    tokens = [length * layout.unit_tokens for length in lengths]
    num_blocks = next(number for number in itertools.count() if layout.sure_tokens(number) >= sum(tokens))
    assert num_blocks >= sum(map(layout.num_blocks, tokens))


def test_one_group_of_full_attention_is_the_simple_case() -> None:
    layout = one_group(32)
    assert layout.is_divisible and layout.needed(64, 128) == [BlockAt(0, 2), BlockAt(0, 3)]
    assert (
        layout.capacity_tokens(10, 1 << 20) == layout.sure_tokens(10) == 320
        and layout.blocks_per_token == 1 / 32
    )
    assert layout.leading_entries([b"a", b"b"]) == layout.entries(
        [b"a", b"b"], [BlockAt(0, 0), BlockAt(0, 1)]
    )


def test_a_window_takes_no_more_memory_however_long_a_prefix_is() -> None:
    """Gemma 3 has five layers with a window for one without."""
    layout = KvLayout((LayerGroup("all", 32), *[LayerGroup("window", 32, 1024)] * 5), 32)
    assert layout.num_blocks(8192) == 256 + 5 * 32 and layout.num_blocks(512) == 6 * 16
    assert layout.capacity_tokens(4160, 8192) == 10 * 8192
    assert math.isclose(layout.blocks_per_token, 1 / 32)
