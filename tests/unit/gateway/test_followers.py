"""Who follows whom: planted graphs are found, noise is not taken for one, nothing grows without bound, and what is learned is kept."""

import asyncio
import math
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.advisories.followers import MAX_GAP_S, AgentCall, Followers, LikelyCall, SavedOwner
from gateway.advisories.learned import Learned
from gateway.advisories.learned_file import NAME
from gateway.advisories.precision import HALF_LIFE_S, PRIOR, Precision
from gateway.advisories.waste import WasteBudget, worth

from .parts import Clock, Parts

SIGMA = 0.5
Z90 = 1.2816  # the normal distribution's 90% quantile


def arrival(agent: str, run: str = "r", owner: str = "o", session: str | None = None) -> AgentCall:
    """A request of a named run whose session ids carry the run and the agent."""
    return AgentCall(owner, run, agent, f"{run}:{agent}" if session is None else session, f"lora-{agent}")


def serve(followers: Followers, request: AgentCall, at_s: float, took_s: float = 1.0) -> float:
    """Let a request come and end. Returns its end."""
    followers.note(request, at_s)
    followers.ended(request, at_s + took_s)
    return at_s + took_s


def run_chain(followers: Followers, chain: Iterable[str], run: str, at_s: float, gap_s: float = 5.0) -> float:
    for agent in chain:
        at_s = serve(followers, arrival(agent, run), at_s) + gap_s
    return at_s


def learned(chain: Iterable[str], num_runs: int = 30) -> tuple[Followers, float]:
    """A learner that has seen the chain in several runs, and a time after them."""
    followers, now = Followers(), 0.0
    names = list(chain)
    for i in range(num_runs):
        now = run_chain(followers, names, f"run{i}", now)
    return followers, now


def num_agents(followers: Followers, owner: str) -> int:
    return sum(len(saved.agents) for saved in followers.saved() if saved.name == owner)


def agents(guesses: Iterable[LikelyCall]) -> list[str]:
    return [guess.agent for guess in guesses]


def lognormal(median_s: float) -> Callable[[random.Random], float]:
    return lambda rng: rng.lognormvariate(math.log(median_s), SIGMA)


def test_a_chain_is_learned_with_its_gaps() -> None:
    rng, followers, now = random.Random(0), Followers(), 0.0
    gaps_s = {"B": lognormal(4.0), "C": lognormal(40.0)}
    for i in range(100):
        now = serve(followers, arrival("A", f"run{i}"), now, rng.uniform(1, 30))
        for agent in "BC":
            now = serve(followers, arrival(agent, f"run{i}"), now + gaps_s[agent](rng), rng.uniform(1, 30))
        now += 100.0
    for before, after, median_s in [("A", "B", 4.0), ("B", "C", 40.0)]:
        request = arrival(before, "last")
        end_s = serve(followers, request, now, 12.0)
        guess = followers.expected(request, end_s)[0]
        assert (guess.agent, guess.session_id, guess.adapter) == (after, f"last:{after}", f"lora-{after}")
        assert guess.probability > 0.9
        assert guess.earliest_s == pytest.approx(median_s * math.exp(-SIGMA * Z90), rel=0.5)
        assert guess.latest_s == pytest.approx(median_s * math.exp(SIGMA * Z90), rel=0.5)
    last = arrival("C", "last")
    assert followers.expected(last, serve(followers, last, now + 60)) == []


def test_agents_that_start_together_follow_the_same_one_and_who_waits_for_them_follows_each() -> None:
    rng, followers, now = random.Random(2), Followers(), 0.0
    for i in range(20):
        now = serve(followers, arrival("plan", f"run{i}"), now)
        ends_s = {agent: now + rng.uniform(5, 9) for agent in rng.sample(["code", "docs", "lint"], 3)}
        for agent in ends_s:
            followers.note(arrival(agent, f"run{i}"), now)
        for agent in sorted(ends_s, key=lambda agent: ends_s[agent]):
            followers.ended(arrival(agent, f"run{i}"), ends_s[agent])
        now = serve(followers, arrival("test", f"run{i}"), max(ends_s.values()) + 1)
    now = serve(followers, arrival("plan", "last"), now)
    guesses = followers.expected(arrival("plan", "last"), now)
    assert sorted(agents(guesses)) == ["code", "docs", "lint", "test"]
    assert all(guess.probability > 0.9 for guess in guesses)
    followers.note(arrival("docs", "last"), now)
    assert sorted(agents(followers.expected(arrival("plan", "last"), now))) == ["code", "lint", "test"]
    for agent in ("code", "lint"):
        followers.note(arrival(agent, "last"), now)
    for agent in ("code", "docs", "lint"):
        (guess,) = followers.expected(arrival(agent, "last"), now)
        assert guess.agent == "test" and guess.probability > 0.85


