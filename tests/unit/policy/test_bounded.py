"""Shortest first, and nobody who would wait for as many tokens as the longest queue had is overtaken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine_bridge.policy.scheduling.bounded import NUM_PEAKS, Bounded, BoundedSettings
from engine_bridge.policy.scheduling.queue_policy import NUM_PASSED_OVER, StepRoom, Waiting
from engine_bridge.policy.scheduling.wait_tree import BLOCK, GONE, Waits
from tests.unit.facts import waiting_facts

ROOM = StepRoom(free_blocks=10_000, num_slots=1, num_tokens=10_000)


class Queue:
    """What waits by a policy that starts one request at a time."""

    def __init__(self, peak_share: float, fades_over: float = 1e9) -> None:
        self.policy = Bounded(10_000, BoundedSettings(peak_share=peak_share, peak_fades_over=fades_over))
        self.waiting: dict[str, Waiting] = {}
        self.started: list[str] = []

    def ask(self, request_id: str, num_tokens: int = 100, **fields: object) -> None:
        """A request of so many tokens, which it holds for a second."""
        sizes = {"size_tokens": num_tokens, "duration_s": 1.0} | fields
        facts = waiting_facts(request_id, arrived_s=float(len(self.waiting) + len(self.started)), **sizes)
        self.waiting[request_id] = facts
        self.policy.arrived(facts, 0.0)

    def start(self, room: StepRoom = ROOM) -> None:
        for request_id in self.policy.decide(self.waiting, {}, room, 0.0).request_ids:
            del self.waiting[request_id]
            self.policy.admitted(request_id, 0.0)
            self.started.append(request_id)

    def leave(self, request_id: str) -> None:
        del self.waiting[request_id]
        self.policy.ended(request_id)

    def start_all(self) -> str:
        while self.waiting:
            self.start()
        return " ".join(self.started)


def after_a_long_queue(peak_share: float, **options: float) -> Queue:
    """4,000 tokens waited before the last of its requests; all have started."""
    queue = Queue(peak_share, **options)
    for number in range(41):
        queue.ask(f"early {number:02d}")
    queue.start_all()
    queue.started.clear()
    return queue


def crowd(queue: Queue) -> Queue:
    """Two long ones, then two short ones."""
    for request_id in "ab":
        queue.ask(request_id, 1000)
    for request_id in "xy":
        queue.ask(request_id, 100)
    return queue


def test_without_overtaking_it_is_the_order_of_arrival() -> None:
    assert crowd(after_a_long_queue(0.0)).start_all() == "a b x y"


def test_who_waits_for_less_than_the_longest_wait_of_late_is_overtaken_up_to_it() -> None:
    """The first waits for nothing, the second for 1,000 tokens; each short one adds 100 to both."""
    assert crowd(after_a_long_queue(0.9)).start_all() == "x y a b"
    assert crowd(after_a_long_queue(0.28)).start_all() == "x a b y", "1,120 are too few for both short ones"


def behind_a_long_one(queue: Queue) -> Queue:
    """The second waits for 2,000 tokens, the third for 2,100."""
    for request_id, num_tokens in (("long", 2000), ("short", 100), ("shortest", 50)):
        queue.ask(request_id, num_tokens)
    return queue


def test_who_is_near_the_longest_wait_is_not_overtaken() -> None:
    assert behind_a_long_one(Queue(0.9)).start_all() == "short shortest long"
    assert behind_a_long_one(after_a_long_queue(0.9)).start_all() == "shortest short long"


def test_the_longest_queue_is_forgotten_with_time() -> None:
    queue = after_a_long_queue(0.9, fades_over=2.0)
    for number in range(30):
        queue.ask(f"one by one {number}", 300)
        queue.start_all()
    queue.started.clear()
    assert behind_a_long_one(queue).start_all() == "short shortest long"


def test_who_leaves_without_a_start_is_waited_for_no_longer() -> None:
    queue = after_a_long_queue(0.3)
    for request_id, num_tokens in (("gone 1", 700), ("gone 2", 700), ("long", 500), ("short", 50)):
        queue.ask(request_id, num_tokens)
    queue.leave("gone 1")
    queue.leave("gone 2")
    assert queue.start_all() == "short long", "behind 1,400 tokens the long one could not have been overtaken"


def test_who_was_preempted_goes_on_before_all_others() -> None:
    queue = after_a_long_queue(0.9)
    crowd(queue).ask("again", 3000, is_swapped=True)
    assert queue.start_all() == "again x y a b"


def test_lower_priority_numbers_and_tenants_who_were_given_less_go_first() -> None:
    queue = Queue(0.9)
    queue.ask("ada 1", tenant="ada")
    queue.ask("ada 2", tenant="ada")
    queue.ask("bob", 400, tenant="bob")
    queue.ask("urgent", tenant="ada", priority=-1)
    assert queue.start_all() == "urgent bob ada 1 ada 2"


def test_who_finds_no_memory_for_its_adapter_is_passed_over_and_who_finds_none_for_its_kv_is_not() -> None:
    queue = Queue(0.0)
    queue.ask("adapter", adapter_id=1, adapter_bytes=10)
    queue.ask("large", num_blocks=50)
    queue.ask("small", num_blocks=1)
    scarce = StepRoom(free_blocks=20, num_slots=9, num_tokens=10_000, adapter_bytes=0)
    queue.start(scarce)
    assert queue.started == []
    decision = queue.policy.decide(queue.waiting, {}, scarce, 0.0)
    assert decision.deferred == {"adapter": "adapter_memory", "large": "no_blocks"}
    queue.start(StepRoom(free_blocks=60, num_slots=9, num_tokens=10_000, adapter_bytes=0))
    assert queue.started == ["large", "small"]


def test_longest_queues_of_few_tenants_are_kept() -> None:
    queue = Queue(0.9)
    for number in range(2 * NUM_PEAKS):
        queue.ask(f"{number}", tenant=f"{number}")
        queue.start()
    assert len(queue.policy._peaks) == NUM_PEAKS


@given(
    st.lists(st.one_of(st.integers(1, 1000), st.none(), st.just("leaves")), max_size=200),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
def test_whoever_is_overtaken_waits_for_less_than_its_share_of_the_longest_wait(
    events: list[int | str | None], share: float
) -> None:
    """Events: a request of so many tokens comes, one starts, or the newest leaves. By plain sums, and by the policy."""
    queue, sizes, waits, most = Queue(share), dict[str, int](), dict[str, int](), 0
    for event in [*events, *[None] * len(events)]:
        if event == "leaves":
            if queue.waiting:
                queue.leave(max(queue.waiting))
            continue
        if event is not None:
            name = f"{len(sizes):04d}"
            sizes[name] = int(event)
            waits[name] = sum(sizes[each] for each in queue.waiting)
            most = max(most, waits[name])
            queue.ask(name, int(event))
            continue
        before = set(queue.waiting)
        queue.start()
        for name in before.difference(queue.waiting):
            for other in (each for each in queue.waiting if each < name):
                waits[other] += sizes[name]
                assert waits[other] <= share * most * (1 + 1e-9)
    assert not queue.waiting


@given(
    st.integers(0, 2 * BLOCK),
    st.lists(
        st.tuples(st.sampled_from(["append", "remove", "raise", "lower", "copy"]), st.integers(0, 10**6)),
        max_size=80,
    ),
)
def test_waits_are_those_of_a_plain_list(num: int, events: list[tuple[str, int]]) -> None:
    """A number stands for a place that still waits, and for tokens."""
    waits, plain = Waits(), dict[int, float]()
    for event, number in [("append", each) for each in range(num)] + events:
        place = sorted(plain)[number % len(plain)] if plain else 0
        if event == "append":
            plain[waits.append(float(number))] = float(number)
        elif event == "copy":
            waits = waits.copy()
        elif plain and event == "remove":
            waits.remove(place)
            del plain[place]
        elif plain and event == "raise":
            waits.raise_before(place, float(number))
            plain = {each: value + number * (each < place) for each, value in plain.items()}
        elif plain:
            waits.lower_after(place, float(number))
            plain = {each: value - number * (each > place) for each, value in plain.items()}
    for place in plain:
        most = max((value for each, value in plain.items() if each < place), default=GONE)
        for limit in {most, most - 1, *plain.values()}:
            assert waits.are_within(limit, before=place) == (most <= limit)


def test_what_a_copy_is_told_its_original_does_not_learn() -> None:
    waits = Waits()
    for _ in range(BLOCK + 2):
        waits.append(0.0)
    other = waits.copy()
    other.raise_before(BLOCK + 1, 5.0)
    other.remove(0)
    waits.raise_before(BLOCK + 1, 1.0)
    assert waits.are_within(1.0, before=BLOCK + 1) and not waits.are_within(0.9, before=BLOCK + 1)
    assert other.are_within(5.0, before=BLOCK + 1) and not other.are_within(4.9, before=BLOCK + 1)


def test_while_somebody_waits_for_adapter_memory_nothing_overtakes() -> None:
    queue = after_a_long_queue(0.9)
    crowd(queue).ask("adapter", adapter_id=1, adapter_bytes=10)
    queue.ask("the same", adapter_id=1, adapter_bytes=10)
    scarce = StepRoom(free_blocks=10_000, num_slots=9, num_tokens=10_000, adapter_bytes=0)
    decision = queue.policy.decide(queue.waiting, {}, scarce, 0.0)
    assert decision.request_ids == ("a", "b", "x", "y")
    assert decision.deferred == {"adapter": "adapter_memory", "the same": "adapter_memory"}
    queue.leave("adapter")
    queue.leave("the same")
    assert queue.start_all() == "x y a b"


def test_once_a_start_has_taken_the_adapter_memory_that_another_needs_nothing_more_overtakes() -> None:
    queue = after_a_long_queue(0.9)
    queue.ask("needs it", 1000, adapter_id=1, adapter_bytes=10)
    queue.ask("takes it", 10, adapter_id=2, adapter_bytes=10)
    queue.ask("early", 1000)
    queue.ask("late", 990)
    room = StepRoom(free_blocks=10_000, num_slots=9, num_tokens=10_000, adapter_bytes=10)
    # Shortest first until the one is refused, which comes last by its length.
    assert queue.policy.decide(queue.waiting, {}, room, 0.0).request_ids == ("takes it", "late", "early")
    short = replace(queue.waiting["needs it"], duration_s=0.01)
    queue.leave("needs it")
    queue.waiting["needs it"] = short
    queue.policy.arrived(short, 0.0)
    decision = queue.policy.decide(queue.waiting, {}, room, 0.0)
    assert decision.request_ids == ("takes it", "early", "late"), (
        "it is refused before those two are looked at"
    )
    assert decision.deferred == {"needs it": "adapter_memory"}


class Counted(dict[str, Waiting]):
    """Counts how often it is asked for facts, which take a look at the engine each."""

    num_asked = 0

    def __getitem__(self, request_id: str) -> Waiting:
        self.num_asked += 1
        return super().__getitem__(request_id)


def test_thousands_that_wait_for_hundreds_of_adapters_are_not_all_asked_about() -> None:
    queue = after_a_long_queue(0.9)
    for number in range(4000):
        queue.ask(f"{number:04d}", 100 + number % 7, adapter_id=1 + number % 800, adapter_bytes=10)
    waiting = Counted(queue.waiting)
    scarce = StepRoom(free_blocks=10_000, num_slots=9, num_tokens=10_000, adapter_bytes=0)
    decision = queue.policy.decide(waiting, {}, scarce, 0.0)
    assert not decision.request_ids
    assert waiting.num_asked <= 2 * NUM_PASSED_OVER + 1
