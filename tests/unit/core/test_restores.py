"""What waits in the tiers for which request, what a step loads and saves, and that nothing of it leaks."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_bridge.core.kv import kv_transfers
from engine_bridge.core.kv.cache_moves import NULL_BLOCK_ID
from engine_bridge.core.kv.kv_transfers import NewRequest, PrefillMeter, Restores, Sources, StepMoves
from engine_bridge.core.kv.restoring import PIECES_AT_ONCE
from engine_bridge.policy.kv.restore_method import FullCost, SwapOrRecompute, Way
from kvtiers.blocks import Block
from kvtiers.policy.restore import Action, RestoreDecision, RestoreFacts
from tests.unit.facts import LinearPrefill

from .shelf import BLOCK_TOKENS, SHAPE, LoadsAll, Shelf, Tiers, keys_of


class Bench:
    """Restores over a shelf, and requests whose KV is told by their name."""

    def __init__(self, policy: Any = None) -> None:
        self.shelf = Shelf()
        self.tiers = Tiers(self.shelf, policy)
        self.restores = Restores(self.tiers, BLOCK_TOKENS)

    def enter(self, name: str, num_blocks: int = 5, **facts: Any) -> None:
        keys = keys_of(name, num_blocks)
        self.restores.enter(NewRequest(name, keys, tenant="t", session=name, **facts))

    def match(self, name: str, *, device: int = 0, tokens: int = 22, is_resumed: bool = False) -> int | None:
        return self.restores.match(name, device * BLOCK_TOKENS, tokens, is_resumed=is_resumed)

    def admit(self, name: str, num_loaded: int, *, tokens: int = 22, is_resumed: bool = False) -> None:
        block_ids = list(range(100, 106))
        self.restores.admit(name, block_ids, num_loaded * BLOCK_TOKENS, tokens, is_resumed=is_resumed)

    def step(self, **num_computed: int) -> StepMoves:
        return self.restores.next_step(num_computed.items(), lambda name: list(range(100, 106)))


def test_what_the_device_loses_of_a_request_for_which_host_memory_is_short_is_staged_a_moment_later() -> None:
    bench = Bench()
    bench.shelf.room = 5
    bench.shelf.put(keys_of("a", 5), on_disk=True)
    bench.enter("a")
    assert bench.match("a", device=3) is None
    assert bench.match("a", device=0) is None
    assert bench.shelf.stages == [], "there was room for two of five beside the other"
    assert bench.match("a", device=0) is None
    assert [len(each.blocks) for each in bench.shelf.stages] == [5]


def test_what_an_attention_window_has_left_is_neither_saved_nor_loaded_nor_spoiled() -> None:
    """vLLM's null block stands in the request's list there: a block that is nobody's, with bytes of anything."""
    bench, held = Bench(), keys_of("a", 5)
    bench.enter("a")
    null = NULL_BLOCK_ID
    moves = bench.restores.next_step([("a", 20)], lambda name: [null, null, null, 103, 104, 105])
    (job,) = moves.saves
    assert [block.key for block in job.save.blocks] == held[3:] and job.block_ids == [103, 104]
    bench.shelf.commit(job.save)
    bench.enter("b")
    assert bench.match("b") == 0
    bench.restores.enter(NewRequest("again", held, tenant="t", session="a"))
    assert bench.match("again") == 0, "a prefix with a hole is none"
    bench.shelf.put(held)
    assert bench.match("again", tokens=25) == 0, "who was told that there is none computes"
    bench.restores.enter(NewRequest("third", held, tenant="t", session="a"))
    assert bench.match("third") == 5 * BLOCK_TOKENS
    bench.restores.admit("third", [null, null, null, 203, 204, 205], 5 * BLOCK_TOKENS, 22, is_resumed=False)
    moves = bench.restores.next_step([("third", 22)], lambda name: [null, null, null, 203, 204, 205])
    assert [(load.positions, load.block_ids) for load in moves.loads] == [([3, 4], [203, 204])]
    ids = {"a": [null, null, null, 103, 104, 105], "third": [null, 7, null, 203, 204, 205]}
    assert bench.restores.spoiled_by({103}, lambda name: ids.get(name, [])) == {103, 104, 105}
    assert bench.restores.spoiled_by({7}, lambda name: ids.get(name, [])) == {7, 203, 204, 205}


def test_what_stands_behind_a_block_that_did_not_load_is_spoiled_too() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 5))
    blocks = {"a": [10, 11, 12, 13, 14], "b": [20, 21], "waits": [11]}
    for name in blocks:
        bench.enter(name)
    assert bench.match("a") == 20
    bench.admit("a", 5)
    bench.restores.next_step([("a", 20), ("b", 8)], blocks.__getitem__)
    assert bench.restores.spoiled_by({12}, blocks.__getitem__) == {12, 13, 14}
    assert bench.restores.take_sources("a") == Sources(device=0, host=8)
    assert bench.restores.spoiled_by({99}, blocks.__getitem__) == {99}


def test_a_prefill_is_timed_by_the_step_after_it_while_requests_run() -> None:
    meter = PrefillMeter()
    assert meter.stepped(kv_transfers.MIN_PREFILL_TOKENS, has_running=False, now=1.0) is None
    assert meter.stepped(3, has_running=True, now=1.5) == (kv_transfers.MIN_PREFILL_TOKENS, 0.5)
    # Three tokens say little.
    assert meter.stepped(kv_transfers.MIN_PREFILL_TOKENS, has_running=True, now=2.0) is None
    assert meter.stepped(3, has_running=False, now=99.0) is None  # nobody ran: a pause lies between


