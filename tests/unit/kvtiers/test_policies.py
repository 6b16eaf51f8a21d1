"""Who leaves host memory, whether to load or to compute again, and what speed is assumed: decisions without an engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.policy.eviction import NUM_BANDS, ByValue, GroupFacts, Lru, Victim, first_layer
from kvtiers.policy.fairness import ABANDONED_S, choose_victim, floors, is_abandoned
from kvtiers.policy.rates import HALF_LIFE_S, Rate
from kvtiers.policy.restore import READ_BYTES, Action, FasterWins, RestoreFacts, is_worth_fetching
from tests.unit.facts import restore_facts

MIB = 1 << 20


def group(name: str, idle_s: float, num_bytes: int = MIB, **facts: object) -> GroupFacts:
    return GroupFacts(name, num_bytes, 1000.0 - idle_s, **facts)  # type: ignore[arg-type]


def order(*groups: GroupFacts) -> list[Victim]:
    return list(ByValue().order(groups, 8, 1000.0))


def test_what_is_over_goes_first_and_what_is_expected_last_and_last_layers_before_first_ones() -> None:
    assert [each.keep_layers for each in order(group("a", 1), group("b", 1))] == [6, 6, 4, 4, 2, 2, 0, 0]
    assert [each.group for each in order(group("new", 1), group("old", 500))[::4]] == ["old", "new"]
    expected = group("expected", 5000, expected_s=1002.0)
    victims = order(expected, group("fresh", 0, goes_on=0.95), group("over", 0, is_over=True))
    assert victims[0] == Victim("over", 0)
    assert [victim.group for victim in victims[-NUM_BANDS:]] == ["expected"] * NUM_BANDS


def test_every_layer_of_a_request_in_the_engine_outlives_the_same_layer_of_others() -> None:
    live, chat = group("live", 500, is_live=True), group("chat", 0, goes_on=1.0)
    victims = order(live, chat)
    for band in range(NUM_BANDS):
        keep = first_layer(band, 8)
        assert victims.index(Victim("chat", keep)) < victims.index(Victim("live", keep))
    assert order(live, group("announced", 500, expected_s=1001.0))[-1].group == "announced"
    waits = group("waits", 500, is_live=True, is_waiting=True)
    assert [victim.group for victim in order(waits, live)[-NUM_BANDS:]] == ["waits"] * NUM_BANDS


@given(
    groups=st.lists(
        st.builds(
            GroupFacts,
            group=st.uuids().map(str),
            num_bytes=st.integers(1, 1 << 40),
            last_used_s=st.floats(0, 2000),
            goes_on=st.floats(0.01, 1.0),
            is_over=st.booleans(),
            expected_s=st.none() | st.floats(0, 3000),
        ),
        max_size=20,
        unique_by=lambda facts: facts.group,
    ),
    num_layers=st.integers(1, 100),
    policy=st.sampled_from([Lru(), ByValue()]),
)
def test_any_session_can_be_emptied(groups: list[GroupFacts], num_layers: int, policy: Lru | ByValue) -> None:
    kept = dict.fromkeys((facts.group for facts in groups), num_layers)
    for victim in policy.order(groups, num_layers, 1000.0):
        assert victim.keep_layers <= kept[victim.group]
        kept[victim.group] = victim.keep_layers
    assert set(kept.values()) <= {0}


holdings = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 10_000), min_size=1)
WEIGHTS = [0.25, 0.5, 1.0, 2.0, 3.0, 8.0]
tenant_weights = st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(WEIGHTS))


@given(holdings, tenant_weights, st.integers(1, 100_000))
def test_nobody_below_its_share_gives(held: dict[str, int], weights: dict[str, float], to_free: int) -> None:
    found = floors(held, weights, to_free)
    assert all(0 <= found[tenant] < held[tenant] for tenant in found)
    kept = held | found
    given_up = sum(held.values()) - sum(kept.values())
    assert given_up >= min(to_free, sum(held.values()))
    for giver in held:
        if kept[giver] < held[giver]:
            for other in held:  # nobody is left with more for its weight, but for what rounding takes
                assert kept[other] / weights.get(other, 1.0) <= (kept[giver] + 1) / weights.get(giver, 1.0)
    assert given_up < to_free + len(held) or given_up == sum(held.values()), "no more is taken than needed"


def test_the_oldest_segment_goes_of_which_half_may_else_that_of_which_most_may() -> None:
    mostly_bobs, half, mostly_adas = (8, {"bob": 7, "ada": 1}), (8, {"bob": 4, "ada": 4}), (8, {"ada": 8})
    assert choose_victim([mostly_bobs, half, mostly_adas], {"ada"}) == 1
    assert choose_victim([mostly_bobs, (8, {"bob": 5, "ada": 3})], {"ada"}) == 1
    assert choose_victim([(8, {"bob": 2}), mostly_adas], {"ada"}) == 0  # what is dead may go, too
    assert choose_victim([], {"ada"}) is None


@pytest.mark.parametrize(
    ("facts", "abandoned"),
    [
        (group("over", 0, is_over=True), True),
        (group("silent", ABANDONED_S + 1), True),
        (group("away", ABANDONED_S - 1), False),
        (group("runs", ABANDONED_S + 1, is_live=True), False),
        (group("announced", ABANDONED_S + 1, expected_s=1001.0), False),
    ],
)
def test_what_is_over_or_was_silent_for_long_claims_nothing(facts: GroupFacts, abandoned: bool) -> None:
    assert is_abandoned(facts, 1000.0) is abandoned


def test_a_disk_that_hangs_is_given_up_within_a_fraction_of_a_prefill_but_a_long_restore_may_begin() -> None:
    policy, step_s = FasterWins(), 0.001
    waits = (step_s * number for number in range(10_000))
    waited_s = next(s for s in waits if policy.decide(restore_facts(waited_s=s)).action is Action.LOAD)
    prefill_s = 64 * 32 / 5000
    assert waited_s <= prefill_s * (READ_BYTES / (24 * MIB)) + step_s
    long = {"num_blocks": 640, "disk_bytes_left": 2400 * MIB, "block_bytes": 3840 << 10}
    layer_s = 2400 * MIB / 12 / 1e9  # in which its first layer could have come
    assert policy.decide(restore_facts(**long, waited_s=0.9 * layer_s)).action is Action.WAIT
    assert policy.decide(restore_facts(**long, waited_s=4 * layer_s)).action is Action.LOAD


def test_first_layers_suffice_when_the_others_come_under_the_computation() -> None:
    some = restore_facts(num_ready_layers=4, disk_bytes_left=16 * MIB, num_tail_tokens=2048)
    assert FasterWins().decide(some).action is Action.LOAD
    assert FasterWins(overlaps=False).decide(some).action is Action.WAIT


@given(
    st.builds(
        RestoreFacts,
        num_blocks=st.integers(0, 500),
        num_ready_blocks=st.integers(0, 500),
        num_tail_tokens=st.integers(1, 10_000),
        block_size_tokens=st.just(32),
        block_bytes=st.integers(1, 1 << 24),
        num_layers=st.just(12),
        num_ready_layers=st.integers(0, 12),
        disk_bytes_done=st.integers(0, 1 << 34),
        disk_bytes_left=st.integers(0, 1 << 34),
        disk_bytes_ahead=st.integers(0, 1 << 34),
        waited_s=st.floats(0, 100),
        prefill_s_per_token=st.none() | st.floats(1e-6, 0.1),
        disk_bytes_per_s=st.none() | st.floats(1e3, 1e10),
        host_bytes_per_s=st.none() | st.floats(1e6, 1e11),
    ).filter(lambda facts: facts.num_ready_blocks <= facts.num_blocks)
)
def test_a_decision_never_promises_more_than_computing_would_take(drawn: RestoreFacts) -> None:
    decision = FasterWins().decide(drawn)
    assert 0 <= decision.num_blocks <= drawn.num_blocks
    nothing = FasterWins()._cost_of(drawn, 0)
    assert decision.expected_s <= nothing * (1 + 1e-9)
    if decision.action is Action.WAIT:
        assert drawn.waited_s <= FasterWins().max_wait_s


def test_a_rate_is_its_prior_until_measured_and_a_bad_measurement_fades() -> None:
    rate, slow, fast = (Rate(100.0) for _ in range(3))
    assert rate.at(0.0) == 100.0
    for num, bytes_per_s in ((1, 1000), (20, 200)):
        for _ in range(num):
            rate.note(bytes_per_s, 1.0, now=0.0)
        assert rate.at(0.0) == pytest.approx(bytes_per_s, rel=0.01)
    slow.note(10, 1.0, now=50.0)
    fast.note(1000, 1.0, now=50.0)
    assert slow.at(50.0) == 10.0
    assert slow.at(50.0 + HALF_LIFE_S) == pytest.approx(55.0)
    assert slow.at(100 * HALF_LIFE_S) == pytest.approx(100.0)
    assert fast.at(100 * HALF_LIFE_S) == 1000.0


def test_a_peer_is_worth_asking_where_it_gives_a_block_sooner_than_computing() -> None:
    """By what was measured on two cores: 786 KB a block of 32 tokens, 0.2 ms a token."""
    assert is_worth_fetching(786_432, 32, 125e6, 0.2e-3)
    assert not is_worth_fetching(786_432, 32, 120e6, 0.2e-3)
    assert is_worth_fetching(786_432, 32, 120e6, None), "computing is slow until it was measured"