def test_concurrent_runs_are_told_apart() -> None:
    rng, followers = random.Random(1), Followers()
    starts_s = {f"run{i}": rng.uniform(0, 300) for i in range(100)}  # forty runs at any time
    events = sorted(
        (start_s + i * 60, agent, run) for run, start_s in starts_s.items() for i, agent in enumerate("ABC")
    )
    for at_s, agent, run in events:
        serve(followers, arrival(agent, run), at_s)
    serve(followers, arrival("A", "last"), 500.0)
    assert agents(followers.expected(arrival("A", "last"), 501.0)) == ["B", "C"]
    serve(followers, arrival("C", "run3"), 502.0)
    assert followers.expected(arrival("C", "run3"), 503.0) == []


def test_a_chat_sessions_next_turn_is_expected_from_those_of_others() -> None:
    followers, now = Followers(), 0.0
    for i in range(20):
        for _ in range(5):
            now = serve(followers, AgentCall("o", "", "", f"chat{i}"), now, 2.0) + 30
    turn = AgentCall("o", "", "", "new chat", "mine")
    (guess,) = followers.expected(turn, serve(followers, turn, now, 2.0))
    assert (guess.session_id, guess.adapter) == ("new chat", "mine")
    assert guess.probability > 0.8
    assert (guess.earliest_s, guess.latest_s) == pytest.approx((30.0, 30.0))
    other = AgentCall("o", "", "", "another chat")
    (guess,) = followers.expected(turn, serve(followers, other, now, 2.0))
    assert guess.session_id == "new chat"


def test_a_follower_of_unknown_session_is_not_guessed() -> None:
    followers, now = Followers(), 0.0
    rng = random.Random(0)
    for i in range(20):
        for agent in "AB":
            now = serve(followers, arrival(agent, f"run{i}", session=f"{rng.getrandbits(64):x}"), now) + 5
    request = arrival("A", "last", session="5eed")
    assert followers.expected(request, serve(followers, request, now)) == []
    known = arrival("B", "last", session="b0b")
    now = serve(followers, known, now)
    request = arrival("A", "last", session="5eed")
    guesses = followers.expected(request, serve(followers, request, now))
    assert "b0b" not in [guess.session_id for guess in guesses]  # B has come once in each run
    now = run_chain(followers, "ABAB" * 5, "other", now)
    request = arrival("A", "other", session="5eed")
    guesses = followers.expected(request, serve(followers, request, now))
    # What it last used in this run.
    assert "other:B" in [guess.session_id for guess in guesses if guess.agent == "B"]
    for i in range(20):
        now = serve(followers, arrival("C", f"run{i}"), now) + 5
        now = serve(followers, arrival("D", f"run{i}", session=f"{rng.getrandbits(64):x}"), now) + 5
    request = arrival("C", "new")
    guesses = followers.expected(request, serve(followers, request, now))
    assert "D" not in agents(guesses), "its session is not named as C's"


@pytest.mark.parametrize("pattern", ["{agent}99", "7f{agent}", "7f{agent}99"])
def test_a_letter_within_a_word_is_no_agents_name(pattern: str) -> None:
    followers, now = Followers(), 0.0
    for i in range(10):
        for agent in "ab":
            session = f"{i}-" + pattern.format(agent=agent)
            now = serve(followers, AgentCall("o", f"run{i}", agent, session), now) + 5
    request = AgentCall("o", "last", "a", "last-" + pattern.format(agent="a"))
    assert followers.expected(request, serve(followers, request, now)) == []


def test_what_has_followed_is_not_expected_again_and_what_is_overdue_is_given_up() -> None:
    followers, now = learned("AB")
    now = serve(followers, arrival("A", "last"), now)
    assert agents(followers.expected(arrival("A", "last"), now + 4)) == ["B"]
    assert followers.expected(arrival("A", "last"), now + 6) == []
    followers.note(arrival("B", "last"), now + 2)
    assert followers.expected(arrival("A", "last"), now + 2) == []
    followers, now = learned("AB" * 5)
    now = serve(followers, arrival("A", "last"), run_chain(followers, "AB", "last", now))
    assert "B" in agents(followers.expected(arrival("A", "last"), now)), "it has come before, and comes again"
    followers.note(arrival("B", "last"), now)
    assert "B" not in agents(followers.expected(arrival("A", "last"), now))


