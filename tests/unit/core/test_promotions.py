"""What an advisory brings to the device, what it costs, and how it ends: once."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine_bridge.core.kv.cache_moves import Copy, Refresh
from engine_bridge.core.kv.eviction_order import BLOCKS_PER_S, Resident
from engine_bridge.core.kv.promotions import BUSY_SLICE_S, IDLE_SLICE_S, Beside, Promotions
from engine_bridge.core.kv.tier_store import block_key
from engine_bridge.policy.kv.copy_share import CREDIT_S, LONGEST_TURN_S, SHARE
from engine_bridge.policy.kv.kv_layout import KvLayout
from engine_bridge.protocol.node import ADVISORY_ENDS, Advisory, AdvisoryReport

from .shelf import ONE_GROUP, SHAPE, SIZES, STATES, TWO_GROUPS, WINDOW, Shelf, keys_of, places_of

IDLE = Beside(is_busy=False, can_copy=True, overlaps=False)
BUSY = Beside(is_busy=True, can_copy=True, overlaps=False)
BUSY_BESIDE = Beside(is_busy=True, can_copy=True, overlaps=True)
# Copies in a slice of an idle engine: 5.
BYTES_PER_S = 5 * SHAPE.block_bytes / IDLE_SLICE_S


def entries_of(name: str, num: int) -> list[bytes]:
    return ONE_GROUP.leading_entries(keys_of(name, num))


class Cache:
    """A device's prefix cache: what was copied or refreshed last is evicted last."""

    def __init__(self, num_blocks: int = 100) -> None:
        self.num_blocks = num_blocks
        self.kept: dict[bytes, None] = {}
        self.used: set[bytes] = set()

    def num_free_blocks(self) -> int:
        return self.num_blocks - len(self.used)

    def holds(self, entries: Any) -> list[bool]:
        return [entry in self.kept for entry in entries]

    def resident(self, hashes: Any, limit: int | None = None) -> Resident:
        hashes = hashes[:limit]
        num = next((i for i, name in enumerate(hashes) if name not in self.kept), len(hashes))
        return Resident(num, sum(name not in self.used for name in hashes[:num]))

    def num_evicted_before(self, hashes: Any, limit: int) -> int | None:
        if any(name not in self.kept for name in hashes):
            return None
        unused = [name for name in self.kept if name not in self.used]
        num_before = next((at for at, name in enumerate(unused) if name in set(hashes)), len(unused))
        return min(self.num_free_blocks() - len(unused) + num_before, limit)

    def put(self, hashes: Any) -> None:
        for name in reversed(hashes):
            self.kept.pop(name, None)
            self.kept[name] = None
        while len(self.kept) > self.num_blocks:
            del self.kept[next(name for name in self.kept if name not in self.used)]

    def carry_out(self, move: Copy | Refresh) -> None:
        if isinstance(move, Copy):
            assert self.resident(move.entries[: move.start]).num_blocks == move.start
            wanted = move.entries[move.start : move.start + len(move.sources)]
            assert [source.key for source in move.sources] == [block_key(entry) for entry in wanted]
            assert all(source.ready == SHAPE.num_layers for source in move.sources)
            self.put(move.entries[: move.start + len(move.sources)])
        else:
            assert self.resident(move.entries[: move.num_blocks]).num_blocks == move.num_blocks
            self.put(move.entries[: move.num_blocks])


