"""A request's life in the queue, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_bridge.core.scheduling.dispatcher import CACHED_FOR_S, MAX_READY, PRIOR_TOKEN_S, StepPlan
from engine_bridge.core.scheduling.pacer import Pacer
from engine_bridge.core.scheduling.pauses import Pauses
from engine_bridge.policy.costs.costs import StepTable
from engine_bridge.policy.scheduling.lanes import MIN_SIZES
from engine_bridge.policy.scheduling.mlq import Mlq
from engine_bridge.policy.scheduling.pausing import GRACE_S
from engine_bridge.policy.scheduling.queue_policy import Waiting
from engine_bridge.predict.length import LengthGuess

from .fake_engine import NUM_TOKENS, FakeEngine, arrival


def test_who_came_starts_when_there_is_room_and_says_why_it_waits_until_then() -> None:
    engine = FakeEngine(num_slots=1)
    engine.ask(arrival("a"))
    engine.ask(arrival("b"))
    assert engine.step().request_ids == ("a",)
    assert (engine.own.num_waiting, engine.own.num_running) == (1, 1)
    assert engine.step().request_ids == ()
    assert engine.own.reason("b") == "no_slot"
    engine.end("a")
    assert engine.step().request_ids == ("b",)
    assert engine.own.counts == {"admitted": 2, "decisions": 3}


def test_a_request_that_waits_for_its_adapter_or_grammar_is_no_candidate() -> None:
    engine = FakeEngine()
    engine.unready = {"a"}
    engine.ask(arrival("a", waits_for=1))
    engine.ask(arrival("b"))
    assert engine.step().request_ids == ("b",)
    assert engine.own.reason("a") == "not_ready"
    engine.unready = set()
    assert engine.step().request_ids == ("a",)


@pytest.mark.parametrize("policy", ["bounded", "mlq", "fcfs", "fair"])
def test_who_has_lost_its_adapter_again_takes_nobodys_place(policy: str) -> None:
    """It was let in, had no room, and then another request's adapter took the memory of its own."""
    engine = FakeEngine(policy, num_slots=1)
    engine.ask(arrival("runs"))
    engine.step()
    engine.ask(arrival("a", adapter_id=1, waits_for=1))
    engine.ask(arrival("b", adapter_id=1, waits_for=1))
    engine.ask(arrival("c"))
    assert engine.step().request_ids == ()
    engine.unready = {"a", "b"}
    engine.end("runs")
    assert engine.step().request_ids == ("c",)
    assert engine.own.reason("a") == "adapter_memory"
    engine.unready = set()
    engine.end("c")
    assert engine.step().request_ids == ("a",)


def test_requests_that_wait_for_the_same_cost_one_question_and_come_in_bounded_numbers() -> None:
    engine = FakeEngine(num_slots=1000)
    engine.unready = {"0"}
    for number in range(3 * MAX_READY):
        engine.ask(arrival(str(number), 1, waits_for="adapter"))
    asked: list[str] = []
    is_ready = engine.is_ready
    engine.is_ready = lambda request_id: asked.append(request_id) or is_ready(request_id)  # type: ignore[method-assign,func-returns-value]
    engine.begin()
    assert asked == ["0"]
    engine.unready = set()
    engine.begin()
    assert len(engine.own.unready) == 2 * MAX_READY


def test_who_was_to_start_and_did_not_waits_on() -> None:
    engine = FakeEngine()
    engine.ask(arrival("a"))
    engine.ask(arrival("b"))
    assert engine.step(num_refused=1).request_ids == ("a", "b")
    assert engine.running == ["a"]
    assert engine.step().request_ids == ("b",)


def test_who_was_preempted_comes_again_as_swapped_with_what_it_was_charged() -> None:
    engine = FakeEngine("fair")
    engine.ask(arrival("a", p50=4))
    for _ in range(6):
        engine.step()
    engine.preempt("a")
    known = engine.own.known("a")
    assert known is not None and known.base.is_swapped and known.started_s is None
    assert known.base.size_tokens == 16 + 16, "its guess of 4 was outgrown, so its p90 counts"
    assert engine.own.counts["preempted"] == 1
    assert engine.step().request_ids == ("a",)


