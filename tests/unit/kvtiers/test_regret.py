"""A policy evicts only while it is better than evicting what was used longest ago."""

from collections.abc import Iterator, Sequence

from kvtiers.policy.eviction import ByValue, GroupFacts, LeastRecent, Victim
from kvtiers.policy.regret import LessRegretted


class Newest:
    """Evicts what was used last: never right where sessions come back soon, always where they come in turns."""

    def order(self, groups: Sequence[GroupFacts], num_layers: int, now: float) -> Iterator[Victim]:
        for facts in sorted(groups, key=lambda facts: -facts.last_used_s):
            yield Victim(facts.group, 0)


def play(choice: LessRegretted, sessions: Sequence[str], now: float = 0.0) -> None:
    """Each of these asks for its ten blocks and leaves."""
    for at, session in enumerate(sessions):
        choice.asked(session, 10)
        choice.left(GroupFacts(session, 0, now + at), now + at)


def test_on_paper_the_better_one_is_found_and_found_anew() -> None:
    newest = Newest()
    choice = LessRegretted(newest, 100)
    assert isinstance(choice.policy, LeastRecent)  # before anything is known
    rounds = [f"s{number}" for number in range(20)] * 40  # twice as many as there is room for, in turns
    play(choice, rounds)
    assert choice.policy is newest
    pairs = [f"p{number // 4}" for number in range(4000)]  # each comes back at once, and then no more
    play(choice, pairs, 1000.0)
    assert isinstance(choice.policy, LeastRecent)


def test_what_it_yields_is_what_the_better_one_yields() -> None:
    groups = [GroupFacts("old", 10, 1.0), GroupFacts("new", 10, 2.0)]
    victims = [victim.group for victim in LessRegretted(ByValue(), 100).order(groups, 4, 3.0)]
    assert list(dict.fromkeys(victims)) == ["old", "new"]


def test_a_session_larger_than_the_memory_and_one_without_blocks_harm_nothing() -> None:
    choice = LessRegretted(ByValue(), 100)
    choice.saved("large", 1000)
    for at in range(3):
        choice.left(GroupFacts("large", 0, float(at)), float(at))
        choice.left(GroupFacts("none", 0, float(at)), float(at))
    play(choice, ["a", "b", "large", "a"], 10.0)
