"""Which node serves a request: each policy against sums made by hand, and against what must hold whatever the nodes report."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.nodes.routing import (
    LATE_WEIGHT,
    POLICIES,
    SLO_TIMES,
    START_WEIGHT,
    CachedKv,
    Cost,
    FirstFit,
    LoadBalance,
    Measured,
    MostIdle,
    Overture,
    PriorityRouting,
    Random,
    RankAware,
    Relieve,
    RequestEstimate,
    Settings,
    Sticky,
    candidates,
    fit,
    settings_of,
)
from engine_bridge.protocol.node_facts import KernelName, NodeFacts, NodePerf, PerfModel, Ranks

BGMV, MBGMV = PerfModel("bgmv", 0.001, 0.01), PerfModel("mbgmv", 0.001, 0.01)
SETTINGS = Settings(
    decode=BGMV, prefill=PerfModel("bgmv", 0.002, 0.02), slo_s=1.0, answer_tokens=10, prompt_token_s=0.001
)


def ranks(*values: int) -> Ranks:
    return Ranks(len(values), sum(values), max(values, default=0))


NOBODY = ranks()


def node(
    node_id: str, running: Ranks = NOBODY, queued: Ranks = NOBODY, *, free: int = 10_000, **more: int | bool
) -> NodeFacts:
    facts = {"num_tokens": 0, "queued_tokens": 0} | more
    return NodeFacts(node_id=node_id, running=running, queued=queued, free_tokens=free, **facts)  # type: ignore[arg-type]


def busy(node_id: str, num: int, **more: int | bool) -> NodeFacts:
    return node(node_id, ranks(*[8] * num), **more)


def ask(
    *,
    rank: int = 8,
    kv: Mapping[str, CachedKv] | None = None,
    loads: Mapping[str, float] | None = None,
    usual: float | None = 0.0,
    **more: int | str | bool,
) -> RequestEstimate:
    facts = {"request_id": "r", "num_prompt_tokens": 100, "num_answer_tokens": 10} | more
    return RequestEstimate(rank=rank, kv=kv or {}, adapter_load_s=loads or {}, usual_load_s=usual, **facts)  # type: ignore[arg-type]


# -- performance models ------------------------------------------------------------------------------------------------


def test_bgmv_pads_all_ranks_to_the_largest_and_mbgmv_does_not() -> None:
    batch = ranks(8, 8, 64)
    assert BGMV.seconds(batch) == pytest.approx(3 * 64 * 0.001 + 0.01)
    assert MBGMV.seconds(batch) == pytest.approx(80 * 0.001 + 0.01)
    assert replace(MBGMV, token_s=0.5).seconds(batch, 4) == pytest.approx(2.09)
    assert BGMV.seconds(ranks()) == 0.0, "nobody's step takes no time"


@given(
    kernel=st.sampled_from(["bgmv", "mbgmv"]),
    rank_us=st.floats(0.1, 100),
    fixed_ms=st.floats(0.1, 100),
    token_us=st.floats(0.1, 10),
    seed=st.integers(0, 1000),
)
def test_a_fit_finds_the_model_that_made_the_times(
    kernel: KernelName, rank_us: float, fixed_ms: float, token_us: float, seed: int
) -> None:
    rng = random.Random(seed)
    made = PerfModel(kernel, rank_us * 1e-6, fixed_ms * 1e-3, token_us * 1e-6)
    batches = [ranks(*rng.choices((8, 16, 64), k=rng.randrange(1, 30))) for _ in range(60)]
    contexts = [rng.randrange(1, 4000) for _ in batches]
    steps = [Measured(b, c, made.seconds(b, c)) for b, c in zip(batches, contexts, strict=True)]
    found = fit(kernel, steps, with_tokens=True)
    assert found.r2 == pytest.approx(1.0)
    assert found.model.rank_s == pytest.approx(made.rank_s, rel=1e-4)
    assert found.model.fixed_s == pytest.approx(made.fixed_s, rel=1e-4)
    assert found.model.token_s == pytest.approx(made.token_s, rel=1e-4)
    assert fit(kernel, steps).model.token_s == 0.0


def test_r2_is_the_share_of_the_variance_that_is_explained() -> None:
    # Times 1, 2 and 6 at sums of 1, 2 and 3: the line is 2.5 · sum - 2, it misses by 0.5, -1, 0.5; the variance is 14.
    steps = [Measured(ranks(rank), 0, seconds) for rank, seconds in ((1, 1.0), (2, 2.0), (3, 6.0))]
    found = fit("mbgmv", steps)
    assert (found.model.rank_s, found.model.fixed_s) == pytest.approx((2.5, -2.0))
    assert found.r2 == pytest.approx(1 - 1.5 / 14)


@pytest.mark.parametrize("batches", [[], [ranks(8)], [ranks(8, 8)] * 5, [ranks()] * 5])
def test_steps_that_do_not_tell_what_a_rank_takes_are_refused(batches: list[Ranks]) -> None:
    with pytest.raises(ValueError):
        fit("bgmv", [Measured(batch, 10, 0.03) for batch in batches])


# -- Algorithm 1 -------------------------------------------------------------------------------------------------------

# Three requests, one of them queued; four of the new one's rank.
MIXED, ALIKE = node("mixed", ranks(8, 16), ranks(8)), node("alike", ranks(32, 32, 32, 32))


def test_algorithm_1_by_hand_with_bgmv() -> None:
    policy = RankAware(SETTINGS)
    # mixed: prompts (2·32·2 + 20) - (1·8·2 + 20) = 112 ms, a tenth of it; decoding (4·32 + 10) - (3·16 + 10) = 80 ms.
    assert policy.cost_s(32, MIXED) == pytest.approx(0.0112 + 0.080)
    # alike: prompts 1·32·2 + 20 = 84 ms, since nobody is queued; decoding (5·32 + 10) - (4·32 + 10) = 32 ms.
    assert policy.cost_s(32, ALIKE) == pytest.approx(0.0084 + 0.032)
    # Times three and times four requests: 0.274 and 0.162.
    assert policy.route(ask(rank=32), [MIXED, ALIKE]).node_id == "alike"


def test_algorithm_1_by_hand_with_mbgmv() -> None:
    policy = RankAware(replace(SETTINGS, decode=MBGMV, prefill=PerfModel("mbgmv", 0.002, 0.02)))
    # mixed: prompts 100 - 36 = 64 ms, decoding 32 ms, times three is 0.115; alike: 84 and 32 ms, times four is 0.162.
    assert policy.cost_s(32, MIXED) == pytest.approx(0.0064 + 0.032)
    assert policy.cost_s(32, ALIKE) == pytest.approx(0.0084 + 0.032)
    assert policy.route(ask(rank=32), [MIXED, ALIKE]).node_id == "mixed"


def test_algorithm_1_keeps_away_from_a_node_that_would_miss_the_slo() -> None:
    # With it, alike decodes in 170 ms, mixed in 138 ms.
    policy = RankAware(replace(SETTINGS, slo_s=0.15))
    assert policy.route(ask(rank=32), [MIXED, ALIKE]).node_id == "mixed"
    assert policy.cost_s(32, ALIKE) == pytest.approx(60.0404)


@pytest.mark.parametrize(
    ("decode", "slo_s", "chosen"),
    [
        # Fig. 5's latencies: 24 requests of rank 32 and 16 of rank 64. Rounded as they are, 17 of rank 64 take 36.05 ms with either.
        (PerfModel("bgmv", 0.001 / 256, 0.0318), 0.0361, "2"),
        (PerfModel("mbgmv", 0.0006 / 256, 0.0335), 0.0360, "1"),
    ],
)
def test_the_papers_example_goes_where_the_paper_sends_it(
    decode: PerfModel, slo_s: float, chosen: str
) -> None:
    policy = RankAware(replace(SETTINGS, decode=decode, slo_s=slo_s))
    nodes = [node("1", ranks(*[32] * 24)), node("2", ranks(*[64] * 16))]
    assert policy.route(ask(rank=64), nodes).node_id == chosen


# -- baselines ---------------------------------------------------------------------------------------------------------


def test_load_balance_counts_those_that_run_and_those_that_are_queued() -> None:
    nodes = [busy("a", 3), node("b", ranks(8), ranks(8, 8, 8)), node("c", ranks(8), ranks(8)), busy("d", 2)]
    assert LoadBalance().route(ask(), nodes).node_id == "c"


def test_load_balance_stays_among_equals() -> None:
    nodes = [busy("a", 2), busy("home", 2), busy("b", 3)]
    assert LoadBalance().route(ask(home="home"), nodes).node_id == "home"
    assert LoadBalance().route(ask(home="b"), nodes).node_id == "a"


@pytest.mark.parametrize(
    ("num_home", "num_other", "chosen"), [(5, 4, "home"), (6, 4, "home"), (7, 4, "other"), (1, 0, "home")]
)
def test_relieve_leaves_a_node_that_has_far_more_than_the_emptiest(
    num_home: int, num_other: int, chosen: str
) -> None:
    nodes = [busy("home", num_home), busy("other", num_other), busy("full", 9)]
    assert Relieve().route(ask(home="home"), nodes).node_id == chosen


def test_relieve_takes_new_sessions_to_the_emptiest_and_nobody_to_none() -> None:
    assert Relieve().route(ask(), [busy("a", 3), busy("b", 2)]).node_id == "b"
    assert Relieve().route(ask(home="a"), [busy("a", 3, is_open=False)]).reason == "nobody"


def test_most_idle_counts_tokens() -> None:
    nodes = [busy("few", 1, num_tokens=900), busy("many", 5, num_tokens=300)]
    assert MostIdle().route(ask(), nodes).node_id == "many"


def test_first_fit_fills_a_node_before_the_next_and_then_takes_the_emptiest() -> None:
    policy = FirstFit(max_batch=3)
    assert policy.route(ask(), [busy("a", 2), busy("b", 0)]).node_id == "a"
    assert policy.route(ask(), [busy("a", 3), busy("b", 1), busy("c", 0)]).node_id == "b"
    assert policy.route(ask(), [busy("a", 2, free=50), busy("b", 1)]).node_id == "b", "no memory for it on a"
    assert policy.route(ask(), [busy("a", 5), busy("b", 4), busy("c", 4)]).node_id == "b"


def test_random_is_even_and_the_same_again() -> None:
    nodes = [node(str(at)) for at in range(20)]
    asks = [ask(request_id=f"{at:06d}") for at in range(4000)]
    chosen = [Random().route(one, nodes).node_id for one in asks]
    counts = Counter(chosen)
    assert len(counts) == 20 and min(counts.values()) > 140 and max(counts.values()) < 260
    assert chosen == [Random().route(one, nodes).node_id for one in asks]
    assert chosen != [Random("other").route(one, nodes).node_id for one in asks]


def test_sticky_stays_however_busy_its_node_is() -> None:
    nodes = [busy("a", 0), busy("home", 50, free=0)]
    assert Sticky().route(ask(home="home"), nodes).node_id == "home"
    assert Sticky().route(ask(), nodes).node_id == "a"


@pytest.mark.parametrize("home", [busy("home", 0, is_open=False), busy("elsewhere", 9)])
def test_sticky_leaves_a_node_that_is_gone(home: NodeFacts) -> None:
    assert Sticky().route(ask(home="home"), [home, busy("a", 3)]).node_id == "a"


def test_sticky_leaves_a_node_that_cannot_have_the_adapter() -> None:
    nodes = [busy("home", 0), busy("a", 3)]
    assert Sticky().route(ask(home="home", usual=None, loads={"a": 0.1}), nodes).node_id == "a"


def test_urgent_requests_are_spread_and_others_keep_away_from_them() -> None:
    policy = PriorityRouting(SETTINGS)
    nodes = [busy("a", 1, num_urgent=1), busy("b", 4), busy("c", 1)]
    assert policy.route(ask(is_urgent=True), nodes[:2]).node_id == "b"
    assert policy.route(ask(), nodes).node_id == "c"


def test_others_are_paused_only_where_an_urgent_request_would_be_slow() -> None:
    # With it there are three of rank 8: 34 ms.
    for slo_s, expected in ((0.033, True), (0.035, False)):
        policy = PriorityRouting(replace(SETTINGS, slo_s=slo_s))
        assert policy.route(ask(is_urgent=True), [busy("a", 2)]).pauses_others is expected
        assert not policy.route(ask(), [busy("a", 2)]).pauses_others


# -- ours --------------------------------------------------------------------------------------------------------------

OURS = Overture(replace(SETTINGS, decode=MBGMV, prefill_step_s=0.02))


def test_costs_by_hand() -> None:
    there = node("a", ranks(8, 16), ranks(8), num_tokens=50, queued_tokens=30)
    settings = replace(OURS.settings, decode=replace(MBGMV, token_s=0.0001), slo_s=0.05, loads_block=True)
    request = ask(rank=32, kv={"a": CachedKv(60, 0.005)}, loads={"a": 0.5})
    cost = Overture(settings).route(request, [there]).cost
    # Decoding goes from 32 + 10 + 5 = 47 ms to 64 + 10 + 15 = 89 ms. Its prompt: half a step, the load, its KV, then one step with 30 + 40 tokens.
    start_s = 0.0235 + 0.5 + 0.005 + 0.02 + 0.030 + 0.040
    # Three others see the load and its own 40 tokens: the step itself comes for the queued one. Half of their ten tokens are still to come.
    # The one that is queued may wait for KV, too, behind this one's.
    others_s = 3 * (0.5 + 0.040 + 5 * 0.042) + 0.005
    late_s = 10 * 0.039 + 3 * 5 * 0.039
    assert cost is not None
    assert (cost.start_s, cost.decode_s, cost.others_s, cost.late_s) == pytest.approx(
        (start_s, 0.89, others_s, late_s)
    )
    assert cost.total_s == pytest.approx(START_WEIGHT * start_s + 0.89 + others_s + LATE_WEIGHT * late_s)


def test_it_goes_where_its_kv_is_unless_that_costs_others_more() -> None:
    kv = {"b": CachedKv(90)}
    assert OURS.route(ask(kv=kv), [busy("a", 1), busy("b", 1)]).node_id == "b"
    assert OURS.route(ask(kv=kv), [busy("a", 1), busy("b", 9)]).node_id == "a"


def test_kv_that_takes_longer_to_the_device_than_computing_it_counts_for_nothing() -> None:
    slow = OURS.route(ask(kv={"a": CachedKv(90, load_s=5.0)}), [busy("a", 0)]).cost
    none = OURS.route(ask(), [busy("a", 0)]).cost
    assert slow == none


def test_it_goes_where_its_adapter_is() -> None:
    nodes = [busy("a", 1), busy("b", 2)]
    assert OURS.route(ask(usual=0.5), nodes).node_id == "a"
    assert OURS.route(ask(usual=0.5, loads={"b": 0.0}), nodes).node_id == "b"


def test_a_load_costs_those_that_are_there_where_it_holds_them_up() -> None:
    blocks = Overture(replace(OURS.settings, loads_block=True))
    held_up, alone = (one.route(ask(usual=0.5), [busy("a", 4)]).cost for one in (blocks, OURS))
    assert held_up is not None and alone is not None
    assert held_up.others_s - alone.others_s == pytest.approx(4 * 0.5)
    assert held_up.start_s == alone.start_s


def test_it_joins_a_prompt_that_is_to_be_computed_anyway() -> None:
    settings = replace(OURS.settings, decode=PerfModel("mbgmv", 1e-6, 0.03), prompt_token_s=1e-6)
    nodes = [busy("a", 5), node("b", ranks(8, 8, 8, 8, 8), ranks(8))]
    assert Overture(settings).route(ask(), nodes).node_id == "b"


def test_with_bgmv_it_keeps_a_large_rank_away_from_small_ones() -> None:
    ours = Overture(replace(OURS.settings, decode=BGMV))
    nodes = [node("small", ranks(8, 8, 8, 8)), node("large", ranks(64, 64, 64, 64))]
    assert ours.route(ask(rank=64), nodes).node_id == "large"
    assert ours.route(ask(rank=8), nodes).node_id == "small"


def test_a_node_that_is_late_already_is_not_given_everything() -> None:
    ours = Overture(replace(OURS.settings, slo_s=0.1))
    nodes = [busy("late", 20), busy("on the brink", 11)]
    assert ours.route(ask(), nodes).node_id == "on the brink"


def test_it_stays_at_home_unless_that_costs_clearly_more() -> None:
    nodes = [busy("a", 10), busy("home", 11), busy("b", 12)]
    assert OURS.route(ask(home="home"), nodes).node_id == "home"
    assert OURS.route(ask(), nodes).node_id == "a"
    assert OURS.route(ask(home="home"), [busy("a", 3), busy("home", 11)]).node_id == "a"


def test_kv_that_can_be_fetched_makes_other_nodes_cheaper_but_not_as_cheap_as_home() -> None:
    at_home = {"home": CachedKv(90, 0.001)}
    nodes = [busy("a", 2), busy("home", 2)]
    stuck = ask(kv=at_home, home="home")
    free = msgspec.structs.replace(stuck, kv_elsewhere=CachedKv(90, 0.002))
    elsewhere = [OURS.route(each, nodes[:1]).cost for each in (free, stuck)]
    at_its_home = OURS.route(stuck, nodes[1:]).cost
    assert elsewhere[0] is not None and elsewhere[1] is not None and at_its_home is not None
    assert at_its_home.total_s < elsewhere[0].total_s < elsewhere[1].total_s


def test_no_node_is_given_far_more_requests_than_the_emptiest_however_little_they_cost() -> None:
    """Long conversations here, short ones there would be the fewest seconds in all, and no balance."""
    nodes = [busy("long", 2, num_tokens=10**6), busy("short", 13, num_tokens=100)]
    tokens = replace(OURS.settings, decode=PerfModel("mbgmv", 0.0, 0.01, 1e-7), slo_s=10.0)
    assert Overture(tokens).route(ask(rank=0), nodes).node_id == "long", (
        "13 is more than three times two and six"
    )
    half = [nodes[0], busy("short", 7, num_tokens=100)]
    assert Overture(tokens).route(ask(rank=0), half).node_id == "short"


def test_a_node_at_half_the_speed_is_full_with_half_as_many() -> None:
    ours = Overture(replace(SETTINGS, decode=MBGMV))
    slow = msgspec.structs.replace(busy("slow", 7), perf=perf(2.0))
    assert ours._within_bounds([slow, busy("fast", 2)]) == [busy("fast", 2)]
    assert ours._within_bounds([busy("slow", 7), busy("fast", 2)]) == [busy("slow", 7), busy("fast", 2)]


@pytest.mark.parametrize("name", ["overture", "rank_aware", "load_balance", "priority"])
def test_without_adapters_nobody_piles_up_on_one_node(name: str) -> None:
    policy = POLICIES[name](SETTINGS)
    counts = Counter[str]()
    for number in range(40):
        nodes = [node(node_id, ranks(*[0] * counts[node_id])) for node_id in ("a", "b")]
        counts[str(policy.route(ask(rank=0, request_id=str(number)), nodes).node_id)] += 1
    assert counts["a"] == counts["b"]


# -- nodes of unequal speed --------------------------------------------------------------------------------------------


def perf(times: float = 1.0, **more: float) -> NodePerf:
    """As SETTINGS, so many times slower."""
    return NodePerf(
        decode=PerfModel("mbgmv", 0.001 * times, 0.01 * times),
        prefill=PerfModel("mbgmv", 0.002 * times, 0.02 * times),
        prompt_token_s=0.001 * times,
        **({"answer_tokens": 10.0} | more),
    )


@pytest.mark.parametrize("name", ["overture", "rank_aware"])
def test_a_node_at_half_the_speed_is_given_less(name: str) -> None:
    policy = POLICIES[name](replace(SETTINGS, decode=MBGMV))
    counts = Counter[str]()
    for _ in range(60):
        nodes = [
            msgspec.structs.replace(busy(node_id, counts[node_id]), perf=perf(times))
            for node_id, times in (("slow", 2.0), ("fast", 1.0))
        ]
        counts[str(policy.route(ask(), nodes).node_id)] += 1
    assert 1.3 < counts["fast"] / counts["slow"] < 3.5


def test_a_node_that_says_how_fast_it_is_counts_by_that_and_the_others_by_the_settings() -> None:
    ours = Overture(replace(SETTINGS, decode=MBGMV))
    nodes = [busy("unknown", 3), msgspec.structs.replace(busy("slow", 2), perf=perf(3.0))]
    assert ours.route(ask(), nodes).node_id == "unknown"
    assert ours.route(ask(), [nodes[0], busy("alike", 2)]).node_id == "alike"
    same = msgspec.structs.replace(busy("unknown", 3), perf=perf())
    assert ours.route(ask(), [same]).cost == ours.route(ask(), nodes[:1]).cost


def test_an_urgent_request_pauses_others_by_its_own_nodes_pace() -> None:
    policy = PriorityRouting(replace(SETTINGS, slo_s=0.05))
    slow = msgspec.structs.replace(busy("a", 2), perf=perf(2.0))
    assert policy.route(ask(is_urgent=True), [slow]).pauses_others
    assert not policy.route(ask(is_urgent=True), [busy("a", 2)]).pauses_others


def test_settings_are_those_of_the_node_in_the_middle() -> None:
    nodes = [
        msgspec.structs.replace(busy(str(at), 0), perf=perf(times, answer_tokens=answer))
        for at, (times, answer) in enumerate([(1.0, 10.0), (9.0, 30.0), (2.0, 20.0)])
    ]
    found = settings_of([busy("silent", 0), *nodes])
    assert (found.decode, found.prefill) == (nodes[2].perf.decode, nodes[2].perf.prefill)  # type: ignore[union-attr]
    assert (found.prompt_token_s, found.answer_tokens) == pytest.approx((0.002, 20.0))
    assert found.slo_s == pytest.approx(SLO_TIMES * 0.02), "one of rank 0 alone"
    assert settings_of(nodes, slo_s=0.3).slo_s == 0.3


def test_before_any_node_has_said_anything_there_are_settings_all_the_same() -> None:
    ours = Overture(settings_of([]))
    assert ours.route(ask(), [busy("a", 2), busy("b", 1)]).node_id == "b"


def test_kv_takes_longer_from_further_away() -> None:
    node = perf(kv_token_s=1e-5, kv_disk_token_s=3e-5)
    assert node.kv_load_s(100) == pytest.approx(1e-3)
    assert node.kv_load_s(100, 50) == pytest.approx(1.5e-3 + 1.5e-3)


def test_those_who_are_there_count_with_what_they_have_left_to_answer() -> None:
    """Where it is predicted; else with half of the usual answer."""
    nearly_done, long = (OURS.route(ask(), [busy("a", 4, answer_tokens=tokens)]).cost for tokens in (4, 400))
    unknown = OURS.route(ask(), [busy("a", 4)]).cost
    assert nearly_done is not None and long is not None and unknown is not None
    assert nearly_done.others_s < unknown.others_s < long.others_s


# -- all of them -------------------------------------------------------------------------------------------------------


def test_names_are_those_in_the_table() -> None:
    assert {make(SETTINGS).name for make in POLICIES.values()} == set(POLICIES)
    assert all(make(SETTINGS).name == name for name, make in POLICIES.items())


FACTS = st.builds(
    lambda running, queued, tokens, free, urgent, is_open: {
        "running": ranks(*running),
        "queued": ranks(*queued),
        "num_tokens": tokens,
        "queued_tokens": len(queued) * 20,
        "free": free,
        "num_urgent": urgent,
        "is_open": is_open,
    },
    st.lists(st.sampled_from([0, 8, 64]), max_size=5),
    st.lists(st.sampled_from([0, 8, 64]), max_size=3),
    st.integers(0, 500),
    st.sampled_from([0, 109, 110, 5000]),
    st.integers(0, 2),
    st.booleans(),
)


@pytest.mark.parametrize("name", POLICIES)
@given(
    facts=st.lists(FACTS, max_size=6),
    able=st.sets(st.integers(0, 5)),
    has_everywhere=st.booleans(),
    home=st.integers(0, 7),
    is_urgent=st.booleans(),
)
def test_a_node_is_chosen_that_can_serve_it(
    name: str, facts: list[dict], able: set[int], has_everywhere: bool, home: int, is_urgent: bool
) -> None:
    nodes = [node(str(at), **one) for at, one in enumerate(facts)]
    request = ask(
        home=str(home),
        is_urgent=is_urgent,
        kv={str(home): CachedKv(40, 0.01)},
        loads={str(at): 0.1 for at in able},
        usual=0.2 if has_everywhere else None,
    )
    policy = POLICIES[name](SETTINGS)
    route = policy.route(request, nodes)
    assert policy.route(request, nodes) == route, "deciding changed something"
    may = [one for one in nodes if one.is_open and (has_everywhere or int(one.node_id) in able)]
    if not may:
        assert (route.node_id, route.reason) == (None, "nobody")
        return
    (chosen,) = (one for one in may if one.node_id == route.node_id)
    if name == "sticky" and chosen.node_id == request.home:
        return
    has_room = any(one.free_tokens >= 110 for one in may)
    assert route.reason == ("policy" if has_room else "no_memory")
    assert chosen.free_tokens >= 110 or not has_room


def test_without_room_anywhere_all_that_are_open_are_candidates() -> None:
    nodes = [busy("a", 1, free=10), busy("b", 0, free=10, is_open=False)]
    assert candidates(ask(), nodes) == ([nodes[0]], "no_memory")


@pytest.mark.parametrize("wrong", [{"slo_s": 0.0}, {"answer_tokens": 0.0}, {"max_batch": 0}])
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        replace(SETTINGS, **wrong)


def test_a_cost_is_the_sum_of_its_parts() -> None:
    assert Cost(1.0, 2.0, 3.0, 0.5).total_s == pytest.approx(START_WEIGHT + 5.0 + LATE_WEIGHT * 0.5)
