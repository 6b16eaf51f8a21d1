"""Who follows whom: graphs that were planted are found, noise is not taken for one, and nothing grows without bound."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.advisories.followers import (
    MAX_CANDIDATES,
    MAX_GAP_S,
    AgentCall,
    Followers,
    LikelyCall,
    SavedOwner,
)
from gateway.advisories.waste import WasteBudget, worth

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


def agents(guesses: Iterable[LikelyCall]) -> list[str]:
    return [guess.agent for guess in guesses]


# -- what is learned ---------------------------------------------------------------------------------------------------


def lognormal(median_s: float) -> Callable[[random.Random], float]:
    return lambda rng: rng.lognormvariate(math.log(median_s), SIGMA)


@pytest.mark.parametrize("seed", range(5))
def test_a_chain_is_learned_with_its_gaps(seed: int) -> None:
    rng, followers, now = random.Random(seed), Followers(), 0.0
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


def test_a_branch_has_the_share_it_is_taken_with() -> None:
    rng, followers, now = random.Random(3), Followers(), 0.0
    probabilities: dict[str, list[float]] = {"B": [], "C": []}
    for i in range(600):
        request = arrival("A", f"run{i}")
        now = serve(followers, request, now)
        if i >= 200:
            for guess in followers.expected(request, now):
                probabilities[guess.agent].append(guess.probability)
        now = serve(followers, arrival("B" if rng.random() < 0.7 else "C", f"run{i}"), now + 5) + 100
    assert len(probabilities["B"]) >= 395
    assert sum(probabilities["B"]) / len(probabilities["B"]) == pytest.approx(0.67, abs=0.04)


def test_while_a_request_runs_its_follower_is_expected_after_it() -> None:
    followers, now = learned("AB")
    followers.note(arrival("A", "last"), now)
    (early,) = followers.expected(arrival("A", "last"), now)
    assert (early.earliest_s, early.latest_s) == pytest.approx((6.0, 6.0))  # a second of work, five of pause
    followers.ended(arrival("A", "last"), now + 4)
    (later,) = followers.expected(arrival("A", "last"), now + 4)
    assert (later.earliest_s, later.latest_s) == pytest.approx((5.0, 5.0))


def test_without_ends_the_request_that_came_last_is_followed() -> None:
    followers, now = Followers(), 0.0
    for i in range(10):
        for agent in "ABC":
            followers.note(arrival(agent, f"run{i}"), now := now + 3)
    followers.note(arrival("B", "last"), now)
    (guess,) = followers.expected(arrival("B", "last"), now + 1)
    assert guess.agent == "C"
    assert guess.earliest_s == pytest.approx(2.0)


def test_who_comes_sooner_is_named_first() -> None:
    followers, now = learned("ABC")
    now = serve(followers, arrival("A", "last"), now)
    guesses = followers.expected(arrival("A", "last"), now)
    assert agents(guesses) == ["B", "C"]
    assert [guess.earliest_s for guess in guesses] == pytest.approx([5.0, 11.0])


def test_agents_that_start_together_follow_the_same_one() -> None:
    followers, now = Followers(), 0.0
    for i in range(20):
        now = serve(followers, arrival("plan", f"run{i}"), now)
        for agent in random.Random(i).sample(["code", "docs", "test"], 3):
            followers.note(arrival(agent, f"run{i}"), now := now + 0.1)
        for agent in ["code", "docs", "test"]:
            followers.ended(arrival(agent, f"run{i}"), now := now + 5)
    now = serve(followers, arrival("plan", "last"), now)
    guesses = followers.expected(arrival("plan", "last"), now)
    assert sorted(agents(guesses)) == ["code", "docs", "test"]
    assert all(guess.probability > 0.9 for guess in guesses)
    followers.note(arrival("docs", "last"), now + 0.1)
    assert sorted(agents(followers.expected(arrival("plan", "last"), now + 0.1))) == ["code", "test"]


def test_an_agent_that_waits_for_several_follows_each_of_them() -> None:
    rng, followers, now = random.Random(2), Followers(), 0.0
    for i in range(20):
        now = serve(followers, arrival("plan", f"run{i}"), now)
        ends_s = {agent: now + rng.uniform(5, 9) for agent in ("code", "docs")}
        for agent in ends_s:
            followers.note(arrival(agent, f"run{i}"), now)
        for agent in sorted(ends_s, key=lambda agent: ends_s[agent]):
            followers.ended(arrival(agent, f"run{i}"), ends_s[agent])
        now = serve(followers, arrival("test", f"run{i}"), max(ends_s.values()) + 1)
    for agent in ("code", "docs"):
        followers.note(arrival(agent, "last"), now)
    for agent in ("code", "docs"):
        (guess,) = followers.expected(arrival(agent, "last"), now)
        assert guess.agent == "test"
        assert guess.probability > 0.85


def test_the_second_request_of_an_agent_may_have_another_follower() -> None:
    chain = ["plan", "code", "plan", "test"]
    followers, now = learned(chain)
    for before, after in [(0, ["code", "plan", "test"]), (2, ["test"])]:
        now = run_chain(followers, chain[: before + 1], f"last{before}", now)
        guesses = followers.expected(arrival("plan", f"last{before}"), now - 5)
        assert sorted(agents(guesses)) == after
        assert all(guess.probability > 0.85 for guess in guesses)


def test_a_changed_graph_is_relearned() -> None:
    followers, now = learned("AB", num_runs=500)
    for i in range(60):
        now = run_chain(followers, "AC", f"new{i}", now)
    now = serve(followers, arrival("A", "last"), now)
    (guess,) = followers.expected(arrival("A", "last"), now)
    assert guess.agent == "C"
    assert guess.probability > 0.75


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


def test_session_ids_tell_runs_apart_where_none_is_named() -> None:
    followers = Followers()
    events = sorted((i * 3 + step * 60, agent, i) for i in range(60) for step, agent in enumerate("ABC"))
    for at_s, agent, i in events:
        serve(followers, AgentCall("o", "", agent, f"job-{i}/{agent}.chat"), at_s)
    request = AgentCall("o", "", "A", "job-99/A.chat")
    guesses = followers.expected(request, serve(followers, request, 400.0))
    assert [(guess.agent, guess.session_id) for guess in guesses] == [
        ("B", "job-99/B.chat"),
        ("C", "job-99/C.chat"),
    ]


def test_runs_that_share_one_scope_are_learned_where_they_do_not_overlap() -> None:
    followers, now = Followers(), 0.0
    for _ in range(10):
        for agent in "ABC":
            now = serve(followers, AgentCall("o", "", agent, agent), now) + 5
        now += MAX_GAP_S
    request = AgentCall("o", "", "C", "C")
    assert followers.expected(request, now) == []  # what comes next came too late to follow
    request = AgentCall("o", "", "A", "A")
    guesses = followers.expected(request, serve(followers, request, now))
    assert [(guess.agent, guess.session_id) for guess in guesses] == [("B", "B"), ("C", "C")]


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


def test_a_user_who_alternates_between_sessions_is_foreseen() -> None:
    followers, now = Followers(), 0.0
    for session in ["left", "right"] * 20:
        now = serve(followers, AgentCall("o", "", session, session), now) + 30
    guesses = followers.expected(AgentCall("o", "", "right", "right"), now - 30)
    assert [(guess.agent, guess.earliest_s) for guess in guesses] == [
        ("right", pytest.approx(61.0)),
        ("left", pytest.approx(30.0)),
    ]


# -- when there is no guess --------------------------------------------------------------------------------------------


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
    assert {guess.agent: guess.session_id for guess in guesses}[
        "B"
    ] == "other:B"  # what it last used in this run


def test_an_agent_that_keeps_one_session_in_all_runs_is_guessed_with_it() -> None:
    followers, now = Followers(), 0.0
    for i in range(10):
        now = serve(followers, arrival("A", f"run{i}", session=f"{i}"), now) + 5
        now = serve(followers, arrival("B", f"run{i}", session="memory"), now) + 5
    request = arrival("A", "last", session="5eed")
    (guess,) = followers.expected(request, serve(followers, request, now))
    assert guess.session_id == "memory"


@pytest.mark.parametrize("pattern", ["{agent}99", "7f{agent}", "7f{agent}99"])
def test_a_letter_within_a_word_is_no_agents_name(pattern: str) -> None:
    followers, now = Followers(), 0.0
    for i in range(10):
        for agent in "ab":
            now = (
                serve(followers, AgentCall("o", f"run{i}", agent, f"{i}-" + pattern.format(agent=agent)), now)
                + 5
            )
    request = AgentCall("o", "last", "a", "last-" + pattern.format(agent="a"))
    assert followers.expected(request, serve(followers, request, now)) == []


def test_names_in_session_ids_are_replaced_only_where_that_was_seen_to_hold() -> None:
    followers, now = Followers(), 0.0
    for i in range(10):
        now = serve(followers, arrival("A", f"run{i}"), now) + 5
        now = serve(followers, arrival("B", f"run{i}", session=f"{i}"), now) + 5
    now = serve(followers, arrival("A", "last"), now)
    assert followers.expected(arrival("A", "last"), now) == []


def test_with_little_evidence_this_agent_is_expected_again_and_no_other() -> None:
    followers, now = learned("AB", num_runs=1)
    now = serve(followers, arrival("A", "last"), now)
    (guess,) = followers.expected(arrival("A", "last"), now)
    assert guess.agent == "A"
    assert 0.4 < guess.probability < 0.8


def test_what_has_followed_is_not_expected_again_and_what_is_overdue_is_given_up() -> None:
    followers, now = learned("AB")
    now = serve(followers, arrival("A", "last"), now)
    assert agents(followers.expected(arrival("A", "last"), now + 4)) == ["B"]
    assert followers.expected(arrival("A", "last"), now + 6) == []
    followers.note(arrival("B", "last"), now + 2)
    assert followers.expected(arrival("A", "last"), now + 2) == []


def test_what_was_never_noted_is_followed_by_nothing() -> None:
    followers, now = learned("AB")
    assert followers.expected(arrival("A", "unknown"), now) == []
    assert followers.expected(arrival("A", "unknown", owner="other"), now) == []
    followers.ended(arrival("A", "unknown"), now)
    assert followers.num_sessions("other") == 0


def test_the_end_of_another_session_of_the_agent_is_not_this_ones() -> None:
    followers, now = learned("AB")
    followers.note(arrival("A", "last", session="last:A"), now)
    followers.ended(arrival("A", "last", session="another"), now + 3)
    (guess,) = followers.expected(arrival("A", "last"), now + 3)
    assert guess.earliest_s == pytest.approx(3.0)  # six after it came: as far as known, it still runs


def test_followers_later_than_the_gap_do_not_count() -> None:
    followers, now = Followers(), 0.0
    for i in range(20):
        now = run_chain(followers, "AB", f"run{i}", now, gap_s=MAX_GAP_S + 1)
    now = serve(followers, arrival("A", "last"), now)
    assert followers.expected(arrival("A", "last"), now) == []


def test_what_ended_long_ago_is_not_followed() -> None:
    """However busy its run still is with requests whose ends nobody tells."""
    followers, now = Followers(), 0.0
    for i in range(10):
        serve(followers, arrival("A", f"run{i}"), now)
        for agent in "BC":
            followers.note(arrival(agent, f"run{i}"), now := now + MAX_GAP_S - 10)
    followers.note(arrival("B", "last"), now)
    assert agents(followers.expected(arrival("B", "last"), now)) == ["C"]


def test_a_run_that_was_silent_for_too_long_starts_anew() -> None:
    followers = Followers()
    end_s = run_chain(followers, "ABC", "run", 0.0)
    assert followers.num_sessions("o") == 3
    followers.note(arrival("B", "run"), end_s + MAX_GAP_S)
    assert followers.num_sessions("o") == 1


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_is_promised_as_surely_as_it_comes(seed: int) -> None:
    """Five agents by chance, runs of ten requests: the agent of the seventh comes again with 1 − 0.8³."""
    rng, followers, now = random.Random(seed), Followers(min_probability=0.0), 0.0
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
    """A pause far longer than any of the last ones, after which the first agent asks again in every run."""
    followers, now = Followers(), 0.0
    for i in range(20):
        now = run_chain(followers, "A" + "B" * 40, f"run{i}", now, gap_s=1.0) + 300
        now = serve(followers, arrival("C", f"other{i}"), now)  # finds that the run is silent
        now = serve(followers, arrival("A", f"run{i}"), now)
    now = serve(followers, arrival("A", "last"), now)
    guesses = followers.expected(arrival("A", "last"), now)
    assert {guess.agent: guess.probability for guess in guesses}["A"] > 0.85


# -- what outlives a restart -------------------------------------------------------------------------------------------


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
    assert after.num_agents("o") == 3


def test_what_was_saved_under_wider_bounds_is_cut_to_these() -> None:
    before, _ = learned("ABCDEF", num_runs=2)
    after = Followers(max_agents=2, max_owners=1)
    for owner in before.saved():
        after.restore(owner)
        after.restore(msgspec.structs.replace(owner, name="p"))
    assert (after.num_owners, after.num_agents("p")) == (1, 2)


# -- bounds and walls --------------------------------------------------------------------------------------------------

names = st.sampled_from(["", "A", "B", "C", "run:A", "x"])
arrivals = st.builds(AgentCall, st.sampled_from("op"), st.sampled_from(["", "r", "s"]), names, names)
events = st.lists(st.tuples(st.sampled_from(["note", "ended"]), arrivals, st.integers(0, 4000)), max_size=50)


def play(
    followers: Followers, events: Iterable[tuple[str, AgentCall, int]]
) -> Iterator[tuple[AgentCall, float]]:
    now = 0.0
    for kind, request, step_s in events:
        now += step_s / 100 if step_s < 3000 else step_s
        followers.note(request, now) if kind == "note" else followers.ended(request, now)
        yield request, now


@given(events, st.integers(1, 4), st.integers(1, 6))
def test_any_traffic_keeps_bounds_and_gives_sane_guesses(
    events: list[tuple[str, AgentCall, int]], max_agents: int, max_sessions: int
) -> None:
    followers = Followers(
        max_agents=max_agents, max_sessions=max_sessions, max_guesses=2, min_probability=0.0
    )
    for request, now in play(followers, events):
        assert followers.num_agents(request.owner) <= max_agents
        assert followers.num_sessions(request.owner) <= max_sessions
        guesses = followers.expected(request, now)
        assert len(guesses) <= 2
        for guess in guesses:
            assert 0 <= guess.probability <= 1
            assert 0 <= guess.earliest_s <= guess.latest_s <= MAX_GAP_S * 2


@given(events)
def test_owners_do_not_learn_from_each_other(events: list[tuple[str, AgentCall, int]]) -> None:
    """One owner's guesses are what they are where the other was never there."""
    together, alone = Followers(min_probability=0.0), Followers(min_probability=0.0)
    played = list(play(together, events))
    for (kind, request, _), (_, now) in zip(events, played, strict=True):
        if request.owner == "o":
            alone.note(request, now) if kind == "note" else alone.ended(request, now)
    for request, now in played:
        if request.owner == "o":
            assert together.expected(request, now) == alone.expected(request, now)


