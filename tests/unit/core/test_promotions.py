"""What an advisory brings to the device, what it costs, and how it ends: once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine_bridge.core.kv.cache_moves import Copy, Refresh
from engine_bridge.core.kv.eviction_order import BLOCKS_PER_S, Resident
from engine_bridge.core.kv.promotions import (
    BUSY_SLICE_S,
    HOSTED_SHARE,
    IDLE_SLICE_S,
    LOOK_EVERY_S,
    PIECE_SHARE,
    Beside,
    Promotions,
)
from engine_bridge.policy.kv.copy_share import CREDIT_S, LONGEST_TURN_S, SHARE
from engine_bridge.protocol.node import ADVISORY_ENDS, Advisory, AdvisoryReport

from .shelf import SHAPE, Shelf, keys_of

IDLE = Beside(is_busy=False, can_copy=True, overlaps=False)
BUSY = Beside(is_busy=True, can_copy=True, overlaps=False)
BUSY_BESIDE = Beside(is_busy=True, can_copy=True, overlaps=True)
BLOCK_TOKENS = 4
# Copies in a slice of an idle engine: 5.
BYTES_PER_S = 5 * SHAPE.block_bytes / IDLE_SLICE_S


class Cache:
    """A device's prefix cache: what was copied or refreshed last is evicted last."""

    def __init__(self, num_blocks: int = 100) -> None:
        self.num_blocks = num_blocks
        self.kept: dict[bytes, None] = {}
        self.used: set[bytes] = set()

    def num_free_blocks(self) -> int:
        return self.num_blocks - len(self.used)

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
            assert self.resident(move.hashes[: move.start]).num_blocks == move.start
            wanted = move.hashes[move.start : move.start + len(move.sources)]
            assert [source.key for source in move.sources] == list(wanted)
            assert all(source.ready == SHAPE.num_layers for source in move.sources)
            self.put(move.hashes[: move.start + len(move.sources)])
        else:
            assert self.resident(move.hashes[: move.num_blocks]).num_blocks == move.num_blocks
            self.put(move.hashes[: move.num_blocks])


class Bench:
    def __init__(self) -> None:
        self.shelf, self.cache = Shelf(), Cache()
        self.promotions = Promotions(self.cache, self.shelf, BLOCK_TOKENS, lambda: BYTES_PER_S)
        self.reports: list[AdvisoryReport] = []
        self.now = 100.0

    @property
    def states(self) -> list[str]:
        return [report.state for report in self.reports]

    def advise(self, name: str = "a", num_blocks: int = 8, salt: str | None = None, **fields: Any) -> None:
        advisory = Advisory(advisory_id=f"{name}!", session_id=name, **fields)
        hashes = keys_of(name, num_blocks) if num_blocks else []
        self.promotions.advise(advisory, hashes, salt, self.reports.append, self.now)

    def advance(self, beside: Beside = IDLE) -> int:
        num_copied = 0
        for move in self.promotions.advance(beside, self.now):
            self.cache.carry_out(move)
            num_copied += len(move.sources) if isinstance(move, Copy) else 0
        return num_copied

    def arrive(self, name: str = "a", num_blocks: int = 9) -> None:
        move = self.promotions.arrived(f"{name}?", name, None, keys_of(name, num_blocks), self.now)
        if move is not None:
            self.cache.carry_out(move)


def test_a_session_comes_up_slice_by_slice_and_its_request_is_a_hit() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 8))
    bench.advise()
    assert bench.promotions.has_work(bench.now)
    assert [bench.advance(), bench.advance(), bench.advance()] == [5, 3, 0]
    assert bench.shelf.stages == []
    bench.now += 2.0
    bench.arrive()
    assert bench.states == ["staging", "warm", "hit"]
    assert bench.reports[-1].host_bytes == 8 * SHAPE.block_bytes
    assert bench.reports[-1].lead_s == 2.0
    assert not bench.promotions.has_work(bench.now)


def test_nothing_wakes_the_engine_for_an_advisory_that_is_over() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 8))
    bench.advise(expected_arrival_s=50.0)
    bench.advance()
    assert bench.promotions.wait_s(bench.now) is not None
    bench.promotions.retract("a!", is_expired=False, now=bench.now)
    bench.now += 100.0
    assert not bench.promotions.has_work(bench.now)
    assert bench.promotions.wait_s(bench.now) is None
    assert bench.promotions.is_idle