def test_who_was_squashed_does_not_go_before_the_head_that_it_made_room_for() -> None:
    engine = FakeEngine()
    engine.ask(arrival("a"))
    engine.step()
    engine.own.squashed("a")
    engine.preempt("a")
    known = engine.own.known("a")
    assert known is not None and not known.base.is_swapped and known.base.times_squashed == 1
    assert engine.own.counts["squashed"] == engine.own.counts["preempted"] == 1
    engine.own.squashed("a")
    assert engine.own.counts["squashed"] == 1, "it does not run"


def test_a_charge_grows_to_the_ninetieth_percentile_and_then_doubles() -> None:
    engine = FakeEngine("mlq")
    engine.ask(arrival("a", 10, guess=LengthGuess(2, 5, "test")))
    charges = []
    for _ in range(22):
        engine.step()
        known = engine.own.known("a")
        assert known is not None
        charges.append(known.charged_tokens - 10)
    assert charges == [2] * 2 + [5] * 3 + [10] * 5 + [20] * 10 + [40] * 2
    assert isinstance(engine.own.policy, Mlq) and engine.own.policy.ledger.num_used == 50


def test_a_head_that_was_passed_knows_how_often() -> None:
    engine = FakeEngine("mlq")
    for number in range(40):  # so that there may be squashes
        engine.ask(arrival(f"past{number}", 1, 1))
        engine.step()
        engine.end(f"past{number}")
    engine.ask(arrival("runs", 300, 200))
    engine.step()
    engine.ask(arrival("head", 340, 5, priority=-1))
    engine.ask(arrival("small", 1, 1))
    assert engine.step().request_ids == ("small",)
    head, small = engine.own.known("head"), engine.own.known("small")
    assert head is not None and head.base.times_bypassed == engine.own.counts["bypassed"] == 1
    assert small is not None and small.is_bypasser and engine.own.reason("head") == "no_blocks"


def test_facts_that_cost_much_are_asked_for_once_a_second() -> None:
    engine = FakeEngine(num_slots=1)
    engine.ask(arrival("a"))
    engine.step()
    engine.ask(arrival("b"))
    before = engine.num_looks
    for _ in range(10):
        engine.step(step_s=CACHED_FOR_S / 20, num_tokens=0)
    assert engine.num_looks == before + 1
    engine.cached["b"] = 12
    engine.now += CACHED_FOR_S
    engine.step()
    known = engine.own.known("b")
    assert known is not None
    assert known.base.is_warm and known.base.num_prefill_tokens == 4 and engine.num_looks == before + 2


def test_an_adapter_without_memory_keeps_its_request_waiting() -> None:
    engine = FakeEngine()
    engine.free_adapter_bytes, engine.missing_bytes = 10, {7: 11}
    engine.ask(arrival("a", adapter_id=7))
    assert engine.step().request_ids == () and engine.own.reason("a") == "adapter_memory"
    engine.missing_bytes = {7: 10}
    assert engine.step().request_ids == ("a",)


def test_vllms_victims_stay_and_ours_spare_who_came_first() -> None:
    for policy, expected in (("fcfs", None), ("fair", ["a", "c", "b"])):
        engine = FakeEngine(policy)
        for name, num_tokens in (("a", 100), ("b", 90), ("c", 10)):
            engine.ask(arrival(name, num_tokens))
            engine.now += 0.5
            engine.step()
        progress = [(each, engine.tokens.get(each, 1), 0) for each in ("c", "b", "a", "unknown")]
        assert engine.own.victims(progress, engine.now) == expected
        assert engine.own.victims(progress[:1], engine.now) is None


def test_only_answers_that_ended_by_themselves_tell_of_lengths() -> None:
    engine = FakeEngine()
    for name, is_finished, is_background in (("a", True, False), ("b", False, False), ("c", True, True)):
        engine.ask(arrival(name, is_background=is_background))
        engine.step()
        engine.end(name, is_finished)
    assert engine.own.guess_errors.num_answers == 1


def test_a_request_comes_once() -> None:
    engine = FakeEngine()
    engine.ask(arrival("a"))
    with pytest.raises(ValueError, match="known already"):
        engine.ask(arrival("a"))
    engine.own.ended("b", 0, True, 0.0)
    engine.own.preempted("b")
    assert engine.own.num_waiting == 1


