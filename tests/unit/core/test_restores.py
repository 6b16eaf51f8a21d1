"""What waits in the tiers for which request, what a step loads and saves, and that nothing of it leaks."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_bridge.core.kv.asked import NewRequest
from engine_bridge.core.kv.cache_moves import NULL_BLOCK_ID
from engine_bridge.core.kv.kv_transfers import Restores
from engine_bridge.core.kv.prefill_meter import MIN_PREFILL_TOKENS, PrefillMeter
from engine_bridge.core.kv.restoring import PIECES_AT_ONCE
from engine_bridge.core.kv.sources import Sources
from engine_bridge.core.kv.step_moves import StepMoves
from engine_bridge.core.kv.tier_store import block_key
from engine_bridge.policy.kv.kv_layout import BlockAt, KvLayout
from engine_bridge.policy.kv.restore_method import FullCost, SwapOrRecompute, Way
from kvtiers.blocks import Block
from kvtiers.keys import BlockKey
from kvtiers.policy.restore import Action, RestoreDecision, RestoreFacts
from tests.unit.facts import LinearPrefill

from .shelf import (
    BLOCK_TOKENS,
    ONE_GROUP,
    SHAPE,
    SIZES,
    STATES,
    TWO_GROUPS,
    WINDOW,
    LoadsAll,
    Shelf,
    Tiers,
    keys_of,
    places_of,
)


class Bench:
    """Restores over a shelf, and requests whose KV is told by their name."""

    def __init__(self, policy: Any = None, layout: KvLayout = ONE_GROUP) -> None:
        self.shelf = Shelf()
        self.tiers = Tiers(self.shelf, policy)
        self.restores = Restores(self.tiers, layout)

    def enter(self, name: str, num_blocks: int = 5, **facts: Any) -> None:
        keys = keys_of(name, num_blocks)
        self.restores.enter(NewRequest(name, keys, tenant="t", session=name, **facts))

    def match(self, name: str, *, device: int = 0, tokens: int = 22, is_resumed: bool = False) -> int | None:
        return self.restores.match(name, device * BLOCK_TOKENS, tokens, is_resumed=is_resumed)

    def admit(self, name: str, num_loaded: int, *, tokens: int = 22, is_resumed: bool = False) -> None:
        block_ids = list(range(100, 106))
        self.restores.admit(name, [block_ids], num_loaded * BLOCK_TOKENS, tokens, is_resumed=is_resumed)

    def step(self, **num_computed: int) -> StepMoves:
        return self.restores.next_step(num_computed.items(), lambda name: [list(range(100, 106))])


def test_of_a_window_what_a_later_prompt_needs_is_saved_and_loaded_and_nothing_before_it() -> None:
    """vLLM's null block stands in the request's list before it: a block that is nobody's, with bytes of anything."""
    bench, null = Bench(layout=TWO_GROUPS), NULL_BLOCK_ID
    at = {at: key for key, at in places_of(TWO_GROUPS, "a", 6).items()}
    ids = [[null, null, null, 103, 104, 105], [200, 201, 202, 203, 204, 205]]
    bench.enter("a", 6)
    (job,) = bench.restores.next_step([("a", 20)], lambda name: ids).saves
    # Tokens 12 to 19 and the next one are the window; the first of them lies in the fourth block.
    assert job.block_ids == [200, 201, 202, 203, 204, 103, 104] and job.groups == [1, 1, 1, 1, 1, 0, 0]
    bench.shelf.commit(job.save)
    bench.restores.enter(NewRequest("again", keys_of("a", 6), tenant="t", session="a"))
    assert bench.match("again", device=1, tokens=26) == 4 * BLOCK_TOKENS
    bench.restores.admit("again", ids, 4 * BLOCK_TOKENS, 26, is_resumed=False)
    (load,) = bench.restores.next_step([("again", 26)], lambda name: ids).loads
    assert load.is_whole and load.block_ids == [201, 202, 203, 204, 103, 104]
    assert [block.key for block in load.stage.blocks] == [
        at[1, 1],
        at[1, 2],
        at[1, 3],
        at[1, 4],
        at[0, 3],
        at[0, 4],
    ]
    assert bench.restores.take_sources("again") == Sources(device=4, host=16)
    bench.shelf.on_disk.pop(at[0, 3])
    bench.restores.enter(NewRequest("third", keys_of("a", 6), tenant="t", session="a"))
    assert bench.match("third", tokens=26) == 0, "a window with a hole is none"
    assert bench.restores.spoiled_by({202}, lambda name: ids) == {202, 203, 204, 205, 103, 104, 105}