class Bench:
    def __init__(self) -> None:
        self.shelf, self.cache = Shelf(), Cache()
        self.are_waiting = False  # requests, for host memory
        self.promotions = Promotions(
            self.cache, self.shelf, ONE_GROUP, lambda: BYTES_PER_S, are_waiting=lambda: self.are_waiting
        )
        self.reports: list[AdvisoryReport] = []
        self.now = 100.0
        self.is_late = False  # copies run beside the steps
        self.on_way: list[Copy] = []

    @property
    def states(self) -> list[str]:
        return [report.state for report in self.reports]

    def advise(self, name: str = "a", num_blocks: int = 8, salt: str | None = None, **fields: Any) -> None:
        advisory = Advisory(advisory_id=f"{name}!", session_id=name, **fields)
        hashes = keys_of(name, num_blocks) if num_blocks else []
        self.promotions.advise(advisory, hashes, salt, self.reports.append, self.now)

    def expect(self, name: str = "a", num_blocks: int = 8, *, on_disk: bool = False, **fields: Any) -> None:
        """An advisory of a session whose KV the tiers hold."""
        self.shelf.put(keys_of(name, num_blocks), on_disk=on_disk)
        self.advise(name, num_blocks, **fields)

    def settle(self, beside: Beside = IDLE, num: int = 20) -> int:
        return sum(self.advance(beside) for _ in range(num))

    def num_there(self, name: str, num_blocks: int) -> int:
        return self.cache.resident(entries_of(name, num_blocks)).num_blocks

    def advance(self, beside: Beside = IDLE) -> int:
        num_copied = 0
        for move in self.promotions.advance(beside, self.now):
            if not self.is_late:
                self.make(move)
            elif isinstance(move, Copy):
                self.on_way.append(move)
            num_copied += len(move.sources) if isinstance(move, Copy) else 0
        return num_copied

    def make(self, move: Copy | Refresh) -> None:
        self.cache.carry_out(move)
        if isinstance(move, Copy):
            self.promotions.copied(move)

    def land(self) -> None:
        """All copies that are on their way have come."""
        while self.on_way:
            self.make(self.on_way.pop())

    def arrive(self, name: str = "a", num_blocks: int = 9) -> None:
        move = self.promotions.arrived(f"{name}?", name, None, keys_of(name, num_blocks), self.now)
        if move is not None:
            self.cache.carry_out(move)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_waiting_requests_will_take_of_the_device_is_no_room_for_others(bench: Bench) -> None:
    bench.arrive("waits", 60)
    bench.expect("guessed", 60)
    bench.settle()
    assert bench.num_there("guessed", 60) == 35  # of 100, less the margin
    bench.promotions.started("waits?")
    bench.settle()
    assert bench.num_there("guessed", 60) == 60


def test_host_memory_keeps_kv_longest_for_those_who_are_likelier_to_come_than_not(bench: Bench) -> None:
    bench.expect("often", 200, probability=0.9)  # more than the device has room for
    bench.expect("seldom", 8, probability=0.5)
    issued_s = bench.now
    bench.settle()
    assert bench.shelf.expected == {("", "often"): issued_s, ("", "seldom"): None}
    bench.now += 600
    bench.promotions.staged()
    bench.settle()
    assert bench.shelf.expected == {("", "often"): None, ("", "seldom"): None}


@pytest.mark.parametrize("needs", ["disk", "host memory"])
def test_nothing_is_read_for_others_while_requests_wait_for_it(bench: Bench, needs: str) -> None:
    bench.shelf.put(keys_of("asked", 4), on_disk=True)
    if needs == "disk":
        asked = bench.shelf.stage("asked", keys_of("asked", 4))  # type: ignore[arg-type]
    bench.are_waiting = needs == "host memory"
    bench.expect("guessed", 8, on_disk=True)
    bench.settle()
    assert [stage for stage in bench.shelf.stages if stage.gives_way] == []
    if needs == "disk":
        asked.num_readings = 0
    bench.are_waiting = False
    bench.promotions.staged()
    bench.settle()
    assert [len(stage.blocks) for stage in bench.shelf.stages if stage.gives_way] == [8]


def test_who_types_for_long_without_asking_makes_room_for_who_began_later(bench: Bench) -> None:
    """The device has room for one of them: for who began first, until that has taken longer than people take."""
    bench.expect("first", 60, probability=0.7)
    bench.settle()
    bench.now += 5.0
    bench.expect("second", 60, probability=0.7)
    bench.settle()
    assert (bench.num_there("first", 60), bench.num_there("second", 60)) == (60, 35)
    bench.now += 70.0
    bench.expect("third", 60, probability=0.7)
    bench.settle(num=60)
    assert bench.num_there("third", 60) == 60


