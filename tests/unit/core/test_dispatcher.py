"""A request's life in the queue, without an engine."""

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_bridge.core.scheduling.dispatcher import PRIOR_TOKEN_S, StepPlan
from engine_bridge.core.scheduling.pacer import Pacer
from engine_bridge.core.scheduling.pauses import Pauses
from engine_bridge.policy.costs.costs import StepTable
from engine_bridge.policy.scheduling.mlq import Mlq, MlqSettings
from engine_bridge.policy.scheduling.pausing import GRACE_S
from engine_bridge.policy.scheduling.policies import POLICIES
from engine_bridge.policy.scheduling.queue_policy import Decision, Running, StepRoom, Waiting

from .fake_engine import NUM_TOKENS, FakeEngine, arrival


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


@pytest.mark.parametrize("policy", ["fcfs", "bounded"])
def test_while_an_adapter_is_held_back_its_requests_keep_their_place(policy: str) -> None:
    engine = FakeEngine(policy, num_slots=1)
    engine.ask(arrival("first"))
    engine.step()
    engine.held_back = {1}
    engine.ask(arrival("early", adapter_id=1, waits_for=1))
    engine.ask(arrival("late"))
    engine.step()
    engine.ask(arrival("last"))
    engine.end("first")
    assert engine.step().request_ids == ("late",)
    engine.held_back = set()
    engine.end("late")
    assert engine.step().request_ids == ("early",)


def test_who_was_squashed_does_not_go_before_the_head_that_it_made_room_for() -> None:
    engine = FakeEngine()
    engine.ask(arrival("a"))
    engine.step()
    engine.own.squashed("a")
    engine.preempt("a")
    known = engine.own.known("a")
    assert known is not None and not known.facts.is_swapped and known.facts.times_squashed == 1
    assert engine.own.counts["squashed"] == engine.own.counts["preempted"] == 1
    engine.own.squashed("a")
    assert engine.own.counts["squashed"] == 1, "it does not run"


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
    assert head is not None and head.facts.times_bypassed == engine.own.counts["bypassed"] == 1
    assert small is not None and small.is_bypasser and engine.own.reason("head") == "no_blocks"


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


def step_table() -> StepTable:
    """A millisecond for each token of a prompt and each decode."""
    axes = ((0, 4096), (0, 64), (0, 4096))
    return StepTable.of(lambda points: [p * 0.001 + d * 0.001 for p, d, _ in points], *axes)


def test_a_step_is_as_long_as_its_target_allows_and_long_prompts_wait_for_a_free_one() -> None:
    engine = FakeEngine(num_slots=8, pacer=Pacer(step_table(), 0.2, 1000))
    engine.ask(arrival("long", 300))
    engine.ask(arrival("short", 20))
    plan = engine.step()
    assert plan.request_ids == ("long",), "too long for any step, so it begins alone"
    assert plan.bounds is not None and plan.bounds.num_tokens == 200
    assert engine.own.reason("short") == "step_full"
    known = engine.own.known("short")
    assert known is not None and known.facts.times_deferred == 1


def test_the_speed_of_answers_is_told_without_their_prefill() -> None:
    engine = FakeEngine()
    engine.ask(arrival("a"))
    engine.step(num_tokens=0, step_s=5.0)  # its prompt
    for _ in range(11):
        engine.step(step_s=0.1)
    engine.step(num_tokens=0, step_s=0.0)
    engine.end("a")
    assert engine.own.token_s == pytest.approx(PRIOR_TOKEN_S + 0.1 * (0.1 - PRIOR_TOKEN_S), rel=1e-3)


def pauses(num_in_time: int = 2) -> Pauses:
    """So many may decode while an urgent request does, itself among them."""
    return Pauses(lambda num_requests, num_tokens: 0.1 * num_requests, 0.1 * num_in_time + 0.05)


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


def test_prompts_of_others_get_the_time_that_an_urgent_request_s_slo_leaves_in_a_step() -> None:
    table = step_table()
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


def told_to_both(name: str) -> Callable[..., None]:
    """A method that tells a policy and its twin."""

    def tell(policy: Any, *facts: Any) -> None:
        getattr(Mlq, name)(policy, *facts)
        getattr(policy.twin, name)(*facts)

    return tell