def test_a_prompt_of_whole_blocks_that_is_asked_again_finds_its_window() -> None:
    """Its last token is always computed, so it ends a block before the end up to which it was saved."""
    bench = Bench(layout=TWO_GROUPS)
    ids = [[100, 101, 102, 103, 104], [200, 201, 202, 203, 204]]
    bench.enter("a", 5)
    assert bench.match("a", tokens=20) == 0
    (job,) = bench.restores.next_step([("a", 20)], lambda name: ids).saves
    assert job.block_ids == [200, 201, 202, 203, 204, 102, 103, 104]
    bench.shelf.commit(job.save)
    bench.restores.enter(NewRequest("again", keys_of("a", 5), tenant="t", session="a"))
    assert bench.match("again", tokens=20) == 4 * BLOCK_TOKENS


def test_where_two_conversations_part_their_windows_are_kept_when_that_is_seen() -> None:
    bench, at = Bench(layout=TWO_GROUPS), {at: key for key, at in places_of(TWO_GROUPS, "a", 5).items()}
    bench.shelf.put([at[1, block] for block in range(3)])
    bench.shelf.put([at[0, block] for block in (3, 4)])
    bench.enter("a", 8)
    assert bench.match("a", tokens=34) == 0
    bench.restores.admit("a", [[], []], 0, 34, is_resumed=False)
    ids = [list(range(100, 109)), list(range(200, 209))]
    (job,) = bench.restores.next_step([("a", 32)], lambda name: ids).saves
    assert job.block_ids == [203, 204, 205, 206, 207, 101, 102, 106, 107], (
        "at the end, and where others began alike"
    )


def test_a_state_is_saved_where_a_step_ends_and_loaded_to_where_it_lay_and_where_the_step_computes() -> None:
    bench, null = Bench(layout=STATES), NULL_BLOCK_ID
    bench.enter("a", 6)
    # Of the steps' states only the last is left. Behind 22 tokens the one at 20 has gone; the block before still holds that at 16.
    for num_computed, block_ids in ((16, [null, null, null, 103]), (22, [null, null, null, 103, null, 105])):
        ids = [block_ids, [200, 201, 202, 203, 204, 205]]
        (job,) = bench.restores.next_step([("a", num_computed)], lambda name, ids=ids: ids).saves  # type: ignore[misc]
        assert job.block_ids == ([200, 201, 202, 203, 103] if num_computed == 16 else [204])
        bench.shelf.commit(job.save)
    bench.enter("within", 6)
    found = {"within": [(0, 77, 16), (0, 78, 18)]}  # a state is of use where a block ends
    (job,) = bench.restores.next_step([("within", 22)], lambda name: ids, found).saves
    assert job.block_ids == [200, 201, 202, 203, 204, 77] and job.groups == [1] * 5 + [0]
    bench.shelf.commit(job.save)
    bench.restores.enter(NewRequest("again", keys_of("a", 6), tenant="t", session="a"))
    assert bench.match("again", device=1, tokens=26) == 3 * BLOCK_TOKENS
    assert bench.restores.common_tokens("again") == 5 * BLOCK_TOKENS, "so the engine can keep the state there"
    bench.restores.admit("again", ids, 3 * BLOCK_TOKENS, 26, is_resumed=False)
    (load,) = bench.restores.next_step([("again", 26)], lambda name: ids).loads
    assert load.block_ids == [201, 202, 203, 103, 105] and load.positions == [0, 1, 2, 3, 3]


