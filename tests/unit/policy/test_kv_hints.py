"""What a key is granted of its hints: shorter times, a bounded number of places, and nothing of another key's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.kv.hints import (
    ACTIONS,
    DEFAULT_TTL_S,
    MAX_KEPT,
    MAX_PINS,
    MAX_TTL_S,
    Grant,
    HintShares,
    KvAction,
    KvHint,
)


def hint(action: KvAction, ttl_s: float | None = None) -> KvHint:
    return KvHint(action, "rest", ttl_s=ttl_s)


def test_a_longer_time_than_an_action_may_last_is_clipped() -> None:
    shares = HintShares()
    assert shares.grant("ada", "s", hint("pin", 1e9), 0.0) == Grant("clipped", MAX_TTL_S["pin"])
    assert shares.grant("ada", "s", hint("retain", 60.0), 0.0) == Grant("granted", 60.0)
    assert shares.grant("ada", "s", hint("retain"), 0.0) == Grant("granted", DEFAULT_TTL_S["retain"])
    assert shares.grant("ada", "s", hint("evict", 60.0), 0.0) == Grant("granted", 0.0)
    later = KvHint("prefetch", "rest", arrival_s=300.0)
    assert shares.grant("ada", "s", later, 0.0).ttl_s == 300.0 + DEFAULT_TTL_S["prefetch"]


def test_a_key_without_a_place_left_gets_nothing_and_takes_nothing_from_another() -> None:
    shares = HintShares()
    for number in range(MAX_PINS):
        assert shares.grant("ada", f"s{number}", hint("pin"), 0.0).outcome == "granted"
    assert shares.grant("ada", "more", hint("pin"), 1.0) == Grant("full", 0.0)
    assert shares.grant("ada", "s0", hint("pin", 10.0), 1.0).outcome == "granted", "its own place again"
    assert shares.grant("ada", "more", hint("retain"), 1.0).outcome == "granted", (
        "pins have places of their own"
    )
    assert shares.grant("eve", "more", hint("pin"), 1.0).outcome == "granted"
    assert shares.grant("ada", "more", hint("pin"), 12.0).outcome == "granted", (
        "that of s0, whose time is over"
    )
    shares.check_invariants()


def test_a_wish_ends_with_its_time_with_a_time_of_zero_and_with_its_session() -> None:
    shares = HintShares()
    shares.grant("ada", "s", hint("pin", 100.0), 0.0)
    assert (
        shares.left_s("ada", "s", 40.0, is_pin=True) == 60.0
        and shares.left_s("ada", "s", 101.0, is_pin=True) == 0.0
    )
    assert shares.left_s("eve", "s", 40.0, is_pin=True) == 0.0
    shares.grant("ada", "s", hint("pin", 0.0), 40.0)
    assert shares.left_s("ada", "s", 40.0, is_pin=True) == 0.0
    shares.grant("ada", "s", hint("pin", 100.0), 50.0)
    shares.grant("ada", "s", hint("evict"), 50.0)
    assert shares.left_s("ada", "s", 50.0, is_pin=True) == 0.0
    shares.check_invariants()


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(0, 2 * MAX_KEPT),
            st.sampled_from(sorted(ACTIONS)),
            st.one_of(st.none(), st.floats(0, 1e12)),
            st.floats(0, 1000),
        ),
        max_size=200,
    )
)
def test_no_wish_gets_more_than_it_may(wishes: list[tuple[str, int, KvAction, float | None, float]]) -> None:
    shares, now = HintShares(), 0.0
    for key, number, action, ttl_s, passed_s in wishes:
        now += passed_s
        given_s = shares.grant(key, f"s{number}", hint(action, ttl_s), now).ttl_s
        asked_s = DEFAULT_TTL_S[action] if ttl_s is None else ttl_s
        assert 0 <= given_s <= min(MAX_TTL_S[action], asked_s)
        shares.check_invariants()
