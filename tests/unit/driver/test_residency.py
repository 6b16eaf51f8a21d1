import threading
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool

from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.files import ModelContract
from engine_bridge.adapters.registry import AdapterRecord
from engine_bridge.core.adapters.adapter_worth import Worth
from engine_bridge.core.adapters.residency import AdapterPlaces, Rules
from engine_bridge.core.adapters.staging import AHEAD_SHARE, HistoryPrefetch, ReadAhead
from engine_bridge.core.adapters.step_layouts import StepFacts, StepLayouts
from engine_bridge.driver.adapters.blocks import AdapterBlocks
from engine_bridge.driver.adapters.device_copies import DeviceCopies
from engine_bridge.driver.adapters.host_path import NoHostPath
from engine_bridge.driver.adapters.host_workers import AssistWorkers
from engine_bridge.driver.adapters.layouts import LayoutsAhead
from engine_bridge.driver.adapters.loading import LoaderThread
from engine_bridge.driver.adapters.residency import Residency
from engine_bridge.driver.adapters.slots import Slots
from engine_bridge.driver.adapters.weights import AdapterWeights, ModuleWeights, host_buffers
from engine_bridge.policy.adapters.adapter_cache import POLICIES, PrefixFacts

MAX_LORAS, NUM_SLOTS, NUM_BLOCKS = 2, 3, 20
HOST_BYTES = 4000
CONTRACT = ModelContract({}, 128, (), lambda name: (name, True), lambda config: ())


def record(number: int, num_bytes: int) -> AdapterRecord:
    named: dict[str, Any] = {"version_id": number, "name": f"a{number}", "num_bytes": num_bytes, "rank": 8}
    empty = {"path": "", "content_hash": "", "checksum": 0, "signature": "", "target_modules": ()}
    state = {"base_model": None, "state": "ready", "is_pinned": False, "added_at": 0.0, "last_used_at": None}
    return AdapterRecord(**named, **empty, **state, num_uses=0)


class Disk:
    """Where adapters come from; those in `broken` cannot be read, and none while it is held."""

    def __init__(self) -> None:
        self.is_free = threading.Event()
        self.is_free.set()
        self.buffers = host_buffers(is_pinned=False, max_idle_bytes=1000)
        self.broken: set[int] = set()

    def load(self, record: AdapterRecord) -> AdapterWeights:
        self.is_free.wait()
        if record.version_id in self.broken:
            raise AdapterRejected("It cannot be read.", code="unreadable")
        buffer = self.buffers.take(record.num_bytes)
        part = buffer[: record.num_bytes].view(1, -1).fill_(record.version_id % 256)
        module = ModuleWeights((part,), (part[:, :0],), is_list=False)
        return AdapterWeights({"model.layers.0.x": module}, record.num_bytes, buffer)


class BreakableSlots(Slots):
    """Those in `broken` cannot be laid out: when a slot is filled with them, or when what that left is done."""

    def __init__(self, manager: Any) -> None:
        super().__init__(manager)
        self.broken: set[int] = set()
        self.is_late = False
        self.unfilled: dict[int, int] = {}

    def empty(self, slot: int) -> None:
        self.unfilled.pop(slot, None)

    def fill(self, slot: int, weights: AdapterWeights, compute_for: Any = None, layout: Any = None) -> None:
        number = int(weights.modules["model.layers.0.x"].a[0][0, 0])
        if self.is_late:
            self.unfilled[slot] = number
        elif number in self.broken:
            raise RuntimeError(f"adapter {number} cannot be laid out")

    def is_filled(self, slot: int) -> bool:
        return slot not in self.unfilled

    def finish(self, slot: int) -> None:
        number = self.unfilled.get(slot)
        if number in self.broken:
            raise MemoryError(f"no room to lay adapter {number} out")
        self.unfilled.pop(slot, None)

    def compute(self, slot: int) -> None:
        """A step lays out what nobody has."""
        try:
            self.finish(slot)
        except MemoryError as error:
            self.on_failed(slot, error)