def test_what_was_read_for_a_request_that_came_is_let_go_though_nothing_is_expected_any_more() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 8), on_disk=True)
    bench.advise()
    bench.advance()
    bench.arrive()
    assert bench.shelf.stages and not bench.promotions.is_idle
    bench.advance()
    assert bench.shelf.stages == [] and bench.promotions.is_idle


def test_what_a_request_finds_of_its_kv_is_what_goes_last_while_it_waits_for_the_rest() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 8))
    bench.advise()
    bench.advance()
    bench.cache.put([b"other%d" % number for number in range(90)])
    bench.arrive()
    bench.cache.put([b"another%d" % number for number in range(90)])
    assert bench.states[-1] == "late"
    assert bench.cache.resident(keys_of("a", 8)).num_blocks == 5


def test_who_has_typed_longest_is_pushed_out_last_whatever_was_copied_or_has_ended_since() -> None:
    bench = Bench()
    for name in ("first", "second", "third"):
        bench.shelf.put(keys_of(name, 30))
        bench.advise(name, 30)
        bench.now += 1.0
        for _ in range(12):
            bench.advance()
    assert bench.states == ["staging", "warm"] * 3
    bench.cache.put(keys_of("ended", 10))
    bench.promotions.ended("another")
    bench.now += 1.0
    bench.advance(BUSY)
    for num_new, num_left in ((10, (30, 30, 30)), (20, (30, 30, 10)), (40, (30, 0, 0))):
        bench.cache.put([b"new%d of %d" % (number, num_new) for number in range(num_new)])
        left = tuple(
            bench.cache.resident(keys_of(name, 30)).num_blocks for name in ("first", "second", "third")
        )
        assert left == num_left, f"after {num_new} more blocks"


def test_a_copy_takes_nothing_from_who_is_expected_sooner_though_what_ended_lies_behind() -> None:
    bench = Bench()
    for name, num_blocks in (("sooner", 60), ("later", 30)):
        bench.shelf.put(keys_of(name, num_blocks))
    bench.advise("sooner", 60)
    for _ in range(20):
        bench.advance()
    assert bench.states == ["staging", "warm"]
    bench.now += 1.0
    bench.promotions.ended("another")
    bench.advance(BUSY_BESIDE)  # puts it behind all others, for which there is no time again soon
    bench.cache.put(keys_of("ended", 40))
    bench.promotions.ended("one more")
    bench.advise("later", 30)
    assert [bench.advance(BUSY_BESIDE) for _ in range(3)] == [0, 0, 0]
    wait_s = bench.promotions.wait_s(bench.now)
    assert wait_s == pytest.approx(60 / BLOCKS_PER_S)
    bench.now += wait_s
    assert sum(bench.advance(BUSY_BESIDE) for _ in range(20)) == 30
    assert bench.cache.resident(keys_of("sooner", 60)).num_blocks == 60
    assert bench.cache.resident(keys_of("later", 30)).num_blocks == 30


def test_while_nothing_runs_the_order_is_put_right_at_once() -> None:
    bench = Bench()
    for name in ("sooner", "later"):
        bench.shelf.put(keys_of(name, 40))
    bench.advise("sooner", 40)
    for _ in range(14):
        bench.advance()
    bench.promotions.ended("another")
    bench.advance()
    bench.cache.put(keys_of("ended", 60))
    bench.promotions.ended("one more")
    bench.advise("later", 40)
    assert sum(bench.advance(IDLE) for _ in range(10)) == 40
    assert bench.cache.resident(keys_of("sooner", 40)).num_blocks == 40


def test_what_a_request_pushed_out_comes_back_as_soon_as_it_has_ended() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 30))
    bench.advise("a", 30)
    for _ in range(7):
        bench.advance()
    bench.now += 1.0
    bench.advance(BUSY_BESIDE)
    assert bench.states == ["staging", "warm"]
    bench.cache.used = {b"big%d" % number for number in range(90)}
    for name in list(bench.cache.kept)[:20]:
        del bench.cache.kept[name]
    bench.promotions.started("big")
    bench.now += 0.01
    assert bench.advance(BUSY_BESIDE) == 0
    assert bench.cache.resident(keys_of("a", 30)).num_blocks == 10
    bench.cache.used = set()
    bench.promotions.ended("big")
    bench.now += 0.01
    assert sum(bench.advance(BUSY_BESIDE) for _ in range(12)) == 20