def test_a_peer_that_has_less_of_a_conversation_gives_what_it_has() -> None:
    bench, at = Bench(layout=TWO_GROUPS), {at: key for key, at in places_of(TWO_GROUPS, "a", 6).items()}
    bench.shelf.peers = {"peer": 1e9}
    bench.restores.enter(NewRequest("a", keys_of("a", 6), session="a", kv_from="peer"))
    assert bench.match("a", tokens=26) is None
    (stage,) = bench.shelf.stages
    assert [block.key for block in stage.blocks] == [
        *(at[1, block] for block in range(6)),
        at[0, 4],
        at[0, 5],
    ]
    for block in stage.blocks[4:]:  # it lends leading blocks only, so that what it has behind is not known
        block.is_bad = True
    for _ in range(4):
        bench.shelf.read_one()
    assert bench.match("a", tokens=26) is None
    (stage,) = bench.shelf.stages
    assert [block.key for block in stage.blocks] == [
        *(at[1, block] for block in range(4)),
        at[0, 2],
        at[0, 3],
    ]
    assert stage.origins == ["host"] * 4 + ["peer"] * 2
    for _ in range(2):
        bench.shelf.read_one()
    assert bench.match("a", tokens=26) == 4 * BLOCK_TOKENS


@pytest.mark.parametrize("bad", [0, 3, 4])
def test_damaged_blocks_are_waited_for_a_few_times_only(bad: int) -> None:
    bench = Bench(layout=TWO_GROUPS)
    bench.shelf.put(list(places_of(TWO_GROUPS, "a", 5)), on_disk=True)
    bench.enter("a")
    for _ in range(4):
        found = bench.match("a")
        for stage in bench.shelf.stages:
            stage.blocks[min(bad, len(stage.blocks) - 1)].is_bad = True
    assert found == 0 and not [stage for stage in bench.shelf.stages if not stage.blocks]
    bench.restores.forget("a")
    assert not bench.shelf.stages


def test_what_stands_behind_a_block_that_did_not_load_is_spoiled_too() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 5))
    blocks = {"a": [10, 11, 12, 13, 14], "b": [20, 21], "waits": [11]}
    for name in blocks:
        bench.enter(name)
    assert bench.match("a") == 20
    bench.admit("a", 5)
    bench.restores.next_step([("a", 20), ("b", 8)], lambda name: [blocks[name]])
    assert bench.restores.spoiled_by({11, 13}, lambda name: [blocks[name]]) == {11, 12, 13, 14}
    assert bench.restores.take_sources("a") == Sources(device=0, host=4)
    assert bench.restores.spoiled_by({99}, lambda name: [blocks[name]]) == {99}


def test_what_is_computed_again_after_a_load_that_failed_is_saved() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 3))
    bench.enter("a")
    assert bench.match("a") == 12
    bench.admit("a", 3)
    (job,) = bench.step(a=22).saves
    assert job.block_ids == [103, 104]
    bench.shelf.saves.remove(job.save)  # as it was computed on what had not come
    bench.shelf.on_disk.pop(keys_of("a", 3)[1])
    assert bench.restores.spoiled_by({101}, lambda name: [list(range(100, 106))]) == set(range(101, 106))
    (job,) = bench.step(a=12).saves
    assert job.block_ids == [101]
    (job,) = bench.step(a=22).saves
    assert job.block_ids == [103, 104]


def test_a_preempted_request_s_blocks_are_offered_again_in_their_new_places() -> None:
    """The tiers may have lost what they had of it, or will: then what the device has is all there is."""
    bench = Bench()
    bench.enter("a")
    (job,) = bench.step(a=22).saves
    bench.shelf.saves.remove(job.save)
    bench.restores.preempted("a", 22)
    assert bench.match("a", is_resumed=True) == 0
    bench.admit("a", 0, is_resumed=True)
    (job,) = bench.restores.next_step([("a", 22)], lambda name: [list(range(200, 206))]).saves
    assert job.block_ids == [200, 201, 202, 203, 204]


def test_a_prefill_is_timed_by_the_step_after_it_while_requests_run() -> None:
    meter = PrefillMeter()
    assert meter.stepped(MIN_PREFILL_TOKENS, has_running=False, now=1.0) is None
    assert meter.stepped(3, has_running=True, now=1.5) == (MIN_PREFILL_TOKENS, 0.5)
    # Three tokens say little.
    assert meter.stepped(MIN_PREFILL_TOKENS, has_running=True, now=2.0) is None
    assert meter.stepped(3, has_running=False, now=99.0) is None  # nobody ran: a pause lies between