class CheckedMlq(Mlq):
    """Checks each decision. Its twin is told the same, but gets new lanes at once, when this one has placed all requests in them."""

    def __init__(self, num_tokens: int, settings: MlqSettings | None = None) -> None:
        super().__init__(num_tokens, settings)
        self.twin = Mlq(num_tokens, settings)
        self.fitted: tuple[Any, ...] = ()

    arrived, admitted, outgrew = told_to_both("arrived"), told_to_both("admitted"), told_to_both("outgrew")
    ended, squashed = told_to_both("ended"), told_to_both("squashed")

    def begin_refit(self, *fitted: Any) -> None:
        super().begin_refit(*fitted)
        self.fitted = fitted

    def advance_refit(self, max_requests: int) -> bool:
        is_done = super().advance_refit(1)  # so that a refit takes several steps
        if is_done and self.fitted:
            self.twin.begin_refit(*self.fitted)
            self.twin.advance_refit(1_000)
            self.fitted = ()
        return is_done

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: StepRoom, now: float
    ) -> Decision:
        self.check_invariants()
        decision = super().decide(waiting, running, room, now)
        assert decision == super().decide(waiting, running, room, now), "state changed"
        assert decision == self.twin.decide(waiting, running, room, now), "half of a refit counts"
        ids = decision.request_ids
        chosen = [waiting[name] for name in ids]
        assert len(set(ids)) == len(ids) <= room.num_slots and not set(ids) & set(decision.deferred)
        assert not chosen or sum(facts.num_blocks for facts in chosen) <= room.free_blocks
        tokens = sum(min(facts.size_tokens, NUM_TOKENS) for facts in chosen)
        assert not tokens or self.ledger.num_used + tokens <= NUM_TOKENS + room.overcharged_tokens
        assert set(decision.bypassed) <= set(ids)
        assert all(running[name].is_bypasser for name in decision.squash)
        overdue = [name for at_s, name in self._arrivals if now - at_s >= self.settings.max_wait_s]
        assert list(ids[: len(overdue)]) == overdue[: len(ids)], "one was passed"
        return decision


class DispatcherMachine(RuleBasedStateMachine):
    """Nothing is lost or doubled, whatever happens in whatever order; everybody who starts had waited."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, policy: str) -> None:
        self.engine = FakeEngine(CheckedMlq(NUM_TOKENS) if policy == "mlq" else policy, pauses=pauses())
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

    @rule(adapter_ids=st.sets(st.integers(0, 2)))
    def hold_back(self, adapter_ids: set[int]) -> None:
        self.engine.held_back = adapter_ids

    @rule(num_refused=st.integers(0, 2), num_tokens=st.integers(0, 60), step_s=st.floats(0, 30))
    def step(self, num_refused: int, num_tokens: int, step_s: float) -> None:
        waited = self.alive - set(self.engine.running)
        plan = self.engine.step(min(num_refused, 1), num_tokens, step_s)
        assert waited >= set(plan.request_ids), "started without having waited"
        assert len(set(plan.request_ids)) == len(plan.request_ids), "started twice"
        assert not self.engine.unready & set(plan.request_ids), "started before it could"
        adapter_ids = {self.engine.own.known(name).facts.adapter_id for name in plan.request_ids}
        assert not self.engine.held_back & adapter_ids, "started before its turn"

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
        self.engine.unready, self.engine.held_back = set(), set()
        for _ in range(10 * self.num + 10):
            for name in list(self.engine.running):
                self.engine.end(name)
            self.engine.step(num_tokens=0)
        assert self.engine.own.num_waiting == 0, "somebody waits for ever"


TestDispatcher = DispatcherMachine.TestCase
TestDispatcher.settings = settings(max_examples=60, stateful_step_count=30)


MAX_WAIT_S, STEP_S, STEP_TOKENS = 5.0, 0.1, 5


class Job(NamedTuple):
    """A request as it will turn out to be. guess: tokens of its answer, as predicted."""

    name: str
    arrived_s: float
    num_prompt: int
    num_output: int
    guess: int
    fields: dict[str, Any]

    @property
    def most_tokens(self) -> int:
        """That it may ever be charged."""
        return self.num_prompt + max(4 * self.guess, 2 * self.num_output)


@st.composite
def traffic(draw: st.DrawFn) -> list[Job]:
    """Bursts, in which predictions are wrong by up to ten times either way."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    num, burst_s = draw(st.integers(1, 40)), draw(st.sampled_from([0.0, 5.0, 30.0]))
    jobs = []
    for at in range(num):
        num_output = rng.choice([5, 20, 100, 200])
        guess = max(int(num_output * 10 ** rng.uniform(-1, 1)), 1)
        fields: dict[str, Any] = {"priority": rng.choice([0, 0, 0, 1, -1]), "tenant": rng.choice("ab")}
        fields["weight"] = rng.choice([0.5, 1.0, 1.0, 4.0])
        jobs.append(
            Job(f"{at:02d}", rng.uniform(0, burst_s), rng.choice([10, 50, 300]), num_output, guess, fields)
        )
    return jobs