def test_what_a_waiting_request_has_is_not_pushed_out_by_what_is_made_ready_for_others() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 40))
    bench.advise("a", 40)
    for _ in range(20):
        bench.advance()
    for name in ("b", "c", "d"):
        bench.shelf.put(keys_of(name, 40))
        bench.advise(name, 40)
    bench.arrive("a", 60)
    for number in range(40):
        bench.promotions.ended(f"another {number}")
        bench.now += 1.0
        bench.advance(BUSY)
    assert bench.cache.resident(keys_of("a", 40)).num_blocks == 40
    bench.promotions.started("a?")
    bench.cache.put(keys_of("a", 40))
    for number in range(40):
        bench.promotions.ended(f"another {number}")
        bench.now += 1.0
        bench.advance(BUSY)
    assert bench.cache.resident(keys_of("a", 40)).num_blocks < 40, "it is the engine's to hold, or let go"


def test_what_is_ready_is_put_in_order_no_more_often_than_it_takes_little_time() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 8))
    bench.advise()
    bench.advance()
    bench.advance()
    began_s, num_moved = bench.now, 0
    while bench.now < began_s + 1.0:
        bench.promotions.ended("another")
        moves = list(bench.promotions.advance(BUSY, bench.now))
        num_moved += sum(move.num_blocks for move in moves if isinstance(move, Refresh))
        bench.now += 1e-4
    assert 0.9 * BLOCKS_PER_S < num_moved <= BLOCKS_PER_S + 8


def test_an_advisory_waits_for_the_disk_without_asking_again_and_again() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 2), on_disk=True)
    bench.advise(num_blocks=2)
    assert bench.advance() == 0
    assert not bench.promotions.has_work(bench.now)
    bench.shelf.read_one()
    bench.promotions.staged()
    assert bench.advance() == 1
    bench.shelf.read_one()
    bench.promotions.staged()
    assert bench.advance() == 1
    assert bench.states == ["staging", "warm"]
    assert bench.reports[-1].disk_bytes == 2 * SHAPE.block_bytes


def test_a_request_that_comes_before_its_kv_is_late_and_its_reads_go_on_until_it_has_staged() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 8), on_disk=True)
    bench.advise()
    bench.advance()
    bench.arrive()
    assert bench.states == ["staging", "late"]
    assert bench.reports[-1].late_s is not None and bench.reports[-1].late_s > 0
    assert len(bench.shelf.stages) == 1
    bench.advance(BUSY)
    assert bench.shelf.stages == []


def test_a_session_that_goes_on_as_another_conversation_was_a_waste() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 8))
    bench.advise()
    bench.advance()
    bench.promotions.arrived("a?", "a", None, keys_of("b", 8), bench.now)
    assert bench.states[-1] == "wasted"


def test_another_salt_is_another_session() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 2))
    bench.advise(num_blocks=2, salt="tenant")
    bench.arrive()
    assert bench.states == ["staging"]
    bench.promotions.memory.keep(("a", "tenant"), keys_of("a", 2))
    assert ("a", "tenant") in bench.promotions.memory and ("a", None) not in bench.promotions.memory


def test_a_session_that_is_forgotten_is_unknown_under_every_salt() -> None:
    bench = Bench()
    bench.promotions.memory.keep(("a", None), keys_of("a", 2))
    bench.promotions.memory.keep(("a", "tenant"), keys_of("a", 2))
    bench.promotions.memory.keep(("b", None), keys_of("b", 2))
    bench.promotions.memory.forget_session("a")
    assert ("a", None) not in bench.promotions.memory and ("a", "tenant") not in bench.promotions.memory
    assert ("b", None) in bench.promotions.memory


def test_what_a_session_left_is_what_it_is_expected_to_begin_with() -> None:
    bench = Bench()
    bench.advise(num_blocks=0)
    assert bench.states == ["unknown"]
    bench.shelf.put(keys_of("a", 3))
    bench.promotions.memory.keep(("a", None), keys_of("a", 3))
    bench.advise(num_blocks=0)
    assert bench.advance() == 3


def test_what_no_tier_holds_is_unknown() -> None:
    bench = Bench()
    bench.advise()
    bench.advance()
    assert bench.states == ["staging", "unknown"]
    assert bench.shelf.stages == []