@pytest.mark.parametrize(("s_per_token", "way"), [(1.0, Way.SWAP), (0.1, Way.RECOMPUTE)])
def test_the_cheaper_way_back_is_chosen_when_preempted_and_gone_after(s_per_token: float, way: Way) -> None:
    prefill, rate = LinearPrefill(s_per_token), float(SHAPE.block_bytes)  # a block takes a second to copy
    bench = Bench(FullCost(prefill=prefill))
    bench.tiers.bytes_per_s = rate
    costs = (prefill, BLOCK_TOKENS, SHAPE.block_bytes, lambda num_bytes: num_bytes / rate)
    bench.tiers.costs = SwapOrRecompute(*costs)
    bench.shelf.put(keys_of("a", 5))
    bench.enter("a")
    assert bench.restores.preempted("a", 22) is way
    num_tokens = bench.match("a", is_resumed=True)
    assert num_tokens == (5 * BLOCK_TOKENS if way is Way.SWAP else 0)
    bench.admit("a", 5 if num_tokens else 0, is_resumed=True)
    assert bench.tiers.chosen == bench.tiers.resumed == {way.value: 1}


def test_where_a_policy_of_its_own_decides_no_way_is_chosen_before() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 5))
    bench.enter("a")
    assert bench.restores.preempted("a", 22) is None
    assert bench.match("a", is_resumed=True) == 5 * BLOCK_TOKENS
    assert not bench.tiers.chosen


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
        for name in "abcd":
            self.shelf.put(keys_of(name, 5), on_disk=name in "cd")
        self.policy = DecidesAnything()
        self.tiers = Tiers(self.shelf, self.policy)
        self.tiers.num_free_blocks = 12
        self.restores = Restores(self.tiers, BLOCK_TOKENS)
        self.waiting: dict[str, int] = {}  # times that it was preempted
        self.running: dict[str, int] = {}
        self.num_starts = 0  # requests that the next step loads something for
        self.num_to_load = 0  # blocks that it loads
        self.num_made = 0
        # Leading blocks that a request has none of on the device: its attention does not look at them.
        self.num_null = 0

    @initialize(loads_must_hold=st.booleans())
    def begins(self, loads_must_hold: bool) -> None:
        self.tiers.loads_must_hold = loads_must_hold

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
        first = num_on_device * BLOCK_TOKENS
        num_tokens = self.restores.match(request_id, first, 22, is_resumed=times > 0)
        if num_tokens is None or not starts:
            return
        assert num_tokens % BLOCK_TOKENS == 0 and first + num_tokens < 22
        self.starts(request_id, num_on_device, num_tokens)

    def block_ids(self, request_id: str = "") -> list[int]:
        return [NULL_BLOCK_ID if at < self.num_null else 100 + at for at in range(6)]

    def starts(self, request_id: str, first: int, num_tokens: int) -> None:
        is_resumed = self.waiting[request_id] > 0
        self.restores.admit(request_id, self.block_ids(), num_tokens, 22, is_resumed=is_resumed)
        self.running[request_id] = self.waiting.pop(request_id)
        self.num_starts += num_tokens > 0
        self.num_to_load += max(first + num_tokens // BLOCK_TOKENS - max(first, self.num_null), 0)

    @rule(num_blocks=st.integers(0, 6))
    def the_window_slides(self, num_blocks: int) -> None:
        self.num_null = num_blocks

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
        scheduled = [(request_id, num_computed) for request_id in self.running]
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
        places = [block_id - 100 for block_id in block_ids]
        assert [f"-{place}" for place in places] == [block.key.decode()[1:] for block in blocks]

    @rule()
    def pieces_are_copied(self) -> None:
        for request_id, copy in self.restores.take_copies().items():
            assert request_id in self.waiting
            assert copy.sources and all(block.ready == SHAPE.num_layers for block in copy.sources)
            names = copy.hashes[copy.start : copy.start + len(copy.sources)]
            assert [block.key for block in copy.sources] == names

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

    @rule(name=NAMES, at=st.integers(0, 4), on_disk=st.booleans())
    def host_memory_is_short(self, name: str, at: int, on_disk: bool) -> None:
        for key in keys_of(name, 5)[at:]:
            if on_disk and key in self.shelf.on_disk:
                self.shelf.put([key], on_disk=True)
            else:
                self.shelf.on_disk.pop(key, None)  # type: ignore[call-overload]

    @rule(room=st.none() | st.integers(0, 12))
    def host_memory_has_room_for(self, room: int | None) -> None:
        self.shelf.room = room

    @invariant()
    def only_who_waits_or_is_about_to_load_holds_a_stage(self) -> None:
        assert len(self.shelf.stages) <= PIECES_AT_ONCE * (len(self.waiting) + self.num_starts)

    def teardown(self) -> None:
        self.policy.share = None
        for _ in range(30 * len(self.waiting)):  # nobody waits for ever
            for request_id, times in list(self.waiting.items()):
                num_tokens = self.restores.match(request_id, 0, 22, is_resumed=times > 0)
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
