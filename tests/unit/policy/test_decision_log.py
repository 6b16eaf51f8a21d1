"""What was decided can be decided again from the log alone, and a log that says otherwise is found out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.scheduling.baselines import Fcfs
from engine_bridge.policy.scheduling.decision_log import REPEAT_EVERY_S, BadLog, Recorded, replay
from engine_bridge.policy.scheduling.lanes import Lanes
from engine_bridge.policy.scheduling.mlq import Mlq
from engine_bridge.policy.scheduling.mlq_decision import MlqSettings
from engine_bridge.policy.scheduling.policies import POLICIES
from engine_bridge.policy.scheduling.queue_policy import Decision, QueuePolicy, Running, StepRoom, Waiting
from tests.unit.facts import running_facts, waiting_facts

NUM_TOKENS = 1000
ROOM = StepRoom(free_blocks=40, num_slots=4, num_tokens=NUM_TOKENS)


runs = partial(running_facts, num_blocks=5, predicted_end_s=9.0)


class Log:
    """Lines that a policy wrote, with a bound."""

    def __init__(self, max_lines: int = 10**6) -> None:
        self.lines: list[bytes] = []
        self._max_lines = max_lines

    def write(self, line: bytes) -> bool:
        self.lines.append(line)
        return len(self.lines) < self._max_lines

    def change(self, what: str, **changes: Any) -> None:
        """The last line that does `what` gets other fields."""
        at = max(at for at, line in enumerate(self.lines) if msgspec.json.decode(line)["do"] == what)
        self.lines[at] = msgspec.json.encode(msgspec.json.decode(self.lines[at]) | changes) + b"\n"


class Driven:
    """An engine's life in short: what waits, what runs, and the policy that is told of it."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.waiting: dict[str, Waiting] = {}
        self.running: dict[str, Running] = {}
        self.all: dict[str, Waiting] = {}
        self.now = 0.0
        self.decisions: list[Decision] = []

    def arrive(self, **fields: Any) -> None:
        new = waiting_facts(f"r{len(self.all)}", **({"arrived_s": self.now} | fields))
        self.all[new.request_id] = self.waiting[new.request_id] = new
        self.policy.arrived(new, self.now)

    def step(self, after_s: float, num_failing: int = 0, **room: Any) -> Decision:
        """As many of those that should start do not."""
        self.now += after_s
        decision = self.policy.decide(
            self.waiting, self.running, msgspec.structs.replace(ROOM, **room), self.now
        )
        self.decisions.append(decision)
        for request_id in decision.squash:
            self.policy.squashed(request_id)
            self.preempt(request_id)
        if not decision.squash:
            for request_id in decision.request_ids[: len(decision.request_ids) - num_failing]:
                self.start(request_id, request_id in decision.bypassed)
        return decision

    def start(self, request_id: str, is_bypasser: bool) -> None:
        self.policy.admitted(request_id, self.now)
        waited = self.waiting.pop(request_id)
        self.running[request_id] = runs(
            request_id,
            num_blocks=waited.num_blocks,
            predicted_end_s=self.now + waited.duration_s,
            is_bypasser=is_bypasser,
        )

    def preempt(self, request_id: str) -> None:
        self.policy.ended(request_id)
        del self.running[request_id]
        self.waiting[request_id] = msgspec.structs.replace(self.all[request_id], is_swapped=True)
        self.policy.arrived(self.waiting[request_id], self.now)

    def end(self, request_id: str) -> None:
        self.policy.ended(request_id)
        self.waiting.pop(request_id, None)
        self.running.pop(request_id, None)

    def grow(self, request_id: str, num_blocks: int) -> None:
        each = self.running[request_id]
        self.running[request_id] = msgspec.structs.replace(each, num_blocks=each.num_blocks + num_blocks)
        self.policy.outgrew(request_id, 100 + 50 * num_blocks)


class Halves(Mapping[str, float]):
    """Sizes on a new scale, also of what has not come yet; of some requests nothing is known."""

    def __init__(self, known: Mapping[str, Waiting]) -> None:
        self._known = known

    def __getitem__(self, request_id: str) -> float:
        if request_id.endswith("7"):
            raise KeyError(request_id)
        return self._known[request_id].weighted_size / 2

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