def test_a_retracted_one_is_cancelled_and_an_expired_one_counts_what_was_moved_for_nothing() -> None:
    bench = Bench()
    for name in ("moved", "not yet", "taken back"):
        bench.shelf.put(keys_of(name, 2))
    bench.advise("moved", 2)
    bench.advance()
    bench.advise("not yet", 2)
    bench.advise("taken back", 2)
    for name in ("moved", "not yet"):
        bench.promotions.retract(f"{name}!", is_expired=True, now=bench.now)
    bench.promotions.retract("taken back!", is_expired=False, now=bench.now)
    bench.promotions.retract("taken back!", is_expired=False, now=bench.now)
    assert bench.states == ["staging", "warm", "staging", "staging", "wasted", "expired", "cancelled"]
    assert bench.shelf.stages == []
    assert bench.shelf.expected["", "taken back"] is None


def test_a_newer_advisory_takes_the_place_of_the_older() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 2))
    bench.advise(num_blocks=2)
    bench.advise(num_blocks=2)
    assert bench.states == ["staging", "cancelled", "staging"]
    assert bench.advance() == 2


def test_beside_requests_copies_take_their_share_of_the_engine_s_time() -> None:
    bench = Bench()
    bench.promotions.took(CREDIT_S, bench.now)  # in vain
    bench.shelf.put(keys_of("a", 8), on_disk=True)
    bench.advise()
    assert bench.advance(BUSY) == 0
    assert len(bench.shelf.stages) == 1  # but the disk begins at once
    for _ in range(8):
        bench.shelf.read_one()
    bench.promotions.staged()
    began_s, copied = bench.now, []
    while sum(copied) < 8:
        bench.now += 0.01  # a step
        copied.append(bench.advance(BUSY))
        took_s = copied[-1] * SHAPE.block_bytes / BYTES_PER_S
        bench.now += took_s
        bench.promotions.took(took_s, bench.now)
    assert max(copied) <= LONGEST_TURN_S * BYTES_PER_S / SHAPE.block_bytes
    busy_s = bench.now - began_s
    assert 0.5 * SHARE * busy_s < 8 * SHAPE.block_bytes / BYTES_PER_S <= SHARE * busy_s + LONGEST_TURN_S
    assert bench.states == ["staging", "warm"]


def test_what_comes_to_use_is_paid_back() -> None:
    bench = Bench()
    bench.promotions.took(CREDIT_S, bench.now)  # in vain
    bench.promotions.advance(BUSY, bench.now)
    bench.now += 1.2 * LONGEST_TURN_S / SHARE  # enough for one of them
    bench.shelf.put([*keys_of("a", 8), *keys_of("b", 8)])
    num_copied = {"used": 0, "not used": 0}
    for name, outcome in (("a", "used"), ("b", "not used")):
        bench.advise(name)
        for _ in range(20):
            bench.now += 0.004
            num = bench.advance(BUSY)
            num_copied[outcome] += num
            bench.now += num * SHAPE.block_bytes / BYTES_PER_S
            bench.promotions.took(num * SHAPE.block_bytes / BYTES_PER_S, bench.now)
        if outcome == "used":
            bench.arrive(name)
    assert bench.states[-3:] == ["hit", "staging", "warm"], (
        "what the first one took was there again for the second"
    )
    assert num_copied == {"used": 8, "not used": 8}
    bench.promotions.retract("b!", is_expired=True, now=bench.now)
    bench.shelf.put(keys_of("c", 40))
    bench.advise("c", num_blocks=40)
    num_copied_after_waste = 0
    for _ in range(20):
        bench.now += 0.004
        num = bench.advance(BUSY)
        num_copied_after_waste += num
        bench.promotions.took(num * SHAPE.block_bytes / BYTES_PER_S, bench.now)
    assert num_copied_after_waste < 10  # of 40


def test_a_long_session_passes_through_a_part_of_host_memory() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 40), on_disk=True)
    bench.advise(num_blocks=40)
    most = 0
    while bench.states[-1] != "warm":
        bench.advance()
        most = max(most, sum(len(stage.blocks) for stage in bench.shelf.stages))
        bench.shelf.read_one()
        bench.promotions.staged()
    assert 0 < most <= PIECE_SHARE * bench.shelf.num_host_blocks
    assert bench.reports[-1].num_tokens == 40 * BLOCK_TOKENS
    assert bench.reports[-1].disk_bytes == bench.reports[-1].host_bytes == 40 * SHAPE.block_bytes


