"""Who makes room: its own client first, then the one that has most."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.shares import Shares


def test_a_client_that_has_its_share_gives_up_its_oldest() -> None:
    shares: Shares[str] = Shares(2, 10)
    assert [shares.put(name, "ann") for name in "abc"] == [None, None, "a"]
    assert (len(shares), shares.num_of("ann"), shares.num_of("bob")) == (2, 2, 0)


def test_where_all_places_are_taken_the_one_who_has_most_makes_room() -> None:
    shares: Shares[str] = Shares(3, 4)
    for name in "abc":
        shares.put(name, "ann")
    shares.put("d", "bob")
    assert shares.put("e", "cyd") == "a"
    assert (shares.num_of("ann"), shares.num_of("bob"), shares.num_of("cyd")) == (2, 1, 1)


def test_of_those_who_have_as_many_the_one_that_was_idle_for_longest_makes_room() -> None:
    shares: Shares[str] = Shares(3, 3)
    for name, client in zip("abc", ("ann", "bob", "cyd"), strict=True):
        shares.put(name, client)
    shares.touch("a")
    shares.touch("never heard of")
    shares.drop("never heard of")
    assert shares.put("d", "dan") == "b"


@pytest.mark.parametrize("bounds", [(0, 1), (1, 0)])
def test_a_bound_below_one_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Shares(*bounds)


ACTIONS = st.tuples(st.sampled_from(["put", "touch", "drop"]), st.integers(0, 30), st.sampled_from("abcd"))


@given(st.integers(1, 4), st.integers(1, 8), st.lists(ACTIONS, max_size=60))
def test_nothing_is_lost_but_for_room_and_nobody_with_less_loses_to_one_with_more(
    of_one: int, of_all: int, actions: list[tuple[str, int, str]]
) -> None:
    shares: Shares[int] = Shares(of_one, of_all)
    kept: dict[int, str] = {}
    for what, name, client in actions:
        if what == "touch":
            shares.touch(name)
        elif what == "drop" or name in kept:
            shares.drop(name)
            kept.pop(name, None)
        else:
            before = Counter(kept.values())
            loser = shares.put(name, client)
            if loser is not None:
                assert before[client] == of_one or len(kept) == of_all
                assert before[kept[loser]] >= max(before[client], 1)
                del kept[loser]
            kept[name] = client
        num_of = Counter(kept.values())
        assert len(shares) == len(kept) <= of_all
        assert all(shares.num_of(each) == num_of[each] <= of_one for each in "abcd")
