"""Short requests first, and nobody is overtaken by more than a share of what waited before it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.bounded import Bounded, BoundedSettings
from engine_bridge.policy.queue import Room, Waiting
from tests.unit.facts import waiting_facts

ROOM = Room(free_blocks=10_000, num_slots=1, num_tokens=10_000)


class Queue:
    """What waits by a policy that starts one request at a time."""

    def __init__(self, overtaken_share: float) -> None:
        self.policy = Bounded(10_000, BoundedSettings(overtaken_share=overtaken_share))
        self.waiting: dict[str, Waiting] = {}
        self.started: list[str] = []

    def ask(self, request_id: str, **fields: object) -> None:
        facts = waiting_facts(request_id, arrived_s=float(len(self.waiting) + len(self.started)), **fields)
        self.waiting[request_id] = facts
        self.policy.arrived(facts, 0.0)

    def start(self, room: Room = ROOM) -> None:
        for request_id in self.policy.decide(self.waiting, {}, room, 0.0).request_ids:
            del self.waiting[request_id]
            self.policy.admitted(request_id, 0.0)
            self.started.append(request_id)

    def start_all(self) -> str:
        while self.waiting:
            self.start()
        return " ".join(self.started)


def crowd(overtaken_share: float) -> Queue:
    """Three long ones, then a short one."""
    queue = Queue(overtaken_share)
    for request_id in "abc":
        queue.ask(request_id, size_tokens=1000)
    queue.ask("short", size_tokens=100)
    return queue


def test_without_overtaking_it_is_the_order_of_arrival() -> None:
    assert crowd(0.0).start_all() == "a b c short"


def test_a_short_one_overtakes_those_that_may_be_overtaken_by_so_much() -> None:
    """Nothing waited before the first; before the second 1,000 tokens, of which a tenth is as much as the short one has."""
    assert crowd(0.1).start_all() == "a short b c"
    assert crowd(0.09).start_all() == "a b short c"


def test_who_was_preempted_goes_on_before_all_others() -> None:
    queue = crowd(0.1)
    queue.ask("again", size_tokens=3000, is_swapped=True)
    assert queue.start_all() == "again a short b c"


def test_lower_priority_numbers_and_tenants_who_were_given_less_go_first() -> None:
    queue = Queue(0.1)
    queue.ask("ada 1", tenant="ada", size_tokens=100)
    queue.ask("ada 2", tenant="ada", size_tokens=100)
    queue.ask("bob", tenant="bob", size_tokens=400)
    queue.ask("urgent", tenant="ada", size_tokens=100, priority=-1)
    assert queue.start_all() == "urgent bob ada 1 ada 2"


def test_who_finds_no_memory_for_its_adapter_is_passed_over_and_who_finds_none_for_its_kv_is_not() -> None:
    queue = Queue(0.0)
    queue.ask("adapter", adapter_id=1, adapter_bytes=10)
    queue.ask("large", num_blocks=50)
    queue.ask("small", num_blocks=1)
    scarce = Room(free_blocks=20, num_slots=9, num_tokens=10_000, adapter_bytes=0)
    queue.start(scarce)
    assert queue.started == []
    decision = queue.policy.decide(queue.waiting, {}, scarce, 0.0)
    assert decision.deferred == {"adapter": "adapter_memory", "large": "no_blocks"}
    queue.start(Room(free_blocks=60, num_slots=9, num_tokens=10_000, adapter_bytes=0))
    assert queue.started == ["large", "small"]


@given(
    st.lists(st.one_of(st.integers(1, 1000), st.none()), max_size=60),
    st.sampled_from([0.0, 0.05, 0.2, 1.0]),
)
def test_nobody_is_overtaken_by_more_than_the_bound(events: list[int | None], share: float) -> None:
    """Events: a request of so many tokens comes, or one starts."""
    queue, sizes, most = Queue(share), dict[str, int](), 0
    for event in events:
        if event is None:
            queue.start()
        else:
            name = f"{len(sizes):03d}"
            sizes[name] = event
            queue.ask(name, size_tokens=event)
            most = max(most, sum(sizes[each] for each in queue.waiting))
    queue.start_all()
    assert sorted(queue.started) == sorted(sizes)
    for at, name in enumerate(queue.started):
        overtaken = sum(sizes[each] for each in queue.started[:at] if each > name)
        assert overtaken <= 2 * share * most + max(sizes.values())