def test_what_gave_way_to_a_request_is_staged_again() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 8), on_disk=True)
    bench.advise()
    bench.advance()
    bench.shelf.revoke()
    bench.promotions.staged()
    bench.advance()
    assert [len(stage.blocks) for stage in bench.shelf.stages] == [8]
    for _ in range(8):
        bench.shelf.read_one()
    bench.promotions.staged()
    assert [bench.advance(), bench.advance()] == [5, 3]
    assert bench.states == ["staging", "warm"]


def test_what_has_no_room_on_the_device_fills_no_more_than_its_part_of_host_memory() -> None:
    bench = Bench()
    names = "abcdefgh"
    for name in names:
        bench.shelf.put(keys_of(name, 8))
        bench.advise(name, 8, priority=1)
    for _ in range(20):
        bench.advance()
    num_hosted = 8 * sum(report.state == "host" for report in bench.reports)
    assert num_hosted == HOSTED_SHARE * bench.shelf.num_host_blocks


def test_half_of_host_memory_is_read_ahead_however_long_the_longest_is() -> None:
    bench = Bench()
    room = int(bench.shelf.num_host_blocks * HOSTED_SHARE)
    for name, num_blocks in (("long", 2 * bench.shelf.num_host_blocks), ("short", 8)):
        bench.shelf.put(keys_of(name, num_blocks))
        bench.advise(name, num_blocks, priority=1)
    for _ in range(20):
        bench.advance()
    assert sum(guess.num_hosted for guess in bench.promotions._guesses.values()) == room
    assert not bench.shelf.stages


def test_reading_ahead_goes_on_where_it_ended_once_there_is_room() -> None:
    bench = Bench()
    for name in "abc":
        bench.shelf.put(keys_of(name, 12))
        bench.advise(name, 12, priority=1)
    for _ in range(20):
        bench.advance()
    assert [guess.num_hosted for guess in bench.promotions._guesses.values()] == [12, 12, 8]
    bench.promotions.retract("a!", is_expired=False, now=bench.now)
    bench.promotions.staged()
    staged: list[bytes] = []
    stage_of = bench.shelf.stage
    bench.shelf.stage = lambda group, keys, **more: (staged.extend(keys), stage_of(group, keys, **more))[1]  # type: ignore[method-assign]
    for _ in range(20):
        bench.advance()
    assert staged == keys_of("c", 12)[8:]


def test_of_what_the_device_has_host_memory_need_keep_nothing_until_it_is_lost() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 4))
    bench.advise("a", 4)
    bench.advance()
    assert bench.states[-1] == "warm" and bench.shelf.expected["", "a"] is None
    bench.cache.kept.clear()
    bench.now += 2 * LOOK_EVERY_S
    bench.promotions.ended("somebody")
    bench.advance(BUSY_BESIDE)
    assert bench.shelf.expected["", "a"] is not None


def test_what_was_only_read_counts_as_moved() -> None:
    bench = Bench()
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


@pytest.mark.parametrize(
    "end, outcome", [("cancel", "cancelled"), ("expire", "wasted"), ("go on otherwise", "wasted")]
)
def test_an_advisory_that_ends_while_it_is_read_for_is_told_of_with_its_last_byte(
    end: str, outcome: str
) -> None:
    bench = Bench()
    bench.shelf.ends_reads_late = True
    bench.shelf.put(keys_of("a", 8), on_disk=True)
    bench.advise()
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


def test_what_is_read_on_for_a_request_is_not_its_advisory_s() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 8), on_disk=True)
    bench.advise()
    bench.advance()
    bench.shelf.read_one()
    bench.arrive()
    bench.shelf.read_one()
    bench.promotions.staged()
    assert (bench.states[-1], bench.reports[-1].disk_bytes) == ("late", SHAPE.block_bytes)


def test_what_was_read_before_it_gave_way_counts() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 8), on_disk=True)
    bench.advise()
    bench.advance()
    bench.shelf.read_one()
    bench.shelf.revoke()
    bench.shelf.put(keys_of("a", 8), on_disk=True)
    bench.promotions.staged()
    bench.advance()
    bench.shelf.read_one()
    bench.promotions.retract("a!", is_expired=False, now=bench.now)
    assert bench.reports[-1].disk_bytes == 2 * SHAPE.block_bytes


def test_a_busy_engine_copies_a_smaller_slice_where_copies_run_beside_it() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 8))
    bench.advise()
    assert bench.advance(BUSY_BESIDE) == int(BUSY_SLICE_S / IDLE_SLICE_S * 5)