requests = st.fixed_dictionaries(
    {
        "weighted_size": st.floats(0, 1),
        "size_tokens": st.integers(0, 1500),
        "num_blocks": st.integers(0, 40),
        "duration_s": st.floats(0, 20),
        "priority": st.integers(-1, 1),
        "tenant": st.sampled_from(["", "a", "b"]),
        "weight": st.sampled_from([0.5, 1.0, 3.0]),
        "is_warm": st.booleans(),
        "adapter_blocks": st.integers(0, 4),
        "adapter_id": st.none() | st.integers(1, 2),
    }
)
actions = st.one_of(
    st.tuples(st.just("arrive"), requests),
    st.tuples(
        st.just("step"),
        st.fixed_dictionaries(
            {
                "after_s": st.floats(0, 40),
                "num_failing": st.integers(0, 2),
                "free_blocks": st.integers(0, 60),
                "num_slots": st.integers(0, 5),
            }
        ),
    ),
    st.tuples(st.sampled_from(["end", "preempt", "grow", "cancel"]), st.integers(0, 99)),
    st.tuples(
        st.just("refit"),
        st.lists(st.sampled_from([0.1, 0.3, 0.6, 0.9]), min_size=1, max_size=4, unique=True),
    ),
    st.tuples(st.just("advance"), st.integers(0, 4)),
)