def test_a_step_is_as_long_as_its_target_allows_and_long_prompts_wait_for_a_free_one() -> None:
    table = StepTable.of(
        lambda points: [p * 0.001 + d * 0.001 for p, d, _ in points], (0, 4096), (0, 64), (0, 4096)
    )
    engine = FakeEngine(num_slots=8, pacer=Pacer(table, 0.2, 1000))
    engine.ask(arrival("long", 300))
    engine.ask(arrival("short", 20))
    plan = engine.step()
    assert plan.request_ids == ("long",), "too long for any step, so it begins alone"
    assert plan.bounds is not None and plan.bounds.num_tokens == 200
    assert engine.own.reason("short") == "step_full"
    known = engine.own.known("short")
    assert known is not None and known.base.times_deferred == 1


# -- what the policy is fed ----------------------------------------------------------------------------------------------


def facts(engine: FakeEngine, name: str) -> Waiting:
    known = engine.own.known(name)
    assert known is not None
    return known.base


def test_sizes_differ_from_the_first_request_on() -> None:
    engine = FakeEngine("mlq", num_slots=0)
    engine.ask(arrival("large", 400, 300, rank=64))
    engine.ask(arrival("small", 4, 30))
    engine.ask(arrival("adapter", 4, 30, rank=8))
    sizes = [facts(engine, name).weighted_size for name in ("small", "adapter", "large")]
    assert sizes == sorted(sizes) and len({round(size, 3) for size in sizes}) == 3
    assert sizes[-1] == pytest.approx(1.0) and sizes[0] < 0.1


def test_lanes_are_fitted_within_the_first_requests_and_not_after_a_minute() -> None:
    engine = FakeEngine("mlq")
    for number in range(MIN_SIZES):
        engine.ask(arrival(str(number), 4 if number % 2 else 400))
    for _ in range(3):
        engine.step()
    assert engine.own.laned is not None and engine.own.laned.lanes.num_lanes == 2


def test_what_computes_ahead_says_nothing_of_lanes_lengths_or_speed() -> None:
    engine = FakeEngine("mlq")
    for number in range(2 * MIN_SIZES):
        engine.ask(arrival(str(number), 1 + 20 * number % 300, 1, is_background=True))
        engine.step()
        engine.end(str(number))
    engine.step()
    assert engine.own.counts["refits"] == 0 and engine.own.token_s == PRIOR_TOKEN_S
    assert engine.own.sizes.scale.max_input_tokens == 1


def test_an_adapter_among_the_tokens_is_charged_and_grows_no_more() -> None:
    engine = FakeEngine("mlq")
    engine.ask(arrival("a", 10, guess=LengthGuess(2, 5, "test"), adapter_tokens=100))
    assert facts(engine, "a").size_tokens == 112
    for _ in range(4):
        engine.step()
    assert isinstance(engine.own.policy, Mlq) and engine.own.policy.ledger.num_used == 115


def test_a_run_is_predicted_with_its_own_prefill_and_without_what_is_cached() -> None:
    engine = FakeEngine(num_slots=1, prefill_s=lambda num_tokens: num_tokens * 0.01)
    engine.ask(arrival("first", p50=10))
    engine.ask(arrival("a", 400, 10))
    engine.cached["a"] = 300
    assert facts(engine, "a").duration_s == pytest.approx(4.0 + 10 * PRIOR_TOKEN_S)
    engine.step()
    assert facts(engine, "a").duration_s == pytest.approx(1.0 + 10 * PRIOR_TOKEN_S)


def test_an_end_moves_on_when_the_answer_outgrows_its_guess_and_what_was_promised_stays() -> None:
    engine = FakeEngine("mlq")
    engine.ask(arrival("a", 10, guess=LengthGuess(2, 50, "test")))
    engine.step()
    running = engine.own.running_facts["a"]
    assert running.predicted_end_s == running.due_s == pytest.approx(2 * PRIOR_TOKEN_S)
    for _ in range(3):
        engine.step()
    running = engine.own.running_facts["a"]
    assert running.due_s == pytest.approx(2 * PRIOR_TOKEN_S)
    assert running.predicted_end_s == pytest.approx(0.2 + 48 * PRIOR_TOKEN_S), "two were there at 0.2 s"


def test_the_speed_of_answers_is_told_without_their_prefill() -> None:
    engine = FakeEngine()
    engine.ask(arrival("a"))
    engine.step(num_tokens=0, step_s=5.0)  # its prompt
    for _ in range(11):
        engine.step(step_s=0.1)
    engine.step(num_tokens=0, step_s=0.0)
    engine.end("a")
    assert engine.own.token_s == pytest.approx(PRIOR_TOKEN_S + 0.1 * (0.1 - PRIOR_TOKEN_S), rel=1e-3)