def test_all_sessions_together_get_one_slice() -> None:
    bench = Bench()
    for name in "abc":
        bench.shelf.put(keys_of(name, 3))
        bench.advise(name, 3)
    assert [bench.advance(), bench.advance()] == [5, 4]
    assert bench.states.count("warm") == 3


def test_what_another_node_has_is_fetched_at_once_and_comes_up_like_what_was_on_disk() -> None:
    bench = Bench()
    bench.shelf.peers["home"] = 1e6
    bench.advise(num_blocks=2, kv_from="home", expected_arrival_s=50.0)
    bench.advance()
    assert [stage.origins for stage in bench.shelf.stages] == [["peer", "peer"]]
    bench.shelf.read_one()
    bench.shelf.read_one()
    bench.now += 49.0
    bench.promotions.staged()
    assert bench.advance() == 2
    assert bench.states[-1] == "warm"


def test_an_arrival_time_is_waited_for_in_host_memory() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 4))
    bench.advise(num_blocks=4, expected_arrival_s=60.0)
    assert bench.advance() == 0
    assert bench.states[-1] == "host"
    wait_s = bench.promotions.wait_s(bench.now)
    assert wait_s is not None and 0 < wait_s < 60
    bench.now += wait_s
    assert bench.promotions.has_work(bench.now)
    assert bench.advance() == 4
    assert bench.states[-1] == "warm"


def test_what_was_promoted_is_looked_after_once_requests_have_run() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 4))
    bench.advise(num_blocks=4)
    bench.advance()
    bench.cache.kept.clear()
    assert bench.advance(BUSY) == 0
    bench.now += LOOK_EVERY_S
    assert bench.advance(IDLE) == 4


def test_blocks_that_requests_use_are_nobody_s_to_fill() -> None:
    bench = Bench()
    bench.cache.num_blocks, bench.cache.used = 10, {b"used%d" % n for n in range(9)}
    bench.shelf.put(keys_of("a", 4))
    bench.advise(num_blocks=4)
    assert bench.advance() <= 1


def test_a_carrier_that_fails_can_give_all_up_and_begin_again() -> None:
    bench = Bench()
    bench.shelf.put(keys_of("a", 8))
    bench.advise()
    next(bench.promotions.advance(IDLE, bench.now))
    bench.promotions.give_up()
    assert bench.states == ["staging", "cancelled"]
    assert bench.shelf.stages == []
    bench.advise()
    assert bench.advance() == 5


def test_an_urgent_session_is_copied_while_requests_run_and_nobody_else_s() -> None:
    bench = Bench()
    bench.promotions.took(CREDIT_S, bench.now)  # the others' share is used up
    for name in ("usual", "urgent"):
        bench.shelf.put(keys_of(name, 4))
    bench.advise("usual", 4)
    bench.advise("urgent", 4, priority=-1, expected_arrival_s=600.0)
    assert [bench.advance(BUSY), bench.advance(BUSY), bench.advance(BUSY)] == [2, 2, 0]
    assert bench.cache.resident(keys_of("urgent", 4)).num_blocks == 4
    assert bench.cache.resident(keys_of("usual", 4)).num_blocks == 0
    assert bench.advance(IDLE) == 4


def test_an_urgent_session_takes_the_room_that_promoted_ones_have() -> None:
    bench = Bench()
    bench.cache.num_blocks = 10
    for name in ("usual", "urgent"):
        bench.shelf.put(keys_of(name, 9))
    bench.advise("usual", 9)
    bench.advance()
    bench.advise("urgent", 9, priority=-1)
    for _ in range(3):
        bench.advance()
    assert bench.cache.resident(keys_of("urgent", 9)).num_blocks == 9
    for _ in range(5):
        bench.now += LOOK_EVERY_S
        bench.advance()
    assert bench.cache.resident(keys_of("urgent", 9)).num_blocks == 9


def test_prefetches_of_others_push_out_what_nobody_expects_before_an_urgent_session() -> None:
    bench = Bench()
    bench.cache.num_blocks = 10
    for name in ("urgent", "usual"):
        bench.shelf.put(keys_of(name, 4))
    bench.advise("urgent", 4, priority=-1)
    bench.advance()
    bench.cache.put(keys_of("ended", 6))  # later than the urgent one was promoted, so it would stay longer
    bench.advise("usual", 4)
    bench.advance()
    assert bench.cache.resident(keys_of("urgent", 4)).num_blocks == 4
    assert bench.cache.resident(keys_of("usual", 4)).num_blocks == 4