class Traffic(RuleBasedStateMachine):
    """A scheduler in small: requests wait in order, start when they may, run for some steps and end."""

    @initialize(
        assist=st.booleans(),
        is_device=st.booleans(),
        policy=st.sampled_from(sorted(POLICIES)),
        step_s=st.sampled_from([0.0, 1e-6, 1.0]),
    )
    def begin(self, assist: bool, is_device: bool, policy: str, step_s: float) -> None:
        self.now, self.step_s = 0.0, step_s
        self.waiting: dict[str, int] = {}
        self.running: dict[str, int] = {}
        self.served: set[int] = set()
        self.disk = Disk()
        self.manager = SimpleNamespace(lora_slots=NUM_SLOTS, device="cpu", modules={})
        self.manager.lora_index_to_id = [None] * NUM_SLOTS
        self.slots, self.spoiled = BreakableSlots(self.manager), set[int]()
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=32)
        self.taken: list[list[Any]] = []
        sizes = {"host_bytes": HOST_BYTES, "num_slots": NUM_SLOTS}
        rules = Rules(**sizes, cpu_assist=assist, fills_from_copies=is_device)
        core = AdapterPlaces(rules, Worth(policy), HistoryPrefetch())
        facts = PrefixFacts(num_bytes=1, restore_s=1.0, reuse_per_s=1.0)
        copies = DeviceCopies(core, torch.device("cpu"), lambda num_blocks: facts, lambda: self.now)
        layouts = LayoutsAhead(0, lambda weights: None, lambda num_bytes: num_bytes)
        read_ahead = ReadAhead(AHEAD_SHARE * HOST_BYTES)
        loader = LoaderThread(self.disk, AssistWorkers(), read_ahead, layouts, wake=lambda: None)
        asks = {"running_ids": lambda: set(self.running.values()), "has_running": lambda: bool(self.running)}
        asks |= {"is_busy": lambda: bool(self.running or self.waiting), "clock": lambda: self.now}
        parts = {"slots": self.slots, "loader": loader, "copies": copies, "workers": AssistWorkers()}
        parts |= {"host_path": NoHostPath(), "manager": self.manager, "contract": CONTRACT}
        parts["step_layouts"] = StepLayouts(lambda: StepFacts(len(self.running), self.step_s))
        hears = {"on_failed": self.give_up, "on_spoiled": self.spoiled.add}
        self.residency = Residency(core, **parts, **asks, **hears)
        memory = [torch.zeros(NUM_BLOCKS, 75)]
        copies.blocks = AdapterBlocks(self.pool, memory, copies.lost, copies.may_displace)
        self.next_number = 1
        self.add(800)

    @staticmethod
    def drawn(data: st.DataObject, names: Any) -> Any:
        return data.draw(st.sampled_from(sorted(names)))

    def give_up(self, request_ids: list[str], error: Exception) -> None:
        for request_id in request_ids:
            adapter_id = self.waiting.pop(request_id, None) or self.running.pop(request_id)
            self.residency.released(request_id, adapter_id)

    @rule(num_bytes=st.integers(100, 1500))
    def add(self, num_bytes: int) -> None:
        number = self.next_number
        self.next_number += 1
        self.residency.add(record(number, num_bytes))
        self.served.add(number)

    @rule(data=st.data())
    @precondition(lambda self: len(self.served) > 1)
    def remove(self, data: st.DataObject) -> None:
        number = self.drawn(data, self.served)
        self.served.discard(number)
        self.residency.remove(number)

    @rule(data=st.data(), wait_s=st.floats(0, 5))
    def request(self, data: st.DataObject, wait_s: float) -> None:
        self.now += wait_s
        number = self.drawn(data, self.served)
        request_id = f"r{self.next_number}"
        self.next_number += 1
        self.waiting[request_id] = number
        self.residency.requested(request_id, number)

    @rule(data=st.data())
    def expect(self, data: st.DataObject) -> None:
        """From another thread, as the event loop does."""
        number = self.drawn(data, self.served)
        thread = threading.Thread(target=self.residency.expect, args=(number,))
        thread.start()
        thread.join()

    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        self.residency.core.prefetch(self.drawn(data, self.served))

    @rule(data=st.data())
    def break_or_mend(self, data: st.DataObject) -> None:
        self.disk.broken ^= {self.drawn(data, self.served)}

    @rule(data=st.data(), is_late=st.booleans())
    def break_or_mend_layout(self, data: st.DataObject, is_late: bool) -> None:
        self.slots.broken ^= {self.drawn(data, self.served) % 256}
        self.slots.is_late = is_late

    @rule(num_blocks=st.integers(1, 8), frees=st.booleans())
    def kv(self, num_blocks: int, frees: bool) -> None:
        if frees and self.taken:
            self.pool.free_blocks(reversed(self.taken.pop(0)))
        elif num_blocks <= self.pool.get_num_free_blocks():
            self.taken.append(self.pool.get_new_blocks(num_blocks))

    @rule(are_slow=st.lists(st.booleans(), min_size=1, max_size=5))
    def steps(self, are_slow: list[bool]) -> None:
        for is_slow in are_slow:
            self.residency.loader.rest()
            self.step(is_slow)

    def step(self, is_slow: bool) -> None:
        """What is being read comes before the step's requests are chosen, or after it: not by chance, which could not be played again."""
        if is_slow:
            self.disk.is_free.clear()
        self.now += 0.01
        try:
            self.residency.advance()
            if not is_slow:
                self.residency.loader.rest()
            self.compute()
        finally:
            self.disk.is_free.set()

    def compute(self) -> None:
        """As the driver does behind `advance`: schedule, enter."""
        self.residency.begin_step()
        in_batch = set(self.running.values())
        for request_id, number in list(self.waiting.items()):
            has_room = number in in_batch or len(in_batch) < MAX_LORAS
            if self.residency.may_start(number) and has_room:
                self.running[request_id] = self.waiting.pop(request_id)
                in_batch.add(number)
        self.spoiled.clear()
        self.residency.enter(in_batch)
        owners = self.manager.lora_index_to_id
        assert all(number in owners for number in in_batch), "a step computes with adapters that are in slots"
        for number in in_batch:
            self.slots.compute(owners.index(number))
        ended = {each for each, number in self.running.items() if number % 256 in self.slots.broken}
        failed = self.residency.end_step()
        assert set(failed) == self.spoiled, "what lacks an adapter is known before the step ends"
        assert all(number % 256 in self.slots.broken for number in failed)
        self.residency.settle(failed)
        assert not {each for each in ended if self.running.get(each) in failed}, "its requests have been told"

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def finish(self, data: st.DataObject) -> None:
        request_id = self.drawn(data, self.running)
        self.residency.released(request_id, self.running.pop(request_id))

    @rule(data=st.data())
    @precondition(lambda self: self.waiting)
    def abort(self, data: st.DataObject) -> None:
        request_id = self.drawn(data, self.waiting)
        self.residency.released(request_id, self.waiting.pop(request_id))

    @rule()
    def everybody_gets_there(self) -> None:
        """Whatever went before: requests end one after the other, without a step in which nothing can move."""
        for _ in range(40 * (1 + len(self.waiting) + len(self.running))):
            self.residency.loader.rest()
            self.step(False)
            if self.running:
                request_id = next(iter(self.running))
                self.residency.released(request_id, self.running.pop(request_id))
            if not self.waiting and not self.running:
                return
        raise AssertionError(f"requests starve: {self.waiting}")

    @invariant()
    def slots_and_adapters_agree_and_memory_is_bounded(self) -> None:
        assert 0 <= self.residency.stats().host_bytes <= HOST_BYTES
        num_taken = sum(len(blocks) for blocks in self.taken)
        assert self.pool.get_num_free_blocks() == NUM_BLOCKS - 1 - num_taken, "lent blocks are free"
        owners = self.manager.lora_index_to_id
        table = self.residency.core.table
        table.check(HOST_BYTES)
        assert owners == table.slots
        for adapter in table:
            assert owners.count(adapter.id) == (adapter.slot is not None)
            assert adapter.slot is None or owners[adapter.slot] == adapter.id

    @invariant()
    def only_what_is_served_or_used_is_known(self) -> None:
        self.residency.loader.rest()
        self.residency.advance()
        in_use = {*self.running.values(), *self.waiting.values()}
        assert set(self.residency.places()) == self.served | in_use

    def teardown(self) -> None:
        if hasattr(self, "residency"):
            self.residency.close()