def play(driven: Driven, action: str, value: Any) -> None:
    running, waiting = list(driven.running), list(driven.waiting)
    match action:
        case "arrive":
            driven.arrive(**value)
        case "step":
            driven.step(**value)
        case "refit" if driven.policy.name == "mlq":
            assert isinstance(driven.policy, Recorded | Mlq)
            driven.policy.begin_refit(
                Lanes.around(value), [NUM_TOKENS // len(value)] * len(value), Halves(driven.all)
            )
        case "advance" if driven.policy.name == "mlq":
            assert isinstance(driven.policy, Recorded | Mlq)
            driven.policy.advance_refit(value)
        case "cancel" if waiting:
            driven.end(waiting[value % len(waiting)])
        case "end" if running:
            driven.end(running[value % len(running)])
        case "preempt" if running:
            driven.preempt(running[value % len(running)])
        case "grow" if running:
            driven.grow(running[value % len(running)], value % 7)


@given(st.sampled_from(sorted(POLICIES)), st.lists(actions, max_size=60))
def test_the_same_calls_give_the_same_decisions(name: str, played: list[tuple[str, Any]]) -> None:
    log = Log()
    driven = Driven(Recorded(POLICIES[name](NUM_TOKENS), NUM_TOKENS, log.write))
    for action, value in played:
        play(driven, action, value)
    result = replay(log.lines)
    assert result.policy == name and not result.is_torn
    assert result.num_lines == len(log.lines)
    assert result.first_difference is None and result.num_different == 0
    starting = [decision for decision in driven.decisions if decision.request_ids or decision.squash]
    assert len(starting) <= result.num_decisions <= len(driven.decisions)


@given(st.sampled_from(sorted(POLICIES)), st.lists(actions, max_size=60))
def test_recording_changes_no_decision(name: str, played: list[tuple[str, Any]]) -> None:
    both = [
        Driven(Recorded(POLICIES[name](NUM_TOKENS), NUM_TOKENS, log.write))
        for log in (Log(), Log(max_lines=5))
    ]
    plain = Driven(POLICIES[name](NUM_TOKENS))
    for action, value in played:
        for driven in (*both, plain):
            play(driven, action, value)
    assert both[0].decisions == both[1].decisions == plain.decisions


def test_a_policy_of_its_own_settings_is_made_again_with_them() -> None:
    log = Log()
    driven = Driven(
        Recorded(Mlq(NUM_TOKENS, MlqSettings(max_wait_s=3.0, aging_s=10.0)), NUM_TOKENS, log.write)
    )
    driven.arrive(weighted_size=0.9, num_blocks=39)
    driven.arrive(weighted_size=0.1, arrived_s=1.0)
    driven.step(3.5, free_blocks=30)
    assert driven.decisions[0].request_ids == (), "the large one is overdue, and nobody passes it"
    assert replay(log.lines).num_different == 0
    header = msgspec.json.decode(log.lines[0])
    assert header["policy"] == "mlq" and header["settings"]["max_wait_s"] == 3.0
    log.change("begin", settings=header["settings"] | {"max_wait_s": 1e6})
    assert replay(log.lines).num_different == 1


def test_every_hook_of_a_policy_is_written_down() -> None:
    """A hook that is new in the protocol must not be left out here."""
    hooks = {name for name, _ in inspect.getmembers(QueuePolicy, inspect.isfunction) if name[0] != "_"}
    assert {name for name in hooks if name not in vars(Recorded)} == set()
    log = Log()
    driven = Driven(Recorded(Mlq(NUM_TOKENS), NUM_TOKENS, log.write))
    driven.arrive()
    driven.step(1.0)
    driven.grow("r0", 3)
    driven.policy.squashed("r0")
    driven.end("r0")
    assert {msgspec.json.decode(line)["do"] for line in log.lines} - {"begin", "decided"} == {
        {"decide": "decided"}.get(hook, hook) for hook in hooks - {"decide"}
    }


def squashing() -> tuple[Log, Driven]:
    """One of which every kind of line is there: a bypasser is late and squashed for a head that could then start."""
    log = Log()
    driven = Driven(Recorded(Mlq(NUM_TOKENS), NUM_TOKENS, log.write))
    for _ in range(40):
        driven.arrive()
        driven.end(driven.step(0.1).request_ids[0])
    driven.arrive(num_blocks=20, duration_s=30.0)
    driven.step(0.1)
    driven.arrive(num_blocks=40)
    driven.arrive(num_blocks=10, weighted_size=0.2, duration_s=2.0)
    assert driven.step(0.1, free_blocks=20).bypassed == {"r42": "r41"}
    driven.grow("r42", 2)
    assert driven.step(3.0, free_blocks=30).squash == ("r42",)
    return log, driven


def test_a_bypass_and_a_squash_are_replayed() -> None:
    log, _ = squashing()
    result = replay(log.lines)
    assert result.num_different == 0 and result.num_decisions > 40
    log.change("decided", squash=["r40"])
    changed = replay(log.lines)
    assert changed.num_different == 1 and changed.first_difference is not None
    assert changed.first_difference.recorded.squash == ("r40",)
    assert changed.first_difference.replayed is not None
    assert changed.first_difference.replayed.squash == ("r42",)


@pytest.mark.parametrize(
    "changes",
    [
        {"starts": ["r1"]},
        {"deferred": {"r2": "no_slot"}},
        {"otherwise": "no_slot"},
        {"bypassed": {"r0": "r1"}},
        {"room": {"free_blocks": 15, "num_slots": 4, "num_tokens": NUM_TOKENS}},
        {"waiting": {}},
    ],
)
def test_a_changed_decision_is_found(changes: dict[str, Any]) -> None:
    log = Log()
    driven = Driven(Recorded(POLICIES["fcfs"](NUM_TOKENS), NUM_TOKENS, log.write))
    for _ in range(3):
        driven.arrive()
    driven.step(1.0, free_blocks=25)
    driven.step(1.0)
    assert replay(log.lines).num_decisions == 2
    log.lines = log.lines[:-2]  # the last start and its decision
    assert replay(log.lines).num_decisions == 1
    log.change("decided", **changes)
    result = replay(log.lines)
    assert (result.num_decisions, result.num_different) == (1, 1)
    assert result.first_difference is not None and result.first_difference.line == 5
    assert ("r0" in result.first_difference.problem) == (changes == {"waiting": {}})


def test_a_call_that_is_missing_is_found() -> None:
    log = Log()
    driven = Driven(Recorded(Mlq(NUM_TOKENS), NUM_TOKENS, log.write))
    for _ in range(3):
        driven.arrive(size_tokens=NUM_TOKENS)
        driven.end(driven.step(1.0).request_ids[0])
    assert replay(log.lines).num_different == 0
    del log.lines[next(at for at, line in enumerate(log.lines) if b'"ended"' in line)]
    assert replay(log.lines).num_different == 2, "its tokens never came back"


def test_a_decision_to_wait_is_not_repeated_in_every_step() -> None:
    log = Log()
    driven = Driven(Recorded(POLICIES["fcfs"](NUM_TOKENS), NUM_TOKENS, log.write))
    driven.arrive()
    for _ in range(10):
        driven.step(REPEAT_EVERY_S / 20, free_blocks=0)
    assert replay(log.lines).num_decisions == 1
    driven.step(REPEAT_EVERY_S / 20, free_blocks=0, num_slots=0)
    assert replay(log.lines).num_decisions == 2, "another reason is another decision"
    driven.step(2 * REPEAT_EVERY_S, free_blocks=0, num_slots=0)
    assert replay(log.lines).num_decisions == 3
    driven.arrive()
    driven.step(0.0, free_blocks=0, num_slots=0)
    assert replay(log.lines).num_decisions == 4, "something happened in between"
    driven.step(0.0)
    assert replay(log.lines).num_decisions == 5


def test_a_refit_at_once_is_replayed() -> None:
    log = Log()
    policy = Recorded(Mlq(NUM_TOKENS), NUM_TOKENS, log.write)
    driven = Driven(policy)
    for at in range(6):
        driven.arrive(weighted_size=at / 10, size_tokens=400)
    policy.begin_refit(Lanes.around([0.1, 0.9]), [300, 700], Halves(driven.all))
    assert policy.advance_refit(6)
    assert isinstance(policy.policy, Mlq) and policy.policy.num_waiting() == (6, 0)
    assert driven.step(1.0).request_ids == ("r0", "r1"), (
        "two of the small ones, with what the other lane lends"
    )
    assert replay(log.lines).num_different == 0
    assert policy.advance_refit(5) and b"advance" not in log.lines[-1], "nothing to advance, nothing to write"


def test_facts_are_written_once_and_then_their_changes() -> None:
    log = Log()
    policy = Recorded(Mlq(NUM_TOKENS), NUM_TOKENS, log.write)
    policy.arrived(waiting_facts("a"), 0.0)
    for at, num_blocks in enumerate((50, 51, 10, 10)):
        policy.decide({"a": waiting_facts("a", num_blocks=num_blocks)}, {}, ROOM, 2.0 * at)
    written = [msgspec.json.decode(line)["waiting"]["a"] for line in log.lines[-4:]]
    assert written == [{"num_blocks": 50}, {"num_blocks": 51}, {"num_blocks": 10}, {}]
    assert replay(log.lines).num_different == 0


class SquashesAll(Fcfs):
    """Decides by the order in which requests run."""

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: StepRoom, now: float
    ) -> Decision:
        return Decision(squash=tuple(each.request_id for each in running.values()))