def test_a_copy_takes_nothing_from_who_is_expected_sooner_though_what_ended_lies_behind(bench: Bench) -> None:
    bench.expect("sooner", 60)
    bench.settle()
    assert bench.states == ["staging", "warm"]
    bench.now += 1.0
    bench.promotions.ended("another")
    bench.advance(BUSY_BESIDE)  # puts it behind all others, for which there is no time again soon
    bench.cache.put(entries_of("ended", 40))
    bench.promotions.ended("one more")
    bench.expect("later", 30)
    assert [bench.advance(BUSY_BESIDE) for _ in range(3)] == [0, 0, 0]
    wait_s = bench.promotions.wait_s(bench.now)
    assert wait_s == pytest.approx(60 / BLOCKS_PER_S)
    bench.now += wait_s
    assert bench.settle(BUSY_BESIDE) == 30
    assert (bench.num_there("sooner", 60), bench.num_there("later", 30)) == (60, 30)


def test_what_a_waiting_request_has_is_not_pushed_out_by_what_is_made_ready_for_others(bench: Bench) -> None:
    bench.expect("a", 40)
    bench.settle()
    for name in "bcd":
        bench.expect(name, 40)
    bench.arrive("a", 60)
    for is_waiting in (True, False):
        for number in range(40):
            bench.promotions.ended(f"another {number}")
            bench.now += 1.0
            bench.advance(BUSY)
        # Once it runs, its blocks are the engine's to hold, or let go.
        assert (bench.num_there("a", 40) == 40) is is_waiting
        bench.promotions.started("a?")
        bench.cache.put(entries_of("a", 40))


def test_a_session_that_is_forgotten_is_unknown_under_every_salt_of_its_tenant(bench: Bench) -> None:
    bench.promotions.memory.keep(("a", None), keys_of("a", 2))
    bench.promotions.memory.keep(("a", "adapter"), keys_of("a", 2))
    bench.promotions.memory.keep(("a", "salt"), keys_of("a", 2), "tenant")
    bench.promotions.memory.keep(("b", None), keys_of("b", 2))
    bench.promotions.memory.forget_session("a")
    assert ("a", None) not in bench.promotions.memory and ("a", "adapter") not in bench.promotions.memory
    assert ("b", None) in bench.promotions.memory and ("a", "salt") in bench.promotions.memory


@pytest.mark.parametrize(
    "end, outcome", [("cancel", "cancelled"), ("expire", "wasted"), ("go on otherwise", "wasted")]
)
def test_one_that_ends_while_it_is_read_for_is_told_of_with_its_last_byte(
    bench: Bench, end: str, outcome: str
) -> None:
    bench.shelf.ends_reads_late = True
    bench.expect(on_disk=True)
    bench.advance()
    bench.now += 2.0
    if end == "go on otherwise":
        bench.promotions.arrived("a?", "a", None, keys_of("b", 8), bench.now)
    else:
        bench.promotions.retract("a!", is_expired=end == "expire", now=bench.now)
    bench.now += 3.0
    bench.advise(num_blocks=2)
    assert bench.states == ["staging", "staging"], "the reading has been told to stop, and has not yet"
    bench.shelf.end_reads(num_bytes=700)
    bench.promotions.staged()
    last = bench.reports[-1]
    assert (last.state, last.disk_bytes) == (outcome, 700)
    assert last.lead_s == (None if end == "cancel" else 2.0)
    bench.promotions.staged()
    assert bench.states == ["staging", "staging", outcome]


def test_what_was_only_read_counts_as_moved(bench: Bench) -> None:
    bench.shelf.put(keys_of("a", 2), on_disk=True)
    bench.shelf.peers["home"] = 1e6
    bench.advise(num_blocks=3, kv_from="home", priority=1)
    bench.advance()
    for _ in range(3):
        bench.shelf.read_one()
    bench.promotions.retract("a!", is_expired=True, now=bench.now)
    last = bench.reports[-1]
    assert (last.state, last.host_bytes) == ("wasted", 0)
    assert (last.disk_bytes, last.peer_bytes) == (2 * SHAPE.block_bytes, SHAPE.block_bytes)


def test_an_urgent_session_is_copied_while_requests_run_and_nobody_else_s(bench: Bench) -> None:
    bench.promotions.took(CREDIT_S, bench.now)  # the others' share is used up
    bench.expect("usual", 4)
    bench.expect("urgent", 4, priority=-1, expected_arrival_s=600.0)
    assert [bench.advance(BUSY), bench.advance(BUSY), bench.advance(BUSY)] == [2, 2, 0]
    assert (bench.num_there("urgent", 4), bench.num_there("usual", 4)) == (4, 0)
    assert bench.advance(IDLE) == 4