def begun(*, is_device: bool) -> Traffic:
    traffic = Traffic()
    traffic.begin(assist=False, is_device=is_device, policy="lru", step_s=0.0)
    return traffic


def test_what_was_read_ahead_gets_its_slot_with_the_turn_that_takes_it_in() -> None:
    traffic = begun(is_device=False)
    traffic.residency.loader.rest()
    traffic.residency.advance()
    traffic.add(3500)  # too large to be loaded before it is asked for
    traffic.residency.expect(2)
    traffic.residency.loader.rest()
    traffic.residency.requested("r", 2)
    assert traffic.residency.places()[2] == "disk"
    traffic.residency.advance()
    assert traffic.residency.places()[2] == "slot"
    traffic.teardown()


def test_once_adapters_are_put_back_none_is_being_read() -> None:
    """An engine that falls asleep gives up the memory of KV blocks, which the loader reads adapters from."""
    traffic = begun(is_device=True)
    loader = traffic.residency.loader
    loader.rest()
    traffic.residency.advance()
    traffic.disk.is_free.clear()
    reads: list[str] = []
    loader.load(record(1, 800), None, lambda loaded: reads.append("ended"))
    free = threading.Timer(0.1, traffic.disk.is_free.set)
    free.start()
    traffic.residency.put_back([], keeps_host=True)
    loader.take_done()
    free.join()
    assert reads == ["ended"]
    traffic.teardown()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=40, stateful_step_count=40)