# -- pauses ------------------------------------------------------------------------------------------------------------


def pauses(num_in_time: int = 2) -> Pauses:
    """So many may decode while an urgent request does, itself among them."""
    return Pauses(lambda num_requests, num_tokens: 0.1 * num_requests, 0.1 * num_in_time + 0.05)


MINDFUL = ["priority", "fair", "mlq"]


@pytest.mark.parametrize("policy", MINDFUL)
def test_others_stand_while_an_urgent_request_decodes_and_go_on_after_it_the_oldest_first(
    policy: str,
) -> None:
    engine = FakeEngine(policy, num_slots=8, pauses=pauses())
    for name in "abc":
        engine.ask(arrival(name))
        engine.step()
    engine.ask(arrival("urgent", priority=-1))
    assert engine.step().request_ids == ("urgent",)
    assert set(engine.step().pause) == {"b", "c"}
    assert engine.running == ["a", "urgent"]
    assert [engine.own.reason(name) for name in "bc"] == ["paused", "paused"]
    assert engine.own.counts["paused"] == 2 and engine.own.num_waiting == 2
    assert engine.step() == StepPlan()
    engine.end("urgent")
    assert engine.step().request_ids == ("b", "c")
    assert engine.own.counts["resumed"] == 2 and not engine.own.pauses.is_on


@pytest.mark.parametrize("policy", MINDFUL)
def test_what_would_be_paused_at_once_does_not_start_and_says_why(policy: str) -> None:
    engine = FakeEngine(policy, num_slots=8, pauses=pauses())
    engine.ask(arrival("urgent", priority=-1))
    engine.step()
    for name in "ab":
        engine.ask(arrival(name))
    assert engine.step().request_ids == ("a",)
    assert engine.own.reason("b") == "paused"
    engine.ask(arrival("urgent too", priority=-1))
    assert engine.step().request_ids == ("urgent too",)
    for name in ("urgent", "urgent too"):
        engine.end(name)
    assert engine.step().request_ids == ("b",)


def test_nobody_stands_for_longer_than_it_has_run_and_a_moment_however_many_urgent_ones_come() -> None:
    engine = FakeEngine("mlq", num_slots=8, pauses=pauses(1))
    engine.ask(arrival("a", p50=8))
    for _ in range(20):
        engine.step()
    ran_s, stood_s = 2.0, 0.0
    for number in range(200):
        engine.ask(arrival(f"urgent{number}", p50=8, priority=-1))
        if number > 1:
            engine.end(f"urgent{number - 2}")
        engine.step()
        ran_s, stood_s = (ran_s + 0.1, stood_s) if "a" in engine.running else (ran_s, stood_s + 0.1)
        assert stood_s <= ran_s + GRACE_S + 0.25, "a step later at most"
    assert stood_s > GRACE_S + 3.0


def test_one_that_is_kept_from_starting_starts_after_a_moment() -> None:
    engine = FakeEngine("mlq", num_slots=8, pauses=pauses(1))
    engine.ask(arrival("urgent", p50=200, priority=-1))
    engine.step()
    engine.ask(arrival("a"))
    plans = [engine.step().request_ids for _ in range(25)]
    assert plans[:20] == [()] * 20 and ("a",) in plans


def test_one_that_is_given_up_while_it_stands_is_forgotten() -> None:
    engine = FakeEngine("mlq", num_slots=8, pauses=pauses(1))
    engine.ask(arrival("a"))
    engine.step()
    engine.ask(arrival("urgent", priority=-1))
    engine.step()
    engine.step()
    assert engine.own.reason("a") == "paused"
    engine.end("a", is_finished=False)
    engine.own.check_invariants()
    engine.end("urgent")
    assert engine.step() == StepPlan() and not engine.own.pauses.is_on


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_a_policy_that_minds_no_priority_pauses_nobody(policy: str) -> None:
    engine = FakeEngine(policy, num_slots=8, pauses=pauses(1))
    for name, priority in (("a", 0), ("urgent", -1)):
        engine.ask(arrival(name, priority=priority))
    assert [engine.step().pause for _ in range(3)] == [(), (), ()]
    assert not engine.own.pauses.is_on


def test_without_urgent_requests_nobody_is_asked_what_steps_take() -> None:
    def decode_s(num_requests: int, num_tokens: int) -> float:
        raise AssertionError("asked")

    engine = FakeEngine("mlq", num_slots=2, pauses=Pauses(decode_s, 0.1))
    for name in "abcd":
        engine.ask(arrival(name, priority=1))
    for _ in range(5):
        engine.step()
    engine.preempt("a")
    engine.step()