def test_many_followers_at_once_are_no_more_than_certain() -> None:
    followers, _ = learned("AB", num_runs=1)
    for at_s, agent in enumerate("AB", start=100):
        for i in range(200):
            followers.note(arrival(agent, f"run{i}"), float(at_s))
    followers.note(arrival("A", "last"), 102.0)
    guesses = followers.expected(arrival("A", "last"), 102.0)
    assert 0.9 < {guess.agent: guess.probability for guess in guesses}["B"] <= 1


def test_agents_in_use_outlive_those_that_asked_once() -> None:
    followers = Followers(max_agents=3)
    now = run_chain(followers, ["former", "agents", "three"], "run", 0.0)
    for i in range(20):
        now = run_chain(followers, ["A", "B", f"once{i}"], f"run{i}", now)
    now = serve(followers, arrival("A", "last"), now)
    assert agents(followers.expected(arrival("A", "last"), now)) == ["B"]


def test_the_run_that_was_silent_for_longest_is_forgotten_first() -> None:
    followers, now = Followers(max_sessions=3), 0.0
    for i in range(10):
        now = run_chain(followers, "AB", f"run{i}", now)
    for run in ["one", "two", "three", "one", "four"]:
        followers.note(arrival("A", run), now)
    known = [run for run in ["one", "two", "three", "four"] if followers.expected(arrival("A", run), now)]
    assert known == ["one", "three", "four"]