@pytest.mark.parametrize(("s_per_token", "way"), [(1.0, Way.SWAP), (0.1, Way.RECOMPUTE)])
def test_the_cheaper_way_back_is_chosen_when_preempted_and_gone_after(s_per_token: float, way: Way) -> None:
    prefill, rate = LinearPrefill(s_per_token), float(SHAPE.block_bytes)  # a block takes a second to copy
    bench = Bench(FullCost(prefill=prefill))
    bench.tiers.bytes_per_s = rate
    costs = (prefill, BLOCK_TOKENS, lambda num_bytes: num_bytes / rate)
    bench.tiers.costs = SwapOrRecompute(*costs)
    bench.shelf.put(keys_of("a", 5))
    bench.enter("a")
    assert bench.restores.preempted("a", 22) is way
    num_tokens = bench.match("a", is_resumed=True)
    assert num_tokens == (5 * BLOCK_TOKENS if way is Way.SWAP else 0)
    bench.admit("a", 5 if num_tokens else 0, is_resumed=True)
    assert bench.tiers.chosen == bench.tiers.resumed == {way.value: 1}


class Beside(Bench):
    """On a GPU, where another request runs. A block takes 10 ms to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.tiers.loads_must_hold = self.tiers.copies_beside = True
        self.tiers.bytes_per_s, self.tiers.num_free_blocks = 100.0 * SHAPE.block_bytes, 12
        self.enter("runs")
        self.step(runs=4)
        self.shelf.put(keys_of("a", 5))
        self.enter("a")


def test_a_restore_that_would_hold_up_those_who_run_comes_to_the_device_beside_the_steps() -> None:
    bench = Beside()
    assert bench.match("a", device=1) is None
    (copy,) = bench.restores.take_copies().values()
    assert copy.start == 1 and [block.key for block in copy.sources] == keys_of("a", 5)[1:]
    assert bench.match("a", device=1) is None, "it is on its way"
    assert bench.restores.copied("a")
    assert bench.match("a", device=5) == 0
    bench.admit("a", 0)
    assert bench.restores.take_sources("a") == Sources(device=4, host=16)
    assert not bench.step(a=22).loads and not bench.shelf.stages


@pytest.mark.parametrize(
    "why", ["it takes no time", "nobody runs", "no room", "others' room", "failed", "resumed"]
)
def test_any_other_restore_is_loaded_by_the_step_that_starts_its_request(why: str) -> None:
    bench = Beside()
    if why == "it takes no time":
        bench.tiers.bytes_per_s *= 100
    elif why == "nobody runs":
        bench.restores.forget("runs")
    elif why == "no room":
        bench.tiers.num_free_blocks = 5
    elif why == "others' room":
        bench.tiers.num_free_blocks = 10
        bench.restores.enter(NewRequest("b", keys_of("a", 5)))
        assert bench.match("b") is None
    elif why == "failed":
        bench.restores.go_whole("a")
    assert bench.match("a", is_resumed=why == "resumed") == 5 * BLOCK_TOKENS
    assert list(bench.restores.take_copies()) == (["b"] if why == "others' room" else [])


def test_what_is_lost_on_its_way_is_loaded_by_the_step() -> None:
    bench = Beside()
    assert bench.match("a") is None and bench.restores.take_copies()
    bench.restores.copied("a")
    assert bench.match("a", device=2) == 3 * BLOCK_TOKENS


NAMES = st.sampled_from("abcd")


class DecidesAnything:
    """Waits for the disk, or loads a share of the blocks at once, whether they are there or not."""

    share: float | None = None

    def decide(self, facts: RestoreFacts) -> RestoreDecision:
        if self.share is None:
            return LoadsAll().decide(facts)
        return RestoreDecision(Action.LOAD, int(self.share * facts.num_blocks), "", 0.0)


class RestoresMachine(RuleBasedStateMachine):
    """Requests come, match, start, are preempted, end; the disk delivers and blocks are lost. All in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf()
        self.shelf.num_host_blocks = 8  # so that a piece is one block
        self.policy = DecidesAnything()
        self.tiers = Tiers(self.shelf, self.policy)
        self.tiers.num_free_blocks = 12
        self.layout = ONE_GROUP
        self.num_tokens = 0
        self.places: dict[str, dict[BlockKey, BlockAt]] = {}  # by conversation
        self.waiting: dict[str, int] = {}  # times that it was preempted
        self.running: dict[str, int] = {}
        self.num_starts = 0  # requests that the next step loads something for
        self.num_to_load = 0  # blocks that it loads
        self.num_made = 0
        self.computed: dict[str, int] = {}  # tokens whose KV a request has
        self.on_way: set[str] = set()  # requests of which a piece is being copied

    @initialize(
        layout=st.sampled_from([ONE_GROUP, WINDOW, TWO_GROUPS, SIZES, STATES]),
        loads_must_hold=st.sampled_from(["no", "yes", "as on a GPU"]),
        num_tokens=st.sampled_from([20, 22]),
    )
    def begins(self, layout: KvLayout, loads_must_hold: str, num_tokens: int) -> None:
        """A prompt may end with a block: its last token is computed all the same."""
        self.layout, self.restores, self.num_tokens = layout, Restores(self.tiers, layout), num_tokens
        self.tiers.loads_must_hold = loads_must_hold != "no" or not layout.is_divisible
        self.tiers.copies_beside = loads_must_hold == "as on a GPU"
        self.tiers.bytes_per_s = 100.0 * SHAPE.block_bytes  # a block holds up a step for longer than it may
        self.places = {name: places_of(layout, name, 5) for name in "abcd"}
        for name in "abcd":
            self.shelf.put(list(self.places[name]), on_disk=name in "cd")

    @rule(name=NAMES, is_saved=st.booleans())
    def comes(self, name: str, is_saved: bool) -> None:
        self.num_made += 1
        request_id = f"{name}{self.num_made}"
        self.restores.enter(NewRequest(request_id, keys_of(name, 5), session=name, is_saved=is_saved))
        self.waiting[request_id] = 0

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), num_on_device=st.integers(0, 5), starts=st.booleans())
    def is_looked_at(self, data: st.DataObject, num_on_device: int, starts: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        times = self.waiting[request_id]
        most = min(num_on_device * BLOCK_TOKENS, self.num_tokens - 1)
        first = most // self.layout.unit_tokens * self.layout.unit_tokens
        num_tokens = self.restores.match(request_id, first, self.num_tokens, is_resumed=times > 0)
        assert num_tokens is None or request_id not in self.on_way, "it would load what is on its way"
        if num_tokens is None or not starts:
            return
        assert num_tokens % self.layout.unit_tokens == 0 and first + num_tokens < self.num_tokens
        self.starts(request_id, first, num_tokens)

    def block_ids(self, request_id: str) -> list[list[int]]:
        """A number that names group and block; as vLLM has it, none where a window or a chunk no longer looks."""
        num_tokens = self.computed[request_id]
        return [
            [
                100 * (number + 1) + block if block >= group.first_needed(num_tokens) else NULL_BLOCK_ID
                for block in range(-(-24 // group.block_tokens))
            ]
            for number, group in enumerate(self.layout.groups)
        ]

    def starts(self, request_id: str, first: int, num_tokens: int) -> None:
        is_resumed = self.waiting[request_id] > 0
        self.computed[request_id] = first + num_tokens
        block_ids = self.block_ids(request_id)
        self.restores.admit(request_id, block_ids, num_tokens, self.num_tokens, is_resumed=is_resumed)
        self.running[request_id] = self.waiting.pop(request_id)
        self.num_starts += num_tokens > 0
        # A state goes to the block that the step computes in as well.
        loaded = self.layout.needed(first, first + num_tokens) if num_tokens else []
        self.num_to_load += len(loaded) + sum(at.group in self.layout.state_groups for at in loaded)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def is_preempted(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        self.waiting[request_id] = self.running.pop(request_id) + 1

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.waiting | self.running)))
        self.waiting.pop(request_id, None)
        self.running.pop(request_id, None)
        self.restores.forget(request_id)

    @rule(num_computed=st.integers(0, 22))
    def a_step_runs(self, num_computed: int) -> None:
        num_computed = min(num_computed, self.num_tokens)
        scheduled = [(each, max(num_computed, self.computed[each])) for each in self.running]
        moves = self.restores.next_step(scheduled, self.block_ids)
        assert self.num_starts <= len(moves.loads) <= PIECES_AT_ONCE * self.num_starts
        # vLLM takes them for computed: one that nothing fills would give wrong tokens.
        assert sum(len(load.block_ids) for load in moves.loads) == self.num_to_load
        self.num_starts = self.num_to_load = 0
        for load in moves.loads:
            self.check_places([load.stage.blocks[at] for at in load.positions], load.block_ids)
            self.shelf.release(load.stage)
        for job in moves.saves:
            self.check_places(job.save.blocks, job.block_ids)
            self.shelf.commit(job.save)

    def check_places(self, blocks: list[Block], block_ids: list[int]) -> None:
        """Each is copied to or from the request's own block at its place, which it has."""
        places = {key: at for of_one in self.places.values() for key, at in of_one.items()}
        for (group, block), block_id in zip((places[each.key] for each in blocks), block_ids, strict=True):
            in_step = [100 * (group + 1) + 5] if group in self.layout.state_groups else []
            assert block_id in (100 * (group + 1) + block, *in_step)

    @rule()
    def pieces_are_copied(self) -> None:
        for request_id, copy in self.restores.take_copies().items():
            assert request_id in self.waiting
            assert copy.sources and all(block.ready == SHAPE.num_layers for block in copy.sources)
            entries = copy.entries[copy.start : copy.start + len(copy.sources)]
            assert [block.key for block in copy.sources] == [block_key(entry) for entry in entries]
            assert request_id not in self.on_way, "it was asked for twice"
            self.on_way.add(request_id)

    @precondition(lambda self: self.on_way)
    @rule(data=st.data())
    def a_piece_has_come(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.on_way)))
        self.on_way.remove(request_id)
        assert request_id in self.waiting or not self.restores.copied(request_id)
        self.restores.copied(request_id)

    @rule(num_blocks=st.integers(0, 12))
    def the_device_has_room_for(self, num_blocks: int) -> None:
        self.tiers.num_free_blocks = num_blocks

    @rule(data=st.data())
    @precondition(lambda self: self.waiting)
    def a_piece_cannot_be_copied(self, data: st.DataObject) -> None:
        self.restores.go_whole(data.draw(st.sampled_from(sorted(self.waiting))))

    @rule(share=st.sampled_from([None, 0.5, 1.0]))
    def the_policy_decides_for(self, share: float | None) -> None:
        self.policy.share = share

    @rule()
    def the_disk_delivers(self) -> None:
        self.shelf.read_one()

    @rule(name=NAMES, at=st.integers(0, 9), on_disk=st.booleans())
    def host_memory_is_short(self, name: str, at: int, on_disk: bool) -> None:
        for key in list(self.places[name])[at:]:
            if on_disk and key in self.shelf.on_disk:
                self.shelf.put([key], on_disk=True)
            else:
                self.shelf.on_disk.pop(key, None)

    @rule(room=st.none() | st.integers(0, 12))
    def host_memory_has_room_for(self, room: int | None) -> None:
        self.shelf.room = room

    @invariant()
    def only_who_waits_or_is_about_to_load_holds_a_stage(self) -> None:
        assert len(self.shelf.stages) <= PIECES_AT_ONCE * (len(self.waiting) + self.num_starts)

    def teardown(self) -> None:
        self.policy.share = None
        for request_id in self.on_way:
            self.restores.copied(request_id)
        for _ in range(30 * len(self.waiting)):  # nobody waits for ever
            for request_id, times in list(self.waiting.items()):
                num_tokens = self.restores.match(request_id, 0, self.num_tokens, is_resumed=times > 0)
                if num_tokens is not None:
                    self.starts(request_id, 0, num_tokens)
            self.a_step_runs(0)
            self.shelf.read_one()
        assert not self.waiting
        for request_id in self.running:
            self.restores.forget(request_id)
        self.a_step_runs(0)
        assert self.shelf.stages == [] and self.shelf.saves == []
        assert not +self.shelf.live


TestRestoresMachine = RestoresMachine.TestCase
TestRestoresMachine.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