def test_the_order_of_those_that_run_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "fcfs", lambda num_tokens: SquashesAll())
    log = Log()
    policy = Recorded(SquashesAll(), NUM_TOKENS, log.write)
    for order in ("ab", "ba", "bca", "cab", "ca", ""):
        assert policy.decide({}, {name: runs(name) for name in order}, ROOM, 1.0).squash == tuple(order)
    result = replay(log.lines)
    assert (result.num_decisions, result.num_different) == (6, 0)


def test_writing_stops_for_good_when_no_more_is_wanted() -> None:
    log = Log(max_lines=4)
    driven = Driven(Recorded(Mlq(NUM_TOKENS), NUM_TOKENS, log.write))
    for _ in range(9):
        driven.arrive()
        driven.step(1.0)
    assert len(log.lines) == 4
    assert replay(log.lines).num_different == 0
    assert len(driven.running) + len(driven.waiting) == 9


# -- bad files ---------------------------------------------------------------------------------------------------------


@given(st.data())
def test_a_torn_last_line_is_left_out_and_told(data: st.DataObject) -> None:
    lines = squashing()[0].lines
    at = data.draw(st.integers(1, len(lines) - 1))
    torn = lines[at][: data.draw(st.integers(1, len(lines[at]) - 2))]
    result = replay([*lines[:at], torn])
    assert result.is_torn and result.num_lines == at and result.num_different == 0
    with pytest.raises(BadLog, match=f"line {at + 1}: "):
        replay([*lines[:at], torn + b"\n", *lines[at + 1 :]])


def test_a_last_line_without_its_newline_counts_if_it_is_whole() -> None:
    lines = squashing()[0].lines
    result = replay([*lines[:-1], lines[-1].rstrip()])
    assert not result.is_torn and result.num_lines == len(lines)


BEGIN = b'{"do":"begin","format":"overture decisions","version":2,"policy":"fcfs","num_tokens":9}\n'


@pytest.mark.parametrize(
    ("lines", "where", "why"),
    [
        ([], 1, "empty"),
        ([b"hello\n"], 1, "not a line of a decision log"),
        ([b"\xff\xfe"], 1, "not a line"),
        ([b'{"do":"ended","id":"a"}\n'], 1, "does not begin"),
        ([BEGIN[:30]], 1, "not a line"),
        ([BEGIN.replace(b":2", b":3")], 1, "version 3"),
        ([BEGIN.replace(b"fcfs", b"lifo")], 1, "'lifo'"),
        ([BEGIN.replace(b"9}", b'9,"settings":{}}')], 1, "cannot be made"),
        ([BEGIN.replace(b"fcfs", b"mlq").replace(b"9}", b"-9}")], 1, "cannot be made"),
        ([BEGIN, BEGIN], 2, "second time"),
        ([BEGIN, b"\n"], 2, "not a line"),
        ([BEGIN, b'{"do":"ended","id":7}\n'], 2, "not a line"),
        ([BEGIN, b'{"do":"ended","id":"a","now":1}\n'], 2, "not a line"),
        ([BEGIN, b'{"do":"admitted","now":1,"id":"a"}\n'], 2, "does not follow"),
        ([BEGIN, b'{"do":"arrived","now":1,"facts":{"request_id":"a"}}\n'], 2, "does not follow"),
        ([BEGIN, b'{"do":"begin_refit","centroids":[1],"boundaries":[],"quotas":[9]}\n'], 2, "no lanes"),
        (
            [
                BEGIN,
                b'{"do":"decided","now":1,"room":{"free_blocks":1,"num_slots":1,"num_tokens":9},"running":{"gone":["a"]}}\n',
            ],
            2,
            "does not follow",
        ),
    ],
)
def test_a_bad_line_is_named(lines: list[bytes], where: int, why: str) -> None:
    with pytest.raises(BadLog, match=why) as caught:
        replay(lines)
    assert caught.value.line == where and str(caught.value).startswith(f"line {where}: ")