def test_random_traffic_is_promised_as_surely_as_it_comes() -> None:
    rng, followers, now = random.Random(0), Followers(min_probability=0.0), 0.0
    said: list[float] = []
    for i in range(400):
        for step in range(10):
            request = arrival(rng.choice("VWXYZ"), f"run{i}")
            now = serve(followers, request, now) + rng.expovariate(1.0)
            if step == 6 and i >= 200:
                guesses = followers.expected(request, now)
                said += [guess.probability for guess in guesses if guess.agent == request.agent]
        now += 100
    assert len(said) > 150
    assert sum(said) / len(said) == pytest.approx(1 - 0.8**3, abs=0.1)


def test_a_run_that_goes_on_after_it_seemed_over_takes_back_what_was_counted() -> None:
    followers, now = Followers(), 0.0
    for i in range(20):
        now = run_chain(followers, "A" + "B" * 40, f"run{i}", now, gap_s=1.0) + 300
        now = serve(followers, arrival("C", f"other{i}"), now)  # finds that the run is silent
        now = serve(followers, arrival("A", f"run{i}"), now)
    now = serve(followers, arrival("A", "last"), now)
    guesses = followers.expected(arrival("A", "last"), now)
    assert {guess.agent: guess.probability for guess in guesses}["A"] > 0.85


def test_what_was_learned_is_the_same_after_a_restart() -> None:
    before, now = learned("ABCB")
    after = Followers()
    for owner in before.saved():
        after.restore(msgspec.json.decode(msgspec.json.encode(owner), type=SavedOwner))
    for followers in (before, after):
        serve(followers, arrival("A", "last"), now)
    guesses = after.expected(arrival("A", "last"), now + 1)
    assert guesses == before.expected(arrival("A", "last"), now + 1)
    assert agents(guesses) == ["B", "C"]
    assert num_agents(after, "o") == 3


Event = tuple[str, AgentCall, int]
names = st.sampled_from(["", "A", "B", "C", "run:A", "x"])
arrivals = st.builds(AgentCall, st.sampled_from("op"), st.sampled_from(["", "r", "s"]), names, names)
events = st.lists(st.tuples(st.sampled_from(["note", "ended"]), arrivals, st.integers(0, 4000)), max_size=50)


def play(followers: Followers, events: Iterable[Event]) -> Iterator[tuple[AgentCall, float]]:
    now = 0.0
    for kind, request, step_s in events:
        now += step_s / 100 if step_s < 3000 else step_s
        followers.note(request, now) if kind == "note" else followers.ended(request, now)
        yield request, now


@given(events, st.integers(1, 4), st.integers(1, 6))
def test_any_traffic_keeps_bounds(events: list[Event], max_agents: int, max_sessions: int) -> None:
    bounds = {"max_agents": max_agents, "max_sessions": max_sessions, "max_guesses": 2}
    followers = Followers(min_probability=0.0, **bounds)
    for request, now in play(followers, events):
        assert num_agents(followers, request.owner) <= max_agents
        assert followers.num_sessions(request.owner) <= max_sessions
        guesses = followers.expected(request, now)
        assert len(guesses) <= 2
        for guess in guesses:
            assert 0 <= guess.probability <= 1
            assert 0 <= guess.earliest_s <= guess.latest_s <= MAX_GAP_S * 2


@given(events)
def test_owners_do_not_learn_from_each_other(events: list[Event]) -> None:
    """One owner's guesses are what they are where the other was never there."""
    together, alone = Followers(min_probability=0.0), Followers(min_probability=0.0)
    played = list(play(together, events))
    for (kind, request, _), (_, now) in zip(events, played, strict=True):
        if request.owner == "o":
            alone.note(request, now) if kind == "note" else alone.ended(request, now)
    for request, now in played:
        if request.owner == "o":
            assert together.expected(request, now) == alone.expected(request, now)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 100), st.floats(0, 100))
def test_what_is_worth_it_stays_so_if_likelier(
    low: float, high: float, saved_s: float, cost_s: float
) -> None:
    low, high = sorted((low, high))
    assert worth(high, saved_s, cost_s) or not worth(low, saved_s, cost_s)


kinds = st.sampled_from(["start", "used", "wasted", "not_moved"])
steps = st.lists(st.tuples(kinds, st.integers(-10, 150), st.integers(-5, 50)), max_size=50)