@pytest.mark.parametrize(("order", "forgotten"), [("BCA", "B"), ("ABAC", "B")])
def test_within_a_run_the_agent_that_was_silent_for_longest_is_forgotten_first(
    order: str, forgotten: str
) -> None:
    followers = Followers(max_sessions=2, min_probability=0.0)
    for now, agent in enumerate(order):
        # Sessions that no name tells: only the run knows them.
        followers.note(arrival(agent, "last", session=f"{now}"), float(now))
    found = agents(followers.expected(arrival(order[-1], "last"), float(now)))
    assert set("ABC") - set(found) == {forgotten}


@pytest.mark.parametrize("ends", [True, False])
def test_a_flood_of_names_costs_its_owner_alone(ends: bool) -> None:
    followers, now = learned("AB")
    for i in range(3000):
        flood = AgentCall("flooder", f"run{i % 700}", f"agent{i}", f"session{i}")
        followers.note(flood, now)
        if ends:
            followers.ended(flood, now)
    assert followers.num_agents("flooder") == 64
    assert followers.num_sessions("flooder") == 512
    now = serve(followers, arrival("A", "last"), now)
    assert agents(followers.expected(arrival("A", "last"), now)) == ["B"]


def test_a_request_that_everybody_follows_remembers_few_followers() -> None:
    followers = Followers(max_guesses=100, min_probability=0.0)
    for i in range(300):
        hub = arrival("hub", f"run{i % 3}")
        serve(followers, hub, float(i))
        for spoke in range(20):
            followers.note(arrival(f"spoke{(i + spoke) % 40}", f"run{i % 3}"), i + 0.5)
        now = float(i + 1)
    followers.note(arrival("hub", "run0"), now)
    assert 0 < len(followers.expected(arrival("hub", "run0"), now)) <= MAX_CANDIDATES


