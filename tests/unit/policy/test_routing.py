"""Which node serves a request: each policy against sums made by hand, and against what must hold whatever the nodes report."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.nodes import routing
from engine_bridge.policy.nodes.routing import CachedKv, Overture, Relieve, RequestEstimate, Settings
from engine_bridge.protocol.node_facts import NodeFacts, NodePerf, PerfModel, Ranks

BGMV, MBGMV = PerfModel("bgmv", 0.001, 0.01), PerfModel("mbgmv", 0.001, 0.01)
SETTINGS = Settings(
    decode=BGMV, prefill=PerfModel("bgmv", 0.002, 0.02), slo_s=1.0, answer_tokens=10, prompt_token_s=0.001
)


def ranks(*values: int) -> Ranks:
    return Ranks(len(values), sum(values), max(values, default=0))


NOBODY = ranks()


def node(node_id: str, running: Ranks = NOBODY, queued: Ranks = NOBODY, **more: Any) -> NodeFacts:
    facts = {"num_tokens": 0, "queued_tokens": 0, "free_tokens": 10_000} | more
    return NodeFacts(node_id=node_id, running=running, queued=queued, **facts)


def busy(node_id: str, num: int, **more: Any) -> NodeFacts:
    return node(node_id, ranks(*[8] * num), **more)


def ask(**more: Any) -> RequestEstimate:
    facts = {"request_id": "r", "rank": 8, "num_prompt_tokens": 100, "num_answer_tokens": 10} | more
    return RequestEstimate(**facts)


# Three requests, one of them queued; four of the new one's rank.
MIXED, ALIKE = node("mixed", ranks(8, 16), ranks(8)), node("alike", ranks(32, 32, 32, 32))


def test_algorithm_1_by_hand_with_bgmv() -> None:
    policy = routing.RankAware(SETTINGS)
    # mixed: prompts (2·32·2 + 20) - (1·8·2 + 20) = 112 ms, a tenth of it; decoding (4·32 + 10) - (3·16 + 10) = 80 ms.
    assert policy.cost_s(32, MIXED) == pytest.approx(0.0112 + 0.080)
    # alike: prompts 1·32·2 + 20 = 84 ms, since nobody is queued; decoding (5·32 + 10) - (4·32 + 10) = 32 ms.
    assert policy.cost_s(32, ALIKE) == pytest.approx(0.0084 + 0.032)
    # Times three and times four requests: 0.274 and 0.162.
    assert policy.route(ask(rank=32), [MIXED, ALIKE]).node_id == "alike"


@pytest.mark.parametrize(
    ("num_home", "num_other", "chosen"), [(5, 4, "home"), (6, 4, "home"), (7, 4, "other"), (1, 0, "home")]
)
def test_relieve_leaves_a_node_that_has_far_more(num_home: int, num_other: int, chosen: str) -> None:
    nodes = [busy("home", num_home), busy("other", num_other), busy("full", 9)]
    assert Relieve().route(ask(home="home"), nodes).node_id == chosen


def test_urgent_requests_are_spread_and_others_keep_away_from_them() -> None:
    policy = routing.POLICIES["priority"](SETTINGS)
    nodes = [busy("a", 1, num_urgent=1), busy("b", 4), busy("c", 1)]
    assert policy.route(ask(is_urgent=True), nodes[:2]).node_id == "b"
    assert policy.route(ask(), nodes).node_id == "c"


OURS = Overture(replace(SETTINGS, decode=MBGMV, prefill_step_s=0.02))


def test_costs_by_hand() -> None:
    there = node("a", ranks(8, 16), ranks(8), num_tokens=50, queued_tokens=30)
    settings = replace(OURS.settings, decode=replace(MBGMV, token_s=0.0001), slo_s=0.05)
    request = ask(rank=32, kv={"a": CachedKv(60, 0.005)}, adapter_load_s={"a": 0.5})
    cost = Overture(settings).route(request, [there]).cost
    # Decoding goes from 32 + 10 + 5 = 47 ms to 64 + 10 + 15 = 89 ms. Its prompt: half a step, the load, its KV, then one step with 30 + 40 tokens.
    start_s = 0.0235 + 0.5 + 0.005 + 0.02 + 0.030 + 0.040
    # Three others see its own 40 tokens: the step itself comes for the queued one. Half of their ten tokens are still to come.
    # The one that is queued may wait for KV, too, behind this one's.
    others_s = 3 * (0.040 + 5 * 0.042) + 0.005
    late_s = 10 * 0.039 + 3 * 5 * 0.039
    found = (cost.start_s, cost.decode_s, cost.others_s, cost.late_s)
    assert found == pytest.approx((start_s, 0.89, others_s, late_s))
    weighted_s = routing.START_WEIGHT * start_s + routing.LATE_WEIGHT * late_s
    assert cost.total_s == pytest.approx(weighted_s + 0.89 + others_s)


def test_kv_that_takes_longer_to_the_device_than_computing_it_counts_for_nothing() -> None:
    slow = OURS.route(ask(kv={"a": CachedKv(90, load_s=5.0)}), [busy("a", 0)]).cost
    assert slow == OURS.route(ask(), [busy("a", 0)]).cost


def test_it_stays_at_home_unless_that_costs_clearly_more() -> None:
    nodes = [busy("a", 10), busy("home", 11), busy("b", 12)]
    assert OURS.route(ask(home="home"), nodes).node_id == "home"
    assert OURS.route(ask(), nodes).node_id == "a"
    assert OURS.route(ask(home="home"), [busy("a", 3), busy("home", 11)]).node_id == "a"


def test_no_node_is_given_far_more_requests_than_the_emptiest_however_little_they_cost() -> None:
    """Long conversations here, short ones there would be the fewest seconds in all, and no balance."""
    nodes = [busy("long", 2, num_tokens=10**6), busy("short", 13, num_tokens=100)]
    tokens = replace(OURS.settings, decode=PerfModel("mbgmv", 0.0, 0.01, 1e-7), slo_s=10.0)
    # 13 is more than three times two and six.
    assert Overture(tokens).route(ask(rank=0), nodes).node_id == "long"
    half = [nodes[0], busy("short", 7, num_tokens=100)]
    assert Overture(tokens).route(ask(rank=0), half).node_id == "short"
    for num, chosen in ((5, "slow"), (7, "long")):  # at half the speed half as many are as much
        slow = busy("slow", num, num_tokens=100, perf=perf(2.0))
        assert (
            Overture(tokens).route(ask(rank=0), [busy("long", 2, num_tokens=10**8), slow]).node_id == chosen
        )


def perf(times: float = 1.0, **more: float) -> NodePerf:
    """As SETTINGS, so many times slower."""
    return NodePerf(
        decode=PerfModel("mbgmv", 0.001 * times, 0.01 * times),
        prefill=PerfModel("mbgmv", 0.002 * times, 0.02 * times),
        prompt_token_s=0.001 * times,
        **({"answer_tokens": 10.0} | more),
    )


def test_settings_are_those_of_the_node_in_the_middle() -> None:
    nodes = [
        msgspec.structs.replace(busy(str(at), 0), perf=perf(times, answer_tokens=answer))
        for at, (times, answer) in enumerate([(1.0, 10.0), (9.0, 30.0), (2.0, 20.0)])
    ]
    found = routing.settings_of([busy("silent", 0), *nodes])
    assert (found.decode, found.prefill) == (nodes[2].perf.decode, nodes[2].perf.prefill)  # type: ignore[union-attr]
    assert (found.prompt_token_s, found.answer_tokens) == pytest.approx((0.002, 20.0))
    assert found.slo_s == pytest.approx(routing.SLO_TIMES * 0.02), "one of rank 0 alone"
    assert routing.settings_of(nodes, slo_s=0.3).slo_s == 0.3


def test_those_who_are_there_count_with_what_they_have_left_to_answer() -> None:
    """Where it is predicted; else with half of the usual answer."""
    nearly_done, long = (OURS.route(ask(), [busy("a", 4, answer_tokens=tokens)]).cost for tokens in (4, 400))
    unknown = OURS.route(ask(), [busy("a", 4)]).cost
    assert nearly_done.others_s < unknown.others_s < long.others_s


FACTS = st.builds(
    lambda running, queued, tokens, free, urgent, is_open: {
        "running": ranks(*running),
        "queued": ranks(*queued),
        "num_tokens": tokens,
        "queued_tokens": len(queued) * 20,
        "free_tokens": free,
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


@given(
    facts=st.lists(FACTS, max_size=6),
    able=st.sets(st.integers(0, 5)),
    has_everywhere=st.booleans(),
    home=st.integers(0, 7),
    is_urgent=st.booleans(),
)
def test_a_node_is_chosen_that_can_serve_it(
    facts: list[dict], able: set[int], has_everywhere: bool, home: int, is_urgent: bool
) -> None:
    nodes = [node(str(at), **one) for at, one in enumerate(facts)]
    request = ask(
        home=str(home),
        is_urgent=is_urgent,
        kv={str(home): CachedKv(40, 0.01)},
        adapter_load_s={str(at): 0.1 for at in able},
        usual_load_s=0.2 if has_everywhere else None,
    )
    may = {one.node_id: one for one in nodes if one.is_open and (has_everywhere or int(one.node_id) in able)}
    has_room = any(one.free_tokens >= 110 for one in may.values())
    for name, make in routing.POLICIES.items():
        policy = make(SETTINGS)
        route = policy.route(request, nodes)
        assert policy.route(request, nodes) == route, f"{name}: deciding changed something"
        if not may:
            assert (route.node_id, route.reason) == (None, "nobody"), name
        elif name != "sticky" or route.node_id != request.home:
            assert route.reason == ("policy" if has_room else "no_memory"), name
            assert may[route.node_id].free_tokens >= 110 or not has_room, name
