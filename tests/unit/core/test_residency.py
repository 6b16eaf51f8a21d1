"""Where adapters go: what requests need comes, what nobody needs leaves, by the chosen policy and within the memory that there is."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_bridge.core.adapters import adapter_moves
from engine_bridge.core.adapters.adapter_moves import Fill, LoadToHost, Move, Refuse, WriteCopy
from engine_bridge.core.adapters.adapter_worth import Worth
from engine_bridge.core.adapters.residency import AdapterPlaces, Rules
from engine_bridge.core.adapters.staging import AHEAD_FOR_S, HistoryPrefetch, ReadAhead
from engine_bridge.policy.adapters import adapter_cache
from engine_bridge.policy.adapters.adapter_cache import POLICIES, AdapterLru, PrefixFacts
from engine_bridge.policy.adapters.cached_adapter import CachedAdapter
from engine_bridge.protocol.node import AdvisoryReport

SIZE = 100
NOBODY: frozenset[int] = frozenset()


def make(num_adapters: int = 3, policy: str = "adaptive", **rules: Any) -> AdapterPlaces:
    """With adapters 1, 2, … of SIZE bytes, all on disk."""
    places = AdapterPlaces(Rules(**({"host_bytes": 2 * SIZE, "num_slots": 2} | rules)), Worth(policy))
    for adapter_id in range(1, num_adapters + 1):
        places.add(adapter_id, SIZE, room=SIZE, is_pinned=False, now=0.0)
        places.wanted.drop(adapter_id)
    return places


def bring(places: AdapterPlaces, adapter_id: int, now: float = 0.0) -> None:
    """To host memory."""
    places.prefetch(adapter_id)
    assert LoadToHost(adapter_id, "disk") in places.advance(NOBODY, now)
    places.loaded(adapter_id, SIZE, "disk", 1.0, now)


def lay_out(places: AdapterPlaces, moves: Sequence[Move]) -> list[Move]:
    """Done with the fills among them."""
    after: list[Move] = []
    for move in moves:
        if isinstance(move, Fill):
            places.filled(move.adapter_id, move.slot)
            after += places.laid_out(move.adapter_id)
    return after


def serve(places: AdapterPlaces, adapter_id: int, now: float = 0.0) -> None:
    """A request that comes, runs and ends, with the adapter in host memory already."""
    places.requested("r", adapter_id, now)
    lay_out(places, places.enter([adapter_id], {adapter_id}, now))
    places.released("r", adapter_id, now)


def ask(places: AdapterPlaces, adapter_id: int, now: float = 0.0) -> None:
    """A request that comes and goes."""
    places.requested("r", adapter_id, now)
    places.released("r", adapter_id, now)


def keep_copy(places: AdapterPlaces, adapter_id: int) -> None:
    """In KV blocks alone."""
    bring(places, adapter_id)
    places.copies.begun(adapter_id)
    places.copies.done(adapter_id)
    places.table.leave_host(places.table[adapter_id])


def test_who_is_to_make_room_for_another_one_has_none_itself() -> None:
    places = make(step_room=SIZE)
    assert places.has_room(1, NOBODY) and places.has_room(1, {1}) and not places.has_room(2, {1})
    places.turns.last = frozenset({1})
    assert places.has_room(2, NOBODY) and not places.has_room(1, NOBODY)


def test_who_has_no_room_beside_the_pinned_ones_is_refused_and_others_wait() -> None:
    places = make(host_bytes=2 * SIZE)
    for adapter_id in (1, 2):
        places.add(adapter_id, SIZE, room=SIZE, is_pinned=adapter_id == 1, now=0.0)
        bring(places, adapter_id)
    places.requested("old", 2, 0.0)
    places.requested("waits", 3, 1.0)
    assert not any(isinstance(move, Refuse | LoadToHost) for move in places.advance({2}, 1.0))
    places.add(2, SIZE, room=SIZE, is_pinned=True, now=1.0)
    places.wanted.something_moved()
    assert Refuse(3) in places.advance({2}, 2.0)
    places.released("waits", 3, 2.0)
    assert not any(isinstance(move, Refuse) for move in places.advance({2}, 3.0)), "said once"


def test_room_is_made_by_what_adapters_take_in_memory_whatever_their_files_have() -> None:
    places = make(1, host_bytes=2 * SIZE)
    places.prefetch(1)
    places.advance(NOBODY, 0.0)
    places.loaded(1, 3 * SIZE // 2, "disk", 1.0, 0.0)
    places.add(2, 2 * SIZE - 1, room=SIZE, is_pinned=False, now=0.0)
    places.requested("r", 2, 1.0)
    moves = places.advance(NOBODY, 1.0)
    assert adapter_moves.DropHost(1) in moves and LoadToHost(2, "disk") in moves


@pytest.mark.parametrize("leaves", ["its request ends", "it is unpinned", "it is unloaded"])
def test_a_pinned_adapter_that_finds_no_room_is_loaded_as_soon_as_there_is_some(leaves: str) -> None:
    """Not only with its next request, which may be long in coming."""
    places = make(host_bytes=SIZE)
    places.add(1, SIZE, room=SIZE, is_pinned=leaves == "it is unpinned", now=0.0)
    bring(places, 1)
    if leaves != "it is unpinned":
        places.requested("r", 1, 0.0)
        lay_out(places, places.enter([1], {1}, 0.0))
    if leaves == "it is unloaded":
        places.remove(1)
    places.add(2, SIZE, room=SIZE, is_pinned=True, now=0.0)
    assert not any(isinstance(move, LoadToHost) for move in places.advance({1}, 0.0))
    assert not places.has_work(0.0), "nothing is tried until something moves"
    if leaves == "it is unpinned":
        places.add(1, SIZE, room=SIZE, is_pinned=False, now=1.0)
    else:
        places.released("r", 1, 1.0)
    assert places.has_work(1.0)
    assert LoadToHost(2, "disk") in [move for _ in range(2) for move in places.advance(NOBODY, 1.0)]


def test_the_host_computes_for_adapters_on_the_link_and_not_for_those_that_come_from_blocks() -> None:
    places = make(fills_from_copies=True)
    for adapter_id in (1, 2):
        bring(places, adapter_id)
    places.copies.begun(1)
    places.copies.done(1)
    assert [places.is_assisted(adapter_id) for adapter_id in (1, 2)] == [False, True]
    assert not make(fills_from_copies=True, cpu_assist=False).is_assisted(2)


def test_kv_gets_the_blocks_of_the_adapter_that_is_worth_the_least() -> None:
    places = make()
    for adapter_id in (1, 2):
        keep_copy(places, adapter_id)
    ask(places, 1, 1.0)
    assert [places.copies.take_first_to_go(1.0) for _ in range(3)] == [2, 1, None]
    assert places.counts["evicted:cached:kv"] == 2


class LargestId(AdapterLru):
    """Says that the adapter with the largest number is worth the least, and that a byte of adapter n saves 1/n seconds a second."""

    def order(self, cached: Sequence[CachedAdapter], now: float) -> list[CachedAdapter]:
        return sorted(cached, key=lambda adapter: -adapter.adapter_id)

    def worths(self, cached: Sequence[CachedAdapter], window_s: float, now: float) -> list[float]:
        return [1 / adapter.adapter_id for adapter in cached]


def prefix(worth: float) -> PrefixFacts:
    return PrefixFacts(num_bytes=1, restore_s=worth, reuse_per_s=1.0)


def test_a_policy_is_one_class_whose_score_ranks_adapters_against_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(adapter_cache.POLICIES, "largest_id", LargestId)
    places = make(num_adapters=4, policy="largest_id")
    for adapter_id in (2, 4):
        keep_copy(places, adapter_id)
    for _ in range(9):
        places.worth.used(4, 0.0)  # which would save 4 by seconds saved
    displaced = [places.copies.may_displace(3, prefix(worth), 0.0) for worth in (0.3, 0.4)]
    assert displaced == [True, False]
    assert places.copies.take_less_valuable_than_blocks(prefix(0.2), 0.0) is None
    assert places.copies.take_less_valuable_than_blocks(prefix(0.3), 0.0) == 4
    assert places.places()[4] == "disk"
    assert places.copies.take_less_valuable_than_blocks(prefix(0.6), 0.0) == 2


def test_an_adapter_that_comes_like_clockwork_is_loaded_before_its_next_request() -> None:
    places = AdapterPlaces(Rules(host_bytes=SIZE, num_slots=1), Worth("lru"), HistoryPrefetch())
    places.add(1, SIZE, room=1, is_pinned=False, now=0.0)
    for number in range(12):
        places.requested(f"r{number}", 1, 60.0 * number)
        places.released(f"r{number}", 1, 60.0 * number)
        places.advance(NOBODY, 60.0 * number)
    assert places.wait_s(661.0) == 0.0
    assert places.advance(NOBODY, 690.0) == []
    moves = [move for now in range(691, 735) for move in places.advance(NOBODY, float(now))]
    assert LoadToHost(1, "disk") in moves


def test_reading_ahead_is_bounded_but_for_the_first_and_ends_with_the_request_or_by_itself() -> None:
    ahead = ReadAhead(max_bytes=250)
    assert ahead.begin(1, 1000, 0.0) and not ahead.begin(1, 1, 0.0) and not ahead.begin(2, 1, 0.0)
    assert ahead.take(1) and not ahead.take(1)
    assert ahead.begin(2, 100, 1.0) and ahead.begin(3, 100, 2.0) and not ahead.begin(4, 100, 2.0)
    assert ahead.expire(1.5 + AHEAD_FOR_S) == [2]
    assert ahead.begin(4, 100, 3.0)


HOST_BYTES, NUM_SLOTS, MAX_RUNNING = 250, 3, 2


class Traffic(RuleBasedStateMachine):
    """A scheduler, a loader and lent blocks in small, none of which is in a hurry."""

    @initialize(
        assist=st.booleans(),
        is_device=st.booleans(),
        policy=st.sampled_from(sorted(POLICIES)),
        step_room=st.sampled_from([None, 300]),
    )
    def begin(self, assist: bool, is_device: bool, policy: str, step_room: int | None) -> None:
        sizes = {"host_bytes": HOST_BYTES, "num_slots": NUM_SLOTS, "step_room": step_room}
        rules = Rules(**sizes, cpu_assist=assist, fills_from_copies=is_device)
        self.places = AdapterPlaces(rules, Worth(policy), HistoryPrefetch())
        self.now = 0.0
        self.next_number = 1
        self.waiting: dict[str, int] = {}
        self.running: dict[str, int] = {}
        self.served: set[int] = set()
        self.loading: list[LoadToHost] = []
        self.laying_out: list[Fill] = []
        self.host: set[int] = set()
        self.slots: dict[int, int] = {}
        self.copies: dict[int, bool] = {}  # whether it is whole
        for num_bytes in (80, 120, 150):
            self.add(num_bytes)

    # what is decided is carried out; anything doubled or lost shows here

    def do(self, moves: Sequence[Move]) -> None:
        for move in moves:
            match move:
                case LoadToHost(adapter_id, source):
                    assert adapter_id not in self.host
                    assert adapter_id not in [other.adapter_id for other in self.loading]
                    assert source == "disk" or self.copies[adapter_id]
                    self.loading.append(move)
                case Fill(adapter_id, slot, source):
                    assert slot not in self.slots and adapter_id not in self.slots.values()
                    assert adapter_id in self.host if source == "host" else self.copies[adapter_id]
                    self.slots[slot] = adapter_id
                    self.laying_out.append(move)
                case adapter_moves.LeaveSlot(adapter_id, slot):
                    assert self.slots.pop(slot) == adapter_id
                case adapter_moves.DropHost(adapter_id):
                    assert adapter_id not in self.busy_host_copies(), "its host copy is being read"
                    assert not self.needs_host(adapter_id), "evicted while its requests run"
                    self.host.remove(adapter_id)
                case WriteCopy(adapter_id, is_ahead):
                    assert adapter_id in self.host
                    assert not (is_ahead and self.places.table[adapter_id].requests), "requests fill a slot"
                    self.write_copy(adapter_id, is_ahead)
                case adapter_moves.DropCopy(adapter_id):
                    del self.copies[adapter_id]
                case Refuse(adapter_id):
                    pinned = [each for each in self.places.table if each.is_pinned and each.id != adapter_id]
                    assert pinned and not self.running.get(adapter_id)
                case adapter_moves.Forget(adapter_id):
                    assert adapter_id not in {*self.host, *self.slots.values(), *self.copies}

    def needs_host(self, adapter_id: int) -> bool:
        return adapter_id in self.running.values()

    def busy_host_copies(self) -> set[int]:
        writing = {adapter_id for adapter_id, is_whole in self.copies.items() if not is_whole}
        gone = self.places.table
        removed = {i for i in writing if gone.get(i) is None or gone[i].is_removed}
        return {move.adapter_id for move in self.laying_out} | (writing - removed)

    def write_copy(self, adapter_id: int, is_ahead: bool) -> None:
        """There is room for two."""
        if adapter_id in self.copies:
            return
        if len(self.copies) >= 2:
            if is_ahead:
                return
            drops = self.places.copies.room_for(adapter_id, self.now)
            self.do(drops)
            if not drops:
                return
        self.copies[adapter_id] = False
        self.places.copies.begun(adapter_id, is_ahead)

    # -- events

    @rule(num_bytes=st.integers(50, 150))
    def add(self, num_bytes: int) -> None:
        self.places.add(self.next_number, num_bytes, room=num_bytes, is_pinned=False, now=self.now)
        self.served.add(self.next_number)
        self.next_number += 1

    @rule(data=st.data())
    @precondition(lambda self: len(self.served) > 1)
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.served)))
        self.served.discard(number)
        self.do(self.places.remove(number))

    @rule(data=st.data(), wait_s=st.floats(0, 5))
    def request(self, data: st.DataObject, wait_s: float) -> None:
        self.now += wait_s
        number = data.draw(st.sampled_from(sorted(self.served)))
        self.waiting[f"r{self.next_number}"] = number
        self.places.requested(f"r{self.next_number}", number, self.now)
        self.next_number += 1

    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        self.places.prefetch(data.draw(st.sampled_from(sorted(self.served))))

    @rule(data=st.data(), advisory_id=st.sampled_from("abcd"), probability=st.sampled_from((0.1, 0.9)))
    def announce(self, data: st.DataObject, advisory_id: str, probability: float) -> None:
        number = data.draw(st.sampled_from(sorted(self.served)))
        self.places.announce(advisory_id, number, probability)

    @rule(advisory_id=st.sampled_from("abcd"))
    def advisory_ends(self, advisory_id: str) -> None:
        self.places.announced.end(advisory_id)

    @rule(advisory_id=st.sampled_from("abcd"))
    def advisory_ends_of_an_unknown_session(self, advisory_id: str) -> None:
        report = AdvisoryReport(advisory_id=advisory_id, session_id="s", state="unknown")
        self.places.announced.accounted(advisory_id, True, report, self.now)

    @rule(data=st.data(), is_broken=st.booleans())
    @precondition(lambda self: self.loading)
    def load_ends(self, data: st.DataObject, is_broken: bool) -> None:
        self.end_load(data.draw(st.sampled_from(self.loading)), is_broken)

    def end_load(self, move: LoadToHost, is_broken: bool = False) -> None:
        self.loading.remove(move)
        adapter_id = move.adapter_id
        if not is_broken:
            self.host.add(adapter_id)
            num_bytes = self.places.table[adapter_id].num_bytes
            self.do(self.places.loaded(adapter_id, num_bytes, move.source, 0.1, self.now))
            return
        victims = list(self.places.table[adapter_id].requests)
        self.do(self.places.load_failed(adapter_id))
        for request_id in victims:
            if request_id in self.waiting:
                self.release(self.waiting, request_id)
            else:
                self.release(self.running, request_id)

    @rule(data=st.data())
    @precondition(lambda self: self.laying_out)
    def layout_ends(self, data: st.DataObject) -> None:
        self.end_layout(data.draw(st.sampled_from(self.laying_out)))

    def end_layout(self, move: Fill) -> None:
        self.laying_out.remove(move)
        self.places.filled(move.adapter_id, move.slot)
        self.do(self.places.laid_out(move.adapter_id))

    @rule(data=st.data())
    @precondition(lambda self: self.copies)
    def kv_takes_blocks(self, data: st.DataObject) -> None:
        adapter_id = data.draw(st.sampled_from(sorted(self.copies)))
        del self.copies[adapter_id]
        self.places.copies.lost(adapter_id)

    @rule(worth=st.floats(0, 1))
    def kv_is_worth_more(self, worth: float) -> None:
        victim = self.places.copies.take_less_valuable_than_blocks(prefix(worth), self.now)
        if victim is not None:
            assert self.copies.pop(victim), "only whole copies"

    @rule()
    def copies_are_written(self) -> None:
        for adapter_id in [i for i, is_whole in self.copies.items() if not is_whole]:
            self.copies[adapter_id] = True
            self.places.copies.done(adapter_id)

    @rule()
    def step(self) -> None:
        self.now += 0.01
        if self.places.has_work(self.now):
            self.do(self.places.advance(set(self.running.values()), self.now))
            self.do(self.places.copies_to_write(self.now))
        for request_id, number in list(self.waiting.items()):
            running = set(self.running.values())
            has_slot = number in running or len(running) < MAX_RUNNING
            if has_slot and self.places.has_room(number, running) and self.places.is_at_hand(number):
                self.running[request_id] = self.waiting.pop(request_id)
        in_step = set(self.running.values())
        self.do(self.places.enter(in_step, in_step, self.now))
        assert in_step <= set(self.slots.values()), "a step computes with adapters that are in slots"

    def release(self, where: dict[str, int], request_id: str) -> None:
        self.do(self.places.released(request_id, where.pop(request_id), self.now))

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def finish(self, data: st.DataObject) -> None:
        self.release(self.running, data.draw(st.sampled_from(sorted(self.running))))

    @rule(data=st.data())
    @precondition(lambda self: self.waiting)
    def abort(self, data: st.DataObject) -> None:
        self.release(self.waiting, data.draw(st.sampled_from(sorted(self.waiting))))

    @rule()
    def everybody_gets_there(self) -> None:
        """Whatever went before: requests end one after the other, without a round in which nothing can move."""
        for _ in range(20 * (1 + len(self.waiting) + len(self.running))):
            for load in list(self.loading):
                self.end_load(load)
            for fill in list(self.laying_out):
                self.end_layout(fill)
            self.copies_are_written()
            self.step()
            if self.running:
                self.release(self.running, next(iter(self.running)))
            if not self.waiting and not self.running:
                return
        raise AssertionError(f"requests starve: {self.waiting}")

    # -- what always holds

    @invariant()
    def books_balance(self) -> None:
        self.places.table.check(HOST_BYTES)
        wanted = (self.places.table[adapter_id] for adapter_id in self.places.wanted.ids)
        assert self.places.wanted.num_bytes == sum(v.num_bytes for v in wanted if v.host_bytes is None)

    @invariant()
    def the_core_knows_what_was_carried_out(self) -> None:
        table = self.places.table
        assert {v.id for v in table if v.host_bytes is not None} == self.host
        assert {v.slot: v.id for v in table if v.slot is not None} == self.slots
        assert {v.id: v.copy == "whole" for v in table if v.copy != "none"} == self.copies

    @invariant()
    def only_what_is_served_or_used_is_known(self) -> None:
        in_use = {*self.running.values(), *self.waiting.values()}
        moving = {move.adapter_id for move in (*self.loading, *self.laying_out)}
        known = set(self.places.places())
        assert self.served | in_use <= known <= self.served | in_use | moving

    @invariant()
    def who_waits_is_wanted_or_at_hand(self) -> None:
        for number in self.waiting.values():
            assert number in self.places.wanted.ids or self.places.table[number].slot is not None


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=40, stateful_step_count=40)