def test_prompts_of_others_get_the_time_that_an_urgent_request_s_slo_leaves_in_a_step() -> None:
    table = StepTable.of(
        lambda points: [p * 0.001 + d * 0.001 for p, d, _ in points], (0, 4096), (0, 64), (0, 4096)
    )
    own = Pauses(lambda num_requests, num_tokens: table.step_s(0, num_requests, num_tokens), 0.1)
    engine = FakeEngine("mlq", num_slots=8, pacer=Pacer(table, 0.5, 1000), pauses=own)
    engine.ask(arrival("urgent", priority=-1))
    engine.step()
    engine.step()
    plan = engine.step()
    assert plan.bounds is not None and plan.bounds.num_tokens == 100
    engine.end("urgent")
    plan = engine.step()
    assert plan.bounds is not None and plan.bounds.num_tokens == 500


# -- any calls ---------------------------------------------------------------------------------------------------------


class DispatcherMachine(RuleBasedStateMachine):
    """Nothing is lost or doubled, whatever happens in whatever order; everybody who starts had waited."""

    @initialize(policy=st.sampled_from(["fcfs", "sjf", "priority", "fair", "mlq"]))
    def begin(self, policy: str) -> None:
        self.engine = FakeEngine(policy, pauses=pauses())
        self.alive: set[str] = set()
        self.num = 0

    @rule(
        num_prompt=st.integers(1, 500),
        p50=st.integers(1, 200),
        fields=st.fixed_dictionaries(
            {
                "priority": st.integers(-1, 1),
                "tenant": st.sampled_from("ab"),
                "adapter_id": st.none() | st.integers(0, 2),
            }
        ),
        is_ready=st.booleans(),
    )
    def ask(self, num_prompt: int, p50: int, fields: dict[str, Any], is_ready: bool) -> None:
        name = str(self.num)
        self.num += 1
        if not is_ready:
            self.engine.unready.add(name)
        self.engine.ask(arrival(name, num_prompt, p50, waits_for=fields["adapter_id"], rank=8, **fields))
        self.alive.add(name)

    @rule()
    def make_ready(self) -> None:
        self.engine.unready = set()

    @rule(num_refused=st.integers(0, 2), num_tokens=st.integers(0, 60), step_s=st.floats(0, 30))
    def step(self, num_refused: int, num_tokens: int, step_s: float) -> None:
        waited = self.alive - set(self.engine.running)
        plan = self.engine.step(min(num_refused, 1), num_tokens, step_s)
        assert waited >= set(plan.request_ids), "started without having waited"
        assert len(set(plan.request_ids)) == len(plan.request_ids), "started twice"
        assert not self.engine.unready & set(plan.request_ids), "started before it could"

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), is_finished=st.booleans())
    def end(self, data: st.DataObject, is_finished: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.engine.end(name, is_finished and name in self.engine.running)
        self.alive.remove(name)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), is_squash=st.booleans())
    def preempt(self, data: st.DataObject, is_squash: bool) -> None:
        name = data.draw(st.sampled_from(self.engine.running))
        if is_squash:
            self.engine.own.squashed(name)
        self.engine.preempt(name)

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.engine.now += seconds

    @invariant()
    def nothing_is_lost(self) -> None:
        own, engine = self.engine.own, self.engine
        own.check_invariants()
        assert own.num_running == len(engine.running)
        assert set(own.waiting_ids()) == self.alive - set(engine.running)
        if isinstance(own.policy, Mlq):
            own.policy.check_invariants()
            assert len(own.policy.ledger) == len(engine.running)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.unready = set()
        for _ in range(10 * self.num + 10):
            for name in list(self.engine.running):
                self.engine.end(name)
            self.engine.step(num_tokens=0)
        assert self.engine.own.num_waiting == 0, "somebody waits for ever"


TestDispatcher = DispatcherMachine.TestCase
TestDispatcher.settings = settings(max_examples=60, stateful_step_count=30)


def test_nobody_holds_more_tokens_than_there_are() -> None:
    engine = FakeEngine("mlq", num_slots=40)
    for number in range(40):
        engine.ask(arrival(str(number), 60, 10))
    engine.step()
    assert isinstance(engine.own.policy, Mlq)
    assert engine.own.policy.ledger.num_used <= NUM_TOKENS