def test_the_owner_that_was_silent_for_longest_is_forgotten_first() -> None:
    followers = Followers(max_owners=2)
    for owner in ["a", "b", "a", "c"]:
        followers.note(arrival("A", owner=owner), 0.0)
        assert followers.num_owners <= 2
    assert [followers.num_agents(owner) for owner in "abc"] == [1, 0, 1]


def test_an_owner_can_be_forgotten() -> None:
    followers, now = learned("AB")
    followers.forget("o")
    followers.forget("o")
    assert followers.num_owners == 0
    assert followers.expected(arrival("A", "run1"), now) == []


def test_bounds_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Followers(max_agents=0)


# -- whether to act ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probability", "saved_s", "cost_s", "is_worth"),
    [
        (0.5, 2.0, 1.0, True),
        (0.5, 1.0, 1.0, False),
        (0.2, 1.0, 0.3, False),
        (1.0, 0.1, 99.0, True),
        (1.0, 0.0, 0.0, False),
    ],
)
def test_an_advisory_is_worth_it_where_the_expected_gain_is_positive(
    probability: float, saved_s: float, cost_s: float, is_worth: bool
) -> None:
    assert worth(probability, saved_s, cost_s) is is_worth


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 100), st.floats(0, 100))
def test_what_is_worth_it_stays_so_when_it_is_likelier(
    low: float, high: float, saved_s: float, cost_s: float
) -> None:
    low, high = sorted((low, high))
    assert worth(high, saved_s, cost_s) or not worth(low, saved_s, cost_s)