@given(steps, st.sampled_from([0.0, 0.25, 2.0]))
def test_waste_stays_within_its_budget_always(steps: list[tuple[str, int, int]], share: float) -> None:
    budget = WasteBudget(share, allowance_bytes=100, refill_s=100)
    now = latest_s = 0
    out_bytes = wasted_bytes = used_bytes = 0
    budget.allows(0, now)
    for kind, num_bytes, step_s in steps:
        now += step_s
        latest_s = max(latest_s, now)
        settled_bytes = min(max(num_bytes, 0), out_bytes)
        if kind == "start":
            out_bytes += max(num_bytes, 0) if budget.start(num_bytes, now) else 0
        else:
            budget.note(kind, num_bytes, now)  # type: ignore[arg-type]
            out_bytes -= settled_bytes
            wasted_bytes += settled_bytes if kind == "wasted" else 0
            used_bytes += settled_bytes if kind == "used" else 0
        assert budget.out_bytes == out_bytes
        assert wasted_bytes + out_bytes <= 100 + share * used_bytes + latest_s + 1e-6


def teach(learned: Learned, clock: Clock) -> None:
    """In each of twenty runs a planner takes a second and then, half a second later, a coder does."""
    for number in range(20):
        for agent in ("planner", "coder"):
            arrival = AgentCall("ann", f"run{number}", agent, f"run{number}:{agent}")
            learned.arrived(arrival)
            clock.now_s += 1.0
            learned.ended(arrival)
            clock.now_s += 0.5
        clock.now_s += 60.0


def made(parts: Parts, clock: Clock, file: Path | None = None, *, is_on: bool = True) -> Learned:
    return Learned(parts.node, parts.advisories, is_on=is_on, file=file, clock=clock)


async def test_who_follows_is_expected_of_one_owner_and_where_it_is_off_of_nobody(
    parts: Parts, tmp_path: Path
) -> None:
    clock = Clock()
    for is_on in (False, True):
        learned = made(parts, clock, tmp_path / NAME, is_on=is_on)
        await learned.save()
        teach(learned, clock)
        learned.arrived(AgentCall("ann", "last", "planner", "last:planner"))
        asked = (("ann", "last:coder"), ("ann", "last:planner"), ("bob", "last:coder"))
        assert [parts.advisories.expects(*each) for each in asked] == [is_on, False, False]
        assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b'{"agents":1}\n{"name":', b'{"agents":99}\n'])
async def test_a_damaged_file_is_put_aside_and_learning_begins_anew(
    parts: Parts, tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / NAME, Clock()
    before = made(parts, clock, file)
    teach(before, clock)
    await before.save()
    await asyncio.to_thread(file.write_bytes, damage)
    after = made(parts, Clock(), file)
    await after.load()
    after.arrived(AgentCall("ann", "next", "planner", "next:planner"))
    assert not parts.advisories.expects("ann", "next:coder")
    assert "learning anew" in caplog.text
    assert not file.exists()
    assert file.with_name(f"{NAME}.damaged").read_bytes() == damage
    await after.save()
    again = made(parts, Clock(), file)
    await again.load()


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_it_converges_to_the_share_that_was_used_and_with_time_returns_to_the_prior(share: float) -> None:
    rng, precision, estimates = random.Random(7), Precision(), []
    for i in range(10_000):
        precision.note("a", "typing", rng.random() < share, float(i))
        if i >= 500:
            estimates.append(precision.probability("a", "typing", float(i)))
    assert sum(estimates) / len(estimates) == pytest.approx(share, abs=0.03)
    assert all(abs(estimate - share) < 0.2 for estimate in estimates)
    distances = [
        abs(precision.probability("a", "typing", 1e4 + n * HALF_LIFE_S) - PRIOR) for n in (0, 1, 2, 30)
    ]
    assert distances == sorted(distances, reverse=True) and distances[-1] < 1e-6 < distances[1]


OUTCOMES = st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(-(10**6), 10**6))


@given(st.lists(OUTCOMES, max_size=40))
def test_owners_and_sources_are_not_believed_for_each_other_and_no_clock_goes_back(
    outcomes: list[tuple[str, bool, int]],
) -> None:
    together, steady = Precision(), Precision()
    latest_s, names = -(10**6), {"a": ("a", "typing"), "b": ("b", "typing"), "c": ("a", "rest")}
    for owner, was_used, at_s in outcomes:
        together.note(*names[owner], was_used, at_s)
        if owner == "a":
            latest_s = max(latest_s, at_s)
            steady.note("a", "typing", was_used, latest_s)
    for at_s in (-1e6, latest_s, 1e6):
        found = together.probability("a", "typing", at_s)
        assert found == steady.probability("a", "typing", max(at_s, latest_s))


def test_the_owner_that_was_silent_for_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.advisories.precision.MAX_REMEMBERED", 2)
    precision = Precision()
    for owner in ["a", "b", "a", "c"]:
        precision.note(owner, "typing", False, 0.0)
    assert precision.probability("b", "typing", 0.0) == PRIOR
    assert precision.probability("a", "typing", 0.0) < PRIOR