class Played:
    """What became of some jobs on an engine: when each started first, and by when it had to at the latest."""

    def __init__(self, engine: FakeEngine, jobs: list[Job]) -> None:
        self.engine, self.plans = engine, list[StepPlan]()
        self.started_s: dict[str, float] = {}
        self.overdue_s: dict[str, float] = {}
        self.deadline_s: dict[str, float] = {}
        self.longest_s = STEP_S * (max(job.num_output for job in jobs) / STEP_TOKENS + 2)
        by_name = {job.name: job for job in jobs}
        todo, self.asked = by_name.copy(), list[Job]()
        while todo or engine.tokens:
            assert engine.now < 2_000, "some wait for ever"
            # Of those that come in one step, the name decides.
            for name in sorted(name for name, job in todo.items() if job.arrived_s <= engine.now):
                self.ask(todo.pop(name))
            self.note_overdue()
            now = engine.now
            self.plans.append(engine.step(num_tokens=STEP_TOKENS, step_s=STEP_S))
            for name in self.plans[-1].request_ids:
                self.started_s.setdefault(name, now)
            for name in list(engine.running):
                if engine.tokens[name] - engine.prompts[name] >= by_name[name].num_output:
                    engine.end(name)

    def ask(self, job: Job) -> None:
        self.engine.cached[job.name] = job.num_prompt * (len(self.asked) % 3 == 0)  # some are warm
        self.engine.ask(arrival(job.name, job.num_prompt, job.guess, **job.fields))
        self.asked.append(job)
        self.overdue_s[job.name] = self.engine.now + MAX_WAIT_S

    def note_overdue(self) -> None:
        """By the bound for engines that preempt: all that came before it, and all that runs, one after the other."""
        waiting = self.engine.own.waiting_ids()
        for num_older, name in enumerate(waiting):
            if self.engine.now >= self.overdue_s[name] and name not in self.deadline_s:
                num = num_older + self.engine.own.num_running
                self.deadline_s[name] = self.engine.now + num * self.longest_s + STEP_S


def bounded_mlq() -> Mlq:
    return CheckedMlq(NUM_TOKENS, MlqSettings(max_wait_s=MAX_WAIT_S, aging_s=2.0, squash_share=0.5))


@settings(max_examples=40, deadline=None)
@given(traffic())
def test_nobody_waits_beyond_the_bound_where_the_engine_preempts(jobs: list[Job]) -> None:
    engine = FakeEngine(bounded_mlq(), num_slots=8)
    played = Played(engine, jobs)
    for name, started_s in played.started_s.items():
        assert started_s <= played.deadline_s.get(name, played.overdue_s[name] + STEP_S)
    assert engine.own.counts["squashed"] <= 0.5 * engine.own.counts["admitted"]


@settings(max_examples=40, deadline=None)
@given(traffic())
def test_nobody_waits_beyond_the_bound_where_memory_is_ample(jobs: list[Job]) -> None:
    played = Played(FakeEngine(bounded_mlq(), num_slots=4, num_blocks=10_000), jobs)
    for at, job in enumerate(played.asked):
        overdue_s = played.overdue_s[job.name]
        older = [each for each in played.asked[: at + 1] if played.started_s[each.name] >= overdue_s]
        num_groups, slots, tokens = 1, 4, NUM_TOKENS  # how many times the older ones and itself fill the room
        for each in older:
            needed = min(each.most_tokens, NUM_TOKENS)
            if slots < 1 or tokens < needed:
                num_groups, slots, tokens = num_groups + 1, 4, NUM_TOKENS
            slots, tokens = slots - 1, tokens - needed
        assert played.started_s[job.name] <= overdue_s + STEP_S + num_groups * played.longest_s


@settings(max_examples=30, deadline=None)
@given(traffic(), st.sampled_from(sorted(POLICIES)))
def test_every_request_ends_under_every_policy_and_decisions_repeat(jobs: list[Job], name: str) -> None:
    assert Played(FakeEngine(name), jobs).plans == Played(FakeEngine(name), jobs).plans