def test_blocks_on_their_way_take_no_other_session_s_share_of_the_device(bench: Bench) -> None:
    """They are held meanwhile, but they are no running request's."""
    bench.expect("a", 60)
    bench.settle()
    bench.is_late = True
    bench.expect("b", 30)
    bench.advance()
    bench.cache.used = {name for name in bench.cache.kept if name in set(entries_of("b", 30))}
    bench.cache.used |= {b"on its way %d" % number for number in range(5)}
    bench.expect("c", 4)
    bench.is_late = False
    for _ in range(5):
        bench.advance()
    assert "host" not in bench.states


def test_an_advisory_that_ends_while_its_blocks_are_on_their_way_ends_as_any_other(bench: Bench) -> None:
    bench.is_late = True
    bench.expect("a", 4)
    bench.advance()
    bench.promotions.retract("a!", is_expired=False, now=bench.now)
    bench.land()
    bench.expect("a", 4)
    assert bench.advance() == 0
    assert bench.states == ["staging", "cancelled", "staging", "warm"] and not bench.shelf.stages


NAMES = st.sampled_from("abc")


class PromotionsMachine(RuleBasedStateMachine):
    """Advice, requests, a disk and a device that others use, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf, self.cache = Shelf(), Cache(16)
        self.now = 0.0
        self.ids: list[str] = []
        self.priorities: dict[str, int | None] = {}  # by session
        self.num_arrived = 0  # since the last step
        self.beside_s = 0.0  # of copies beside requests
        self.used_s = 0.0  # of copying what requests found on the device
        self.on_way: list[Copy] = []
        self.ends: Counter[str] = Counter()

    @initialize(layout=st.sampled_from([ONE_GROUP, WINDOW, TWO_GROUPS, SIZES, STATES]))
    def begins(self, layout: KvLayout) -> None:
        self.promotions = Promotions(self.cache, self.shelf, layout, lambda: BYTES_PER_S)
        self.promotions.took(CREDIT_S, self.now)  # in vain
        self.places = {name: places_of(layout, name, 9) for name in "abc"}
        self.entries = {
            name: layout.entries(keys_of(name, 9), list(places.values()))
            for name, places in self.places.items()
        }
        for places in self.places.values():
            self.shelf.put(list(places))

    def report(self, report: AdvisoryReport) -> None:
        assert self.ends[report.advisory_id] == 0, "it spoke after its end"
        assert report.state != "warm" or report.device_tokens == report.num_tokens
        self.ends[report.advisory_id] += report.state in ADVISORY_ENDS

    @rule(
        name=NAMES,
        num_blocks=st.integers(0, 9),
        wait_s=st.none() | st.floats(0, 20),
        priority=st.sampled_from([None, -1, 1]),
    )
    def advise(self, name: str, num_blocks: int, wait_s: float | None, priority: int | None) -> None:
        self.ids.append(f"{name}{len(self.ids)}")
        self.priorities[name] = priority
        when = {"expected_arrival_s": wait_s, "priority": priority}
        advisory = Advisory(advisory_id=self.ids[-1], session_id=name, **when)
        self.promotions.advise(advisory, keys_of(name, num_blocks), None, self.report, self.now)

    @rule(data=st.data(), is_expired=st.booleans())
    def retract(self, data: st.DataObject, is_expired: bool) -> None:
        advisory_id = data.draw(st.sampled_from([*self.ids, "nobody's"]))
        self.promotions.retract(advisory_id, is_expired=is_expired, now=self.now)

    @rule(name=NAMES, num_blocks=st.integers(0, 9), ends=st.booleans())
    def arrive(self, name: str, num_blocks: int, ends: bool) -> None:
        self.num_arrived += 1
        num_found = sum(self.cache.holds(self.entries[name])) if num_blocks else 0
        self.used_s += num_found * SHAPE.block_bytes / BYTES_PER_S
        move = self.promotions.arrived(f"{name}?", name, None, keys_of(name, num_blocks), self.now)
        if move is not None:
            self.cache.carry_out(move)
        if ends and num_blocks:
            self.promotions.memory.keep((name, None), keys_of(name, num_blocks))

    @rule(name=NAMES, at=st.integers(0, 17), tier=st.sampled_from(["host", "disk", "nowhere"]))
    def kv_lies_elsewhere(self, name: str, at: int, tier: str) -> None:
        for key in list(self.places[name])[at:]:
            if tier == "nowhere":
                self.shelf.on_disk.pop(key, None)
            else:
                self.shelf.put([key], on_disk=tier == "disk")

    @rule()
    def the_disk_delivers(self) -> None:
        self.shelf.read_one()
        self.promotions.staged()

    @rule()
    def requests_take_host_memory(self) -> None:
        self.shelf.revoke()
        self.promotions.staged()

    @rule(num_used=st.integers(0, 12))
    def others_use_the_device(self, num_used: int) -> None:
        self.cache.used = {b"used%d" % number for number in range(num_used)}
        for name in [name for name in self.cache.kept if name.startswith(b"used")]:
            del self.cache.kept[name]
        room = self.cache.num_blocks - num_used
        for name in list(self.cache.kept)[: max(len(self.cache.kept) - room, 0)]:
            del self.cache.kept[name]

    @rule(beside=st.sampled_from([IDLE, BUSY, BUSY_BESIDE]), pause_s=st.floats(0, 5), is_late=st.booleans())
    def advance(self, beside: Beside, pause_s: float, is_late: bool) -> None:
        self.now += pause_s
        num_copied = self.num_arrived = 0
        for move in self.promotions.advance(beside, self.now):
            if not (is_late and isinstance(move, Copy)):
                self.cache.carry_out(move)
            if isinstance(move, Copy):
                assert move.advisory_id not in [copy.advisory_id for copy in self.on_way]
                if is_late:
                    self.on_way.append(move)
                else:
                    self.promotions.copied(move)
                num_copied += len(move.sources)
                # Of sessions that are not urgent, little is copied in the engine thread's time.
                name = next(name for name, entries in self.entries.items() if move.entries[0] in entries)
                if beside is BUSY and self.priorities[name] != -1:
                    self.beside_s += len(move.sources) * SHAPE.block_bytes / BYTES_PER_S
            assert len(self.cache.kept) <= self.cache.num_blocks
        took_s = num_copied * SHAPE.block_bytes / BYTES_PER_S
        if beside.is_busy:
            self.now += took_s
            self.promotions.took(took_s, self.now)
        busy_s = LONGEST_TURN_S if beside is BUSY else BUSY_SLICE_S
        assert took_s <= (busy_s if beside.is_busy else IDLE_SLICE_S)
        assert self.beside_s <= SHARE * self.now + self.used_s + LONGEST_TURN_S

    @rule()
    def a_copy_has_come(self) -> None:
        if self.on_way:
            copy = self.on_way.pop()
            if len(copy.entries) <= self.cache.num_blocks - len(self.cache.used):
                self.cache.put(copy.entries[: copy.start + len(copy.sources)])  # those before it were held
            self.promotions.copied(copy)

    @invariant()
    def no_advisory_ends_twice(self) -> None:
        assert all(num <= 1 for num in self.ends.values())
        open_ids = [name for name in self.ids if not self.ends[name]]
        # Stages of those under way, and of requests that came since the last step.
        assert len(self.shelf.stages) <= len(open_ids) + self.num_arrived
        assert len({name[0] for name in open_ids}) == len(open_ids)

    def teardown(self) -> None:
        self.promotions.close()
        assert all(self.ends[name] == 1 for name in self.ids)
        assert self.shelf.stages == []


TestPromotionsMachine = PromotionsMachine.TestCase
TestPromotionsMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_follower_that_raises_keeps_no_other_advisory_from_ending_and_no_memory_held(bench: Bench) -> None:
    for name in "abc":
        bench.shelf.put(keys_of(name, 8))

    def raises(report: AdvisoryReport) -> None:
        raise RuntimeError("the event loop is gone")

    for name, follower in (("a", bench.reports.append), ("b", raises), ("c", bench.reports.append)):
        advisory = Advisory(advisory_id=f"{name}!", session_id=name)
        bench.promotions.advise(advisory, keys_of(name, 8), None, follower, bench.now)
    bench.advance()
    bench.promotions.close()
    ended = [report.session_id for report in bench.reports if report.state in ADVISORY_ENDS]
    assert ended == ["a", "c"]
    assert bench.shelf.stages == []