steps = st.lists(
    st.tuples(
        st.sampled_from(["start", "used", "wasted", "not_moved"]), st.integers(-10, 150), st.integers(-5, 50)
    ),
    max_size=50,
)


@given(steps, st.sampled_from([0.0, 0.25, 2.0]))
def test_waste_stays_within_its_budget_in_any_sequence(
    steps: list[tuple[str, int, int]], share: float
) -> None:
    """Even where outcomes are reported that were never started, or the clock goes back."""
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


def test_useful_bytes_and_time_refill_the_budget() -> None:
    budget = WasteBudget(share=0.5, allowance_bytes=100, refill_s=100)
    assert budget.start(100, 0.0)
    assert not budget.allows(1, 0.0)
    budget.note("wasted", 60, 0.0)
    assert not budget.allows(1, 0.0)
    budget.note("used", 40, 0.0)
    assert budget.allows(60, 0.0)
    assert not budget.start(61, 0.0)
    assert budget.start(70, 10.0)


def test_a_budget_of_failures_opens_again_with_time_but_holds_no_more_than_its_allowance() -> None:
    budget = WasteBudget(share=0.5, allowance_bytes=100, refill_s=100)
    budget.start(100, 0.0)
    budget.note("wasted", 100, 0.0)
    assert not budget.allows(51, 50.0)
    assert budget.allows(100, 1e6)
    assert not budget.allows(101, 1e6)


def test_useful_bytes_fill_the_budget_no_further_than_its_allowance() -> None:
    budget = WasteBudget(share=0.5, allowance_bytes=100, refill_s=100)
    budget.start(50, 0.0)
    budget.note("used", 50, 0.0)
    assert budget.allows(100, 0.0)
    assert not budget.allows(101, 0.0)


def test_a_clock_that_goes_back_and_forth_refills_nothing_twice() -> None:
    budget = WasteBudget(share=0.5, allowance_bytes=100, refill_s=100)
    budget.start(100, 50.0)
    for now in [0.0, 50.0] * 3:
        assert not budget.allows(1, now)


@pytest.mark.parametrize("wrong", [{"share": -1}, {"allowance_bytes": -1}, {"refill_s": 0}])
def test_a_senseless_budget_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        WasteBudget(**wrong)