NAMES = st.sampled_from("abc")


class PromotionsMachine(RuleBasedStateMachine):
    """Advice, requests, a disk and a device that others use, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf, self.cache = Shelf(), Cache(16)
        for name in "abc":
            self.shelf.put(keys_of(name, 9))
        self.promotions = Promotions(self.cache, self.shelf, BLOCK_TOKENS, lambda: BYTES_PER_S)
        self.now = 0.0
        self.ids: list[str] = []
        self.priorities: dict[str, int | None] = {}  # by session
        self.num_arrived = 0  # since the last step
        self.beside_s = 0.0  # of copies beside requests
        self.used_s = 0.0  # of copying what requests found on the device
        self.promotions.took(CREDIT_S, self.now)  # in vain
        self.ends: Counter[str] = Counter()

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
        advisory = Advisory(
            advisory_id=self.ids[-1], session_id=name, expected_arrival_s=wait_s, priority=priority
        )
        self.promotions.advise(advisory, keys_of(name, num_blocks), None, self.report, self.now)

    @rule(data=st.data(), is_expired=st.booleans())
    def retract(self, data: st.DataObject, is_expired: bool) -> None:
        advisory_id = data.draw(st.sampled_from([*self.ids, "nobody's"]))
        self.promotions.retract(advisory_id, is_expired=is_expired, now=self.now)

    @rule(name=NAMES, num_blocks=st.integers(0, 9), ends=st.booleans())
    def arrive(self, name: str, num_blocks: int, ends: bool) -> None:
        self.num_arrived += 1
        num_found = self.cache.resident(keys_of(name, num_blocks)).num_blocks
        self.used_s += num_found * SHAPE.block_bytes / BYTES_PER_S
        move = self.promotions.arrived(f"{name}?", name, None, keys_of(name, num_blocks), self.now)
        if move is not None:
            self.cache.carry_out(move)
        if ends and num_blocks:
            self.promotions.memory.keep((name, None), keys_of(name, num_blocks))

    @rule(name=NAMES, at=st.integers(0, 8), tier=st.sampled_from(["host", "disk", "nowhere"]))
    def kv_lies_elsewhere(self, name: str, at: int, tier: str) -> None:
        for key in keys_of(name, 9)[at:]:
            if tier == "nowhere":
                self.shelf.on_disk.pop(key, None)  # type: ignore[call-overload]
            else:
                self.shelf.put([key], on_disk=tier == "disk")

    @rule()
    def the_disk_delivers(self) -> None:
        self.shelf.read_one()
        self.promotions.staged()

    @rule(num_used=st.integers(0, 12))
    def others_use_the_device(self, num_used: int) -> None:
        self.cache.used = {b"used%d" % number for number in range(num_used)}
        for name in [name for name in self.cache.kept if name.startswith(b"used")]:
            del self.cache.kept[name]
        room = self.cache.num_blocks - num_used
        for name in list(self.cache.kept)[: max(len(self.cache.kept) - room, 0)]:
            del self.cache.kept[name]

    @rule(beside=st.sampled_from([IDLE, BUSY, BUSY_BESIDE]), pause_s=st.floats(0, 5))
    def advance(self, beside: Beside, pause_s: float) -> None:
        self.now += pause_s
        num_copied = self.num_arrived = 0
        for move in self.promotions.advance(beside, self.now):
            self.cache.carry_out(move)
            if isinstance(move, Copy):
                num_copied += len(move.sources)
                # Of sessions that are not urgent, little is copied in the engine thread's time.
                if beside is BUSY and self.priorities[move.hashes[0][:1].decode()] != -1:
                    self.beside_s += len(move.sources) * SHAPE.block_bytes / BYTES_PER_S
            assert len(self.cache.kept) <= self.cache.num_blocks
        took_s = num_copied * SHAPE.block_bytes / BYTES_PER_S
        if beside.is_busy:
            self.now += took_s
            self.promotions.took(took_s, self.now)
        assert took_s <= (
            LONGEST_TURN_S if beside is BUSY else BUSY_SLICE_S if beside.is_busy else IDLE_SLICE_S
        )
        assert self.beside_s <= SHARE * self.now + self.used_s + LONGEST_TURN_S

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


def test_a_follower_that_raises_keeps_no_other_advisory_from_ending_and_no_memory_held() -> None:
    bench = Bench()
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
