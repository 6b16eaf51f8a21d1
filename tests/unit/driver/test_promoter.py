from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool

from engine_bridge.core.kv.asked import NewRequest
from engine_bridge.core.kv.kv_transfers import Restores
from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig
from engine_bridge.driver.kv.promoter import Promoter
from engine_bridge.driver.memory.block_copy import CpuCopier
from engine_bridge.policy.kv.kv_layout import one_group
from engine_bridge.protocol.node import Advisory
from kvtiers.keys import BlockShape
from tests.unit.core.shelf import LoadsAll
from tests.unit.kvtiers.stored import Stored

BLOCK_TOKENS, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 16, 32, 8
SHAPE = BlockShape(num_layers=2, layer_bytes=64)


class LateCopier(CpuCopier):
    """As a GPU: a copy reads its source when the device comes to it, long after the call."""

    overlaps = True

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.waiting: list[Callable[[], None]] = []
        self.has_failed = False

    def to_device(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self.waiting.append(lambda: super(LateCopier, self).to_device(layer, blocks, slots))

    def to_host(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self.waiting.append(lambda: super(LateCopier, self).to_host(layer, blocks, slots))

    def end_step(self, then: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        self.waiting.append((failed or then) if self.has_failed else then)

    def catch_up(self) -> None:
        waiting, self.waiting = self.waiting, []
        for act in waiting:
            act()


class Bench(Stored):
    """A device and a host tier, with a disk if there is a folder."""

    def __init__(self, folder: Path | None = None, num_host_blocks: int = NUM_HOST_BLOCKS) -> None:
        super().__init__(folder or Path(), SHAPE, num_host_blocks, disk_bytes=1 << 20 if folder else 0)
        self.pool = BlockPool(NUM_DEVICE_BLOCKS, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.tiers = KvTiers(TiersConfig(host_bytes=num_host_blocks * SHAPE.block_bytes), policy=LoadsAll())
        self.tiers.store = self.store
        memory = torch.zeros(SHAPE.num_layers, NUM_DEVICE_BLOCKS, SHAPE.layer_bytes, dtype=torch.uint8)
        self.device = list(memory)
        self.copier = LateCopier(self.device, self.store.pool.region)
        self.tiers.copier = self.copier
        self.now = 0.0
        self.tiers.layout = one_group(BLOCK_TOKENS)
        self.held = self.tiers.hold_in(self.pool)
        self.promoter = Promoter(self.pool, self.tiers, lambda: (0, 0), lambda: self.now)
        self.tiers.listener = self.promoter
        self.restores = self.tiers.restores = Restores(self.tiers, self.tiers.layout)

    def arrive(self) -> None:
        """Have the device make all copies, and the engine take over what has come."""
        self.copier.catch_up()
        self.held.advance()

    def close(self) -> None:
        self.restores.close()
        self.store.check_invariants()
        super().close()

    def expect(self, session: str, keys: Sequence[bytes]) -> None:
        left = SimpleNamespace(session_id=session, cache_salt=None, block_hashes=keys, sampling_params=None)
        self.promoter.remember(left)  # type: ignore[arg-type]  # all that it looks at
        self.promoter.advise(Advisory(advisory_id=session, session_id=session), (), None, lambda report: None)

    def announce(self, session: str, keys: Sequence[bytes]) -> None:
        """Have host memory hold these blocks, and a request of their session be announced."""
        self.save(session, keys)
        self.expect(session, keys)

    def advance(self) -> None:
        """Promote until there is nothing left to do before a copy comes."""
        while self.promoter.has_work():
            self.promoter.advance()

    def check_device(self, keys: Sequence[bytes]) -> None:
        """The blocks that the engine would take for these hold what they should, in each layer."""
        for key in keys:
            (block,) = self.pool.get_cached_block(key, [0])
            for number, layer in enumerate(self.device):
                assert bytes(layer[block.block_id].tolist()) == self.content(key, number)


def keys_of(name: str, num: int) -> list[bytes]:
    return [f"{name}-{at}".encode().ljust(32, b"-") for at in range(num)]


class Waiting(Bench):
    """A request that waits for its KV, which is on disk and larger than host memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.keys = keys_of("r", 2 * NUM_HOST_BLOCKS)
        for start in range(0, len(self.keys), 4):
            self.save("r", self.keys[start : start + 4])
            self.store.flush()
        self.store.drop_host()
        self.restores.enter(NewRequest("r", self.keys, session="r"))

    @property
    def num_on_device(self) -> int:
        found = (self.pool.get_cached_block(key, [0]) is not None for key in self.keys)
        return next((at for at, is_there in enumerate(found) if not is_there), len(self.keys))

    def match(self) -> int | None:
        """Blocks that the next step can load."""
        num_tokens, num_there = BLOCK_TOKENS * len(self.keys) + 2, BLOCK_TOKENS * self.num_on_device
        found = self.restores.match("r", num_there, num_tokens, is_resumed=False)
        return found // BLOCK_TOKENS if found is not None else None

    def until_it_starts(self, behind_each_step: Callable[[], None] = lambda: None) -> int:
        """Steps until the request can start; returns the blocks that its step loads."""
        for _ in range(100):
            num_loaded = self.match()
            self.promoter.advance()
            if num_loaded is not None:
                return num_loaded
            behind_each_step()
            self.store.wait_for_reads(10)
        raise AssertionError("it never starts")


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Waiting]:
    with closing(Waiting(tmp_path)) as waiting:
        yield waiting


def test_what_is_larger_than_host_memory_comes_to_the_device_in_pieces(waiting: Waiting) -> None:
    def copy() -> None:
        is_copying = bool(waiting.copier.waiting)
        assert not waiting.promoter.has_work(), "the copy tells when it has been made"
        waiting.arrive()
        assert waiting.promoter.has_work() is is_copying, "the engine is not to sleep then"

    num_loaded, num = waiting.until_it_starts(copy), waiting.num_on_device
    assert num + num_loaded == len(waiting.keys) and waiting.tiers.num_carried == num
    waiting.check_device(waiting.keys[:num])
    free = waiting.pool.free_block_queue.get_all_free_blocks()
    assert len(free) == NUM_DEVICE_BLOCKS - 1, "they are anybody's"
    cached = [waiting.pool.get_cached_block(key, [0]) for key in waiting.keys[:num]]
    order = [free.index(block) for blocks in cached for block in blocks]
    assert order[:4] == sorted(order[:4], reverse=True), "the beginning of a conversation goes last"


def test_a_piece_whose_place_a_step_has_taken_is_not_copied(waiting: Waiting) -> None:
    waiting.match()
    waiting.store.wait_for_reads(10)
    assert waiting.match() is None
    taken = waiting.pool.get_new_blocks(waiting.pool.get_num_free_blocks())
    waiting.promoter.advance()
    assert waiting.num_on_device == 0 and not waiting.copier.waiting
    waiting.pool.free_blocks(taken)
    for _ in range(3):
        waiting.match()
        waiting.promoter.advance()
        waiting.arrive()
    assert waiting.num_on_device > 0


def test_a_request_whose_pieces_cannot_be_copied_goes_on_without(waiting: Waiting) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no such address")

    waiting.copier.to_device = fail  # type: ignore[method-assign]
    assert waiting.until_it_starts() == NUM_HOST_BLOCKS, "what host memory can hold at once"
    assert waiting.pool.get_num_free_blocks() == NUM_DEVICE_BLOCKS - 1


def num_free(bench: Bench) -> int:
    return bench.pool.get_num_free_blocks()


def test_what_a_device_copies_later_stays_in_host_memory_until_then() -> None:
    keys = keys_of("a", 4)
    with closing(Bench()) as bench:
        bench.announce("a", keys)
        bench.advance()
        bench.promoter.retract("a", is_expired=False)
        assert bench.save("b", keys_of("b", 8)) == 7, "the rest of host memory; a piece is one block of this"
        bench.arrive()
        bench.check_device(keys[:1])
        assert bench.save("c", keys_of("c", 8)) == 8, "nothing is held any more"


def test_blocks_that_a_device_fills_later_are_found_and_free_only_then() -> None:
    keys = keys_of("a", 4)
    with closing(Bench()) as bench:
        bench.announce("a", keys)
        for num_there in range(len(keys)):
            while not bench.copier.waiting:
                assert bench.promoter.has_work()
                bench.promoter.advance()
            found = [bench.pool.get_cached_block(key, [0]) is not None for key in keys]
            assert found == [True] * num_there + [False] * (4 - num_there)
            assert num_free(bench) == NUM_DEVICE_BLOCKS - 1 - num_there - 1, "those before it are held, too"
            assert bench.held.holds_last and not bench.held.has_work()
            bench.arrive()
            assert num_free(bench) == NUM_DEVICE_BLOCKS - 1 and not bench.held.num_open
        bench.check_device(keys)


def test_a_cpu_s_copies_are_found_when_the_promoter_returns() -> None:
    keys = keys_of("a", 4)
    with closing(Bench()) as bench:
        bench.tiers.copier = CpuCopier(bench.device, bench.store.pool.region)
        bench.announce("a", keys)
        while bench.promoter.has_work():
            bench.promoter.advance()
            assert not bench.held.num_open
        bench.check_device(keys)


@pytest.mark.parametrize("fails", ["at once", "later"])
def test_blocks_that_cannot_be_filled_are_free_again_and_never_found(fails: str) -> None:
    keys = keys_of("a", 4)
    with closing(Bench()) as bench:
        bench.announce("a", keys)
        bench.copier.has_failed = fails == "later"
        if fails == "at once":
            bench.copier.to_device = lambda *args: 1 / 0  # type: ignore[assignment, method-assign]
        bench.promoter.advance()
        bench.arrive()
        assert num_free(bench) == NUM_DEVICE_BLOCKS - 1 and not bench.held.num_open
        assert bench.pool.get_cached_block(keys[0], [0]) is None
        assert not bench.promoter.has_work(), "advisories are given up"


def test_a_block_that_cannot_be_registered_costs_the_advice_and_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = keys_of("a", 4)
    with closing(Bench()) as bench:
        bench.announce("a", keys)
        bench.promoter.advance()
        monkeypatch.setattr(bench.pool, "cache_full_blocks", lambda **asked: 1 / 0)
        bench.arrive()
        assert num_free(bench) == NUM_DEVICE_BLOCKS - 1 and not bench.held.num_open
        assert not bench.promoter.has_work(), "advisories are given up"


def test_a_piece_for_a_request_that_has_ended_meanwhile_is_ordinary_cache(waiting: Waiting) -> None:
    while not waiting.copier.waiting:
        waiting.match()
        waiting.promoter.advance()
        waiting.store.wait_for_reads(10)
    assert waiting.match() is None, "a step would load what is on its way"
    waiting.restores.forget("r")
    waiting.arrive()
    assert waiting.num_on_device and not waiting.tiers.num_carried
    assert not waiting.promoter.has_work() and num_free(waiting) == NUM_DEVICE_BLOCKS - 1


def test_idle_blocks_are_taken_first_but_not_those_that_others_begin_with_or_use() -> None:
    shared, own, others = keys_of("shared", 2), keys_of("own", 3), keys_of("others", 2)
    with closing(Bench(num_host_blocks=64)) as bench:
        bench.tiers.copier = CpuCopier(bench.device, bench.store.pool.region)
        for session, keys in (("a", [*shared, *own]), ("b", [*shared, *others])):
            bench.announce(session, keys)
            bench.advance()
            bench.promoter.retract(session, is_expired=False)
        (used,) = bench.pool.get_cached_block(own[0], [0])
        bench.pool.touch([used])
        bench.promoter.set_idle("unknown", None)
        bench.promoter.set_idle("a", None)
        taken = bench.pool.get_new_blocks(2)
        assert [bench.pool.get_cached_block(key, [0]) is None for key in own] == [False, True, True]
        assert all(bench.pool.get_cached_block(key, [0]) for key in (*shared, *others))
        bench.pool.free_blocks([*taken, used])
