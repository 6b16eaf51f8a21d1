"""Shortest first, and nobody who would wait for as many tokens as the longest queue had is overtaken."""

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.scheduling.bounded import Bounded, BoundedSettings
from engine_bridge.policy.scheduling.queue_policy import StepRoom, Waiting
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


def behind_a_long_one(queue: Queue) -> Queue:
    """The second waits for 2,000 tokens, the third for 2,100."""
    for request_id, num_tokens in (("long", 2000), ("short", 100), ("shortest", 50)):
        queue.ask(request_id, num_tokens)
    return queue


def test_who_is_near_the_longest_wait_is_not_overtaken() -> None:
    assert behind_a_long_one(Queue(0.9)).start_all() == "short shortest long"
    assert behind_a_long_one(after_a_long_queue(0.9)).start_all() == "shortest short long"


EVENTS = st.sampled_from(["append", "remove", "remove the most", "raise", "lower", "copy", "look"])


def check_waits(waits: Waits, plain: dict[int, float], place: int) -> None:
    most = max((value for each, value in plain.items() if each < place), default=GONE)
    for limit in (most - 1, most, most + 1):
        assert waits.are_within(limit, before=place) == (most <= limit)


@given(st.integers(0, 2 * BLOCK), st.lists(st.tuples(EVENTS, st.integers(0, 10**6)), max_size=80))
def test_waits_are_those_of_a_plain_list(num: int, events: list[tuple[str, int]]) -> None:
    """A number stands for a place that still waits, and for tokens."""
    waits, plain = Waits(), dict[int, float]()
    for event, number in [("append", each) for each in range(num)] + events:
        place = sorted(plain)[number % len(plain)] if plain else 0
        if event == "append":
            plain[waits.append(float(number))] = float(number)
        elif event == "copy":
            waits = waits.copy()
        elif plain and event == "look":
            check_waits(waits, plain, place)
        elif plain and event.startswith("remove"):
            place = max(plain, key=plain.__getitem__) if event == "remove the most" else place
            waits.remove(place)
            del plain[place]
        elif plain and event == "raise":
            waits.raise_before(place, float(number))
            plain = {each: value + number * (each < place) for each, value in plain.items()}
        elif plain:
            waits.lower_after(place, float(number))
            plain = {each: value - number * (each > place) for each, value in plain.items()}
    for place in plain:
        check_waits(waits, plain, place)


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
