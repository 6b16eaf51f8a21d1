"""A simulated node against schedules worked out by hand, and against what must hold whatever happens."""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

import bench.sim.core.adapters
import bench.sim.core.lane_fits
import bench.sim.core.node
import bench.sim.core.node_moves
import bench.sim.core.node_state
import bench.sim.core.node_steps
from bench.sim.core.clock import Clock
from bench.sim.core.hardware import AssistingHost, Gpu
from bench.sim.core.host_kv import HostKv, HostMemory
from bench.sim.core.lane_fits import LaneFits
from bench.sim.core.links import SharedLink
from bench.sim.core.models import Model
from bench.sim.core.node import Node
from bench.sim.core.requests import Arrival, Request
from bench.sim.core.shapes import ACTIVATION_BYTES, BLOCK_TOKENS, OVERTURE, SLORA, VLLM, VLLM_0_2, Shape
from bench.sim.core.steps import Chunk, Kernel, StepCost, bgmv, mbgmv
from engine_bridge.policy import adapter_cache, arrivals, baselines, mlq, preemption, queue
from engine_bridge.policy.adapter_cache import ChameleonScore, Lru
from engine_bridge.policy.baselines import Fair, Fcfs, Sjf
from engine_bridge.policy.costs import KvShape, LinearPrefill, Link
from engine_bridge.policy.lanes import Lanes
from engine_bridge.policy.mlq import Mlq
from engine_bridge.policy.mlq_decision import MlqSettings
from engine_bridge.policy.preemption import POLICIES as PREEMPTIONS
from engine_bridge.policy.preemption import Preemption, cheaper, last_in_first_out
from engine_bridge.policy.queue import Decision, QueuePolicy, Room, Running, Waiting
from engine_bridge.policy.ways_back import FullCost, SwapOrRecompute
from engine_bridge.predict.length import LengthGuess

TINY = Model("tiny", 1, 16, 16, 1, 1, 16, 10_000)
RANKS = (8, 16, 32)


def gpu(num_blocks: int, *, step_s: float = 1.0, link_bytes_per_s: float = 1e30) -> Gpu:
    """A device of so many blocks on which every step takes `step_s`, whatever is in it."""
    memory = TINY.weight_bytes + ACTIVATION_BYTES + num_blocks * BLOCK_TOKENS * TINY.kv_bytes_per_token
    return Gpu(
        "unit",
        1e30,
        1e30,
        memory,
        link_bytes_per_s,
        link_share=1.0,
        lora_share=1.0,
        step_s=step_s,
        usable_share=1.0,
    )


@dataclass(frozen=True, slots=True)
class Knows:
    """Guesses every answer times this."""

    share: float = 1.0

    def guess(self, arrival: Arrival) -> LengthGuess:
        p50 = max(round(arrival.num_answer_tokens * self.share), 1)
        return LengthGuess(p50, 2 * p50, "test")

    def ended(self, arrival: Arrival) -> None: ...


def serve(
    asked: Sequence[tuple[float, int, int]],
    *,
    policy: QueuePolicy | None = None,
    shape: Shape = SLORA,
    num_blocks: int = 1000,
    adapters: Sequence[int | None] = (),
    check_every_s: float = 0.0,
    **parts: Any,
) -> tuple[Node, list[Request]]:
    """Serve requests (at, prompt, answer); they come back in order of arrival. parts: more of a node's, and `gpu`, `guesser`, `assistant`."""
    clock = Clock()
    cost = StepCost(parts.pop("gpu", gpu(num_blocks)), TINY, assistant=parts.pop("assistant", None))
    guesser = parts.pop("guesser", Knows())
    node = Node(clock, cost, shape, policy or Fcfs(), guesser, adapter_ranks=RANKS, **parts)
    for at, (at_s, prompt, answer) in enumerate(asked):
        adapter_id = adapters[at] if adapters else None
        arrival = Arrival(f"{at:04d}", at_s, prompt, answer, adapter_id)
        clock.at(at_s, lambda now, arrival=arrival: node.submit(arrival))
    if check_every_s:
        for check in range(1, round((asked[-1][0] + 50) / check_every_s)):
            clock.at(check * check_every_s, lambda now: node.check_invariants())
    clock.run()
    node.check_invariants()
    return node, sorted(node.ended, key=lambda request: request.arrival.request_id)


def times(requests: Sequence[Request]) -> list[tuple[float, float]]:
    """First tokens and ends."""
    return [(request.first_token_s, request.ended_s) for request in requests]


# -- by hand -----------------------------------------------------------------------------------------------------------

ONE_AT_A_TIME = replace(SLORA, max_running=1)
THREE = ((0.0, 10, 3), (0.5, 10, 6), (0.6, 10, 2))


def test_first_come_is_served_first() -> None:
    # Each a prefill of 1 s, then 1 s for each further token.
    _, requests = serve(THREE, shape=ONE_AT_A_TIME)
    assert times(requests) == [(1.0, 3.0), (4.0, 9.0), (10.0, 11.0)]


def test_the_shortest_job_passes_those_that_came_before_it() -> None:
    _, requests = serve(THREE, shape=ONE_AT_A_TIME, policy=Sjf())
    assert times(requests) == [(1.0, 3.0), (6.0, 11.0), (4.0, 5.0)]


def test_whole_prompts_hold_up_those_that_decode() -> None:
    # The second comes while the first decodes: it is computed from 2 to 3 s, and nobody decodes meanwhile.
    _, requests = serve([(0.0, 10, 4), (1.5, 10, 2)])
    assert times(requests) == [(1.0, 5.0), (3.0, 4.0)]


def test_mixed_steps_decode_beside_prompts() -> None:
    _, requests = serve([(0.0, 10, 4), (1.5, 10, 2)], shape=VLLM)
    assert times(requests) == [(1.0, 4.0), (3.0, 4.0)]


def test_a_long_prompt_is_computed_in_chunks() -> None:
    # 8 tokens a step: 8, 8, 4. The other one decodes in these steps, and takes one token of their budget.
    shape = replace(VLLM, step_tokens=8)
    _, requests = serve([(0.0, 20, 2)], shape=shape)
    assert times(requests) == [(3.0, 4.0)]
    # With one that decodes, 7 are left: 7, 7, 6.
    _, requests = serve([(0.0, 8, 9), (0.5, 20, 1)], shape=shape)
    assert times(requests) == [(1.0, 9.0), (4.0, 4.0)]


def test_nobody_starts_whom_the_step_has_no_tokens_for() -> None:
    # Two of 8 tokens fill two steps of 8: the shortest that comes in between starts before the longer one that came first.
    shape = replace(VLLM, step_tokens=8)
    asked = [(0.0, 8, 1), (0.0, 8, 5), (0.5, 8, 1)]
    _, requests = serve(asked, shape=shape, policy=Sjf())
    assert times(requests) == [(1.0, 1.0), (3.0, 7.0), (2.0, 2.0)]


def test_an_arrival_meets_the_engine_at_the_end_of_a_step() -> None:
    # The first decodes alone for long; its steps are counted together, but the second starts after the one in which it came.
    _, requests = serve([(0.0, 10, 100), (10.4, 10, 2)])
    assert times(requests)[1] == (12.0, 13.0)
    assert requests[0].ended_s == 101.0


def test_requests_wait_for_blocks_and_start_when_they_come_free() -> None:
    # Each takes 2 of 4 blocks (20 tokens and the answer). The second's prompt holds up the first, which ends at 5 s; then the third starts,
    # and holds up the second.
    _, requests = serve([(0.0, 20, 4), (0.5, 20, 6), (0.5, 20, 1)], num_blocks=4)
    assert times(requests) == [(1.0, 5.0), (2.0, 8.0), (6.0, 6.0)]


# -- adapters ----------------------------------------------------------------------------------------------------------


def slow_link(seconds: float) -> Gpu:
    """A device to which an adapter of rank 8 takes so long."""
    return gpu(1000, link_bytes_per_s=TINY.lora_bytes(8) / seconds)


def test_a_load_that_blocks_holds_up_everybody() -> None:
    asked, adapters = [(0.0, 10, 6), (1.5, 10, 1)], (None, 0)
    _, requests = serve(asked, adapters=adapters, gpu=slow_link(3.0))
    # Loaded from 2 to 5 s.
    assert times(requests) == [(1.0, 10.0), (6.0, 6.0)]


def test_a_load_that_does_not_block_holds_up_its_own_request() -> None:
    asked, adapters = [(0.0, 10, 8), (1.5, 10, 1)], (None, 0)
    _, requests = serve(asked, adapters=adapters, gpu=slow_link(3.0), shape=VLLM)
    assert times(requests) == [(1.0, 8.0), (6.0, 6.0)]


def test_whole_prompts_that_exceed_a_step_take_two() -> None:
    # Both wait for the same adapter until 3 s.
    shape = replace(SLORA, step_tokens=16, loads_block=False)
    _, requests = serve([(0.0, 10, 1), (0.0, 10, 1)], adapters=(0, 0), gpu=slow_link(3.0), shape=shape)
    assert [request.first_token_s for request in requests] == pytest.approx([4.0, 5.0])


def test_two_loads_share_the_link() -> None:
    asked, adapters = [(0.0, 10, 1), (0.0, 10, 1)], (0, 1)
    # 8 and 16 at 8 in 3 s: both get half until the smaller has its own at 6 s; the larger has 8 left then.
    _, requests = serve(asked, adapters=adapters, gpu=slow_link(3.0), shape=VLLM)
    assert [request.first_token_s for request in requests] == pytest.approx([7.0, 10.0])


def test_without_a_cache_an_adapter_goes_with_its_last_request() -> None:
    asked, adapters = [(0.0, 10, 1), (20.0, 10, 1)], (0, 0)
    node, requests = serve(asked, adapters=adapters, gpu=slow_link(3.0))
    assert [request.ttft_s for request in requests] == pytest.approx([4.0, 4.0])
    assert node.adapters.used_blocks == 0


def test_with_a_cache_the_next_request_finds_it() -> None:
    asked, adapters = [(0.0, 10, 1), (20.0, 10, 1)], (0, 0)
    node, requests = serve(asked, adapters=adapters, gpu=slow_link(3.0), eviction=Lru())
    assert [request.ttft_s for request in requests] == pytest.approx([4.0, 1.0])
    assert [request.found_adapter for request in requests] == ["missing", "here"]
    assert node.adapters.idle_blocks == node.adapters.used_blocks > 0


def test_cached_adapters_make_room_for_kv() -> None:
    # 1,400 tokens need 88 of the 90 blocks, in some of which an adapter lies.
    node, requests = serve(
        [(0.0, 10, 1), (5.0, 1400, 1)], adapters=(2, None), num_blocks=90, eviction=ChameleonScore()
    )
    assert node.adapters.num_blocks[2] > 2, "the case is none"
    assert requests[1].ttft_s == pytest.approx(1.0)
    assert node.adapters.used_blocks == 0


def test_adapters_of_those_who_wait_are_loaded_ahead() -> None:
    # The second waits for the first's blocks until 10 s, its adapter comes meanwhile.
    asked, adapters = [(0.0, 20, 10), (0.5, 20, 1)], (None, 0)
    device = replace(slow_link(3.0), memory_bytes=gpu(8).memory_bytes)
    _, requests = serve(asked, adapters=adapters, gpu=device, shape=ONE_AT_A_TIME)
    assert times(requests) == [(1.0, 10.0), (11.0, 11.0)]
    assert requests[1].found_adapter == "here"


# -- whatever happens --------------------------------------------------------------------------------------------------


def busy_hour(seed: int, num: int = 300) -> list[tuple[float, int, int]]:
    """More than a small device can take at times."""
    rng = random.Random(seed)
    at_s, asked = 0.0, []
    for _ in range(num):
        at_s += rng.expovariate(0.5)
        asked.append((at_s, rng.randrange(1, 200), rng.randrange(1, 60)))
    return asked


def mlq_parts(num_blocks: int, **settings: Any) -> dict[str, Any]:
    num_tokens = num_blocks * BLOCK_TOKENS
    policy = Mlq(num_tokens, MlqSettings(**settings))
    return {"policy": policy, "lanes": LaneFits(num_tokens), "num_blocks": num_blocks}


CASES = {
    "fcfs": lambda: {"num_blocks": 40},
    "fcfs, vllm": lambda: {"num_blocks": 40, "shape": VLLM},
    "sjf": lambda: {"num_blocks": 40, "policy": Sjf()},
    "mlq": lambda: mlq_parts(40),
    "mlq, vllm": lambda: mlq_parts(40) | {"shape": VLLM},
    "mlq, cache": lambda: mlq_parts(60) | {"eviction": ChameleonScore()},
    "mlq, cache, vllm": lambda: mlq_parts(60) | {"eviction": ChameleonScore(), "shape": VLLM},
}


def served(case: str, seed: int, **parts: Any) -> tuple[Node, list[Request]]:
    asked = busy_hour(seed)
    rng = random.Random(seed)
    adapters = [rng.choice((None, 0, 1, 2)) for _ in asked]
    own = CASES[case]() if case in CASES else {"num_blocks": 40}
    chosen = {"gpu": gpu(own["num_blocks"], link_bytes_per_s=500.0)} | own | parts
    return serve(asked, adapters=adapters, guesser=Knows(0.7), **chosen)


@pytest.mark.parametrize("case", CASES)
def test_every_token_is_made_and_no_block_is_used_twice(case: str) -> None:
    node, requests = served(case, 1, check_every_s=3.7)
    assert len(requests) == 300
    for request in requests:
        assert request.num_done == request.arrival.num_answer_tokens
        assert request.arrival.at_s < request.first_token_s <= request.ended_s
    counts = node.tally.counts
    assert counts["decode_tokens"] + counts["first_tokens"] == sum(r.num_done for r in requests)
    num_prompt = sum(request.arrival.num_prompt_tokens for request in requests)
    assert counts["prefill_tokens"] >= num_prompt
    if not counts["preempted"]:
        assert counts["prefill_tokens"] == num_prompt
    assert node.tally.most_blocks <= node.num_blocks
    assert node.kv_blocks == 0 and not node.running and not node.waiting


def test_the_cases_run_out_of_memory() -> None:
    """Else the test above says little."""
    for case in ("fcfs, vllm", "mlq, vllm", "mlq, cache, vllm"):
        assert served(case, 1)[0].tally.counts["preempted"] > 5, case
    assert served("mlq", 1)[0].tally.most_blocks > 35


@pytest.mark.parametrize("case", CASES)
def test_the_same_seed_gives_the_same_run(case: str) -> None:
    (first, requests), (second, again) = served(case, 2), served(case, 2)
    assert times(requests) == times(again)
    assert first.tally == second.tally
    assert times(served(case, 3)[1]) != times(requests)


class Asked:
    """Fcfs behind another class: the node cannot know that time means nothing to it, and asks before every step."""

    is_timeless = False

    def __init__(self) -> None:
        self._policy = Fcfs()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


@pytest.mark.parametrize("shape", [SLORA, VLLM], ids=lambda shape: shape.name)
def test_steps_counted_together_are_the_steps_taken_one_by_one(shape: Shape) -> None:
    asked = busy_hour(4)
    together, one_by_one = (
        serve(asked, policy=policy, shape=shape, gpu=gpu(40, step_s=0.9), guesser=Knows(0.8))
        for policy in (Fcfs(), Asked())
    )
    assert [t for pair in times(together[1]) for t in pair] == pytest.approx(
        [t for pair in times(one_by_one[1]) for t in pair]
    )
    counts = together[0].tally.counts
    assert counts == one_by_one[0].tally.counts


class NotBefore(Asked):
    """Starts nobody but the first before a time: a policy to which time means something."""

    def __init__(self, at_s: float) -> None:
        super().__init__()
        self._at_s = at_s

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: Room, now: float
    ) -> Decision:
        return Decision() if 0 < now < self._at_s else self._policy.decide(waiting, running, room, now)


def test_a_policy_that_goes_by_time_is_asked_before_every_step() -> None:
    _, requests = serve([(0.0, 10, 100), (1.5, 10, 1)], policy=NotBefore(20.5))
    assert requests[1].first_token_s == 22.0


# -- the policies' own -------------------------------------------------------------------------------------------------


def test_what_decides_are_the_live_engines_classes() -> None:
    live = (baselines, mlq, queue, adapter_cache, arrivals, preemption)
    names = {
        name
        for module in live
        for name, found in vars(module).items()
        if inspect.isclass(found) and found.__module__ == module.__name__
    }
    ours = bench.sim.core
    for module in (
        ours.node,
        ours.node_state,
        ours.node_steps,
        ours.node_moves,
        ours.adapters,
        ours.lane_fits,
    ):
        for name in names & vars(module).keys():
            assert vars(module)[name].__module__.startswith("engine_bridge.policy"), name
    node, _ = serve([(0.0, 1, 1)], **mlq_parts(100))
    assert type(node.policy) is Mlq


class Recorder:
    """An Mlq whose calls are written down, with what it decided and the facts that it had asked for."""

    def __init__(self, num_tokens: int) -> None:
        self._policy = Mlq(num_tokens)
        self.calls: list[tuple[str, tuple[Any, ...], Decision | None]] = []
        self.name = self._policy.name
        self.victim_order, self.charges_tokens = self._policy.victim_order, self._policy.charges_tokens
        self.has_lanes, self.is_timeless = self._policy.has_lanes, self._policy.is_timeless

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: Room, now: float
    ) -> Decision:
        decision = self._policy.decide(waiting, running, room, now)
        facts = ({i: waiting[i] for i in waiting}, {i: running[i] for i in running})
        self.calls.append(("decide", (*facts, room, now), decision))
        return decision

    def _called(self, name: str, *args: Any) -> None:
        getattr(self._policy, name)(*args)
        self.calls.append((name, args, None))

    def arrived(self, facts: Waiting, now: float) -> None:
        self._called("arrived", facts, now)

    def admitted(self, request_id: str, now: float) -> None:
        self._called("admitted", request_id, now)

    def outgrew(self, request_id: str, size_tokens: int) -> None:
        self._called("outgrew", request_id, size_tokens)

    def squashed(self, request_id: str) -> None:
        self._called("squashed", request_id)

    def ended(self, request_id: str) -> None:
        self._called("ended", request_id)

    def refit(self, lanes: Lanes, quotas: Sequence[int], wrs: Mapping[str, float]) -> None:
        self._called("refit", lanes, quotas, dict(wrs))


def recorded(num_blocks: int = 60) -> tuple[Recorder, Node]:
    recorder = Recorder(num_blocks * BLOCK_TOKENS)
    parts = mlq_parts(num_blocks) | {"policy": recorder, "eviction": ChameleonScore()}
    node, _ = served("mlq, cache", 5, **parts)
    return recorder, node


def test_a_fresh_policy_that_is_told_the_same_decides_the_same() -> None:
    recorder, node = recorded()
    fresh = Mlq(60 * BLOCK_TOKENS)
    num_starting = 0
    for name, args, decided in recorder.calls:
        again = getattr(fresh, name)(*args)
        if name == "decide":
            assert again == decided
            num_starting += bool(decided and decided.request_ids)
    assert num_starting > 100
    assert {name for name, *_ in recorder.calls} >= {"arrived", "admitted", "ended", "outgrew", "refit"}
    fresh.check_invariants()
    assert node.tally.counts["admitted"] >= 300


def test_what_was_decided_is_what_the_node_does() -> None:
    recorder, _ = recorded()
    for (name, _, decided), after in zip(recorder.calls, recorder.calls[1:], strict=False):
        if name == "decide" and decided and decided.request_ids and not decided.squash:
            assert after[:2] == ("admitted", (decided.request_ids[0], after[1][1]))


@dataclass(frozen=True, slots=True)
class Told:
    """Guesses what it is told, by place."""

    tokens: tuple[int, ...]

    def guess(self, arrival: Arrival) -> LengthGuess:
        p50 = self.tokens[int(arrival.request_id)]
        return LengthGuess(p50, 2 * p50, "test")

    def ended(self, arrival: Arrival) -> None: ...


def test_a_late_bypasser_gives_up_its_blocks_and_is_answered_all_the_same() -> None:
    # The third runs in 21 of 40 blocks, so the fourth, which needs 31, waits. The fifth is to take one token and passes it, with 10 blocks. It
    # takes 90: when the third ends, the fourth lacks one block, and the fifth, long overdue, is squashed.
    asked = [(0.0, 1, 1), (0.0, 1, 1), (5.0, 300, 30), (6.5, 480, 2), (7.5, 150, 90)]
    parts = {"policy": Mlq(10_000, MlqSettings(squash_share=0.5, aging_s=1.0)), "num_blocks": 40}
    node, requests = serve(asked, guesser=Told((1, 1, 30, 2, 1)), check_every_s=1.3, **parts)
    assert node.tally.counts["bypassed"] == node.tally.counts["squashed"] == 1
    assert [request.num_done for request in requests] == [1, 1, 30, 2, 90]
    bypasser = requests[4]
    assert bypasser.num_preempted == 1 and bypasser.base.times_squashed == 1
    # What it had answered stays: its prompt and 28 tokens are computed again.
    assert node.tally.counts["prefill_tokens"] == 1 + 1 + 300 + 480 + 150 + 150 + 28


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        serve([(0.0, 2000, 1)], num_blocks=10)


def test_facts_of_what_waits_follow_the_adapter() -> None:
    """An adapter that another request uses costs nothing more; one that lies unused takes its blocks from those that count as free."""
    clock = Clock()
    node = Node(
        clock, StepCost(gpu(100), TINY), ONE_AT_A_TIME, Fcfs(), Knows(), adapter_ranks=RANKS, eviction=Lru()
    )
    node.submit(Arrival("a", 0.0, 10, 3, 2))
    node.submit(Arrival("b", 0.0, 10, 3, 2))
    clock.run(until_s=1.5)
    assert node._facts["b"].adapter_blocks == 0
    clock.run()
    node.shape = replace(ONE_AT_A_TIME, max_running=0)
    node.submit(Arrival("c", clock.now, 10, 3, 2))
    assert node._facts["c"].adapter_blocks == node.adapters.num_blocks[2]
    assert node.free_blocks == 100
    assert msgspec.structs.asdict(node._facts["c"])["num_blocks"] == 1


# -- KV in host memory -------------------------------------------------------------------------------------------------

KV = KvShape(num_layers=1, hidden_kv=16, block_size_tokens=BLOCK_TOKENS, dtype_bytes=2)


def memory(
    num_blocks: int, block_s: float = 1.0, token_s: float = 10.0, can_split: bool = False
) -> HostMemory:
    """Host memory behind a link that takes so long for a block each way; computing is predicted to take so long for a token."""
    speed = KV.block_bytes / block_s
    costs = SwapOrRecompute(LinearPrefill(token_s), KV, Link(d2h_bytes_per_s=speed, h2d_bytes_per_s=speed))
    return HostMemory(num_blocks, costs, FullCost(prefill=LinearPrefill(token_s), can_split=can_split))


def swapping(
    asked: Sequence[tuple[float, int, int]], num_blocks: int, **parts: Any
) -> tuple[Node, list[Request]]:
    """On a device whose link is as fast as `memory` says, in vLLM 0.2's shape unless told otherwise."""
    host = parts.setdefault("host_memory", memory(100))
    device = gpu(num_blocks, link_bytes_per_s=host.costs.link.h2d_bytes_per_s)
    return serve(asked, **({"shape": VLLM_0_2, "preemption": COST, "gpu": device} | parts))


COST = Preemption(last_in_first_out, cheaper)
# Each takes 2 of 4 blocks. The second starts at 1 s; at 14 s both have 33 tokens, and the next step would take a block more each.
TIGHT = ((0.0, 20, 15), (0.5, 20, 15))


def test_a_swapped_request_resumes_without_computing_anything_again() -> None:
    # Out from 14 to 16 s while no step runs; the first ends at 18 s, then the second comes back until 20 s and has 2 tokens left.
    node, requests = swapping(TIGHT, 4)
    assert times(requests) == [(1.0, 18.0), (2.0, 22.0)]
    assert node.tally.counts["prefill_tokens"] == 40
    assert (requests[1].num_preempted, node.tally.counts["preempted_to_host"]) == (1, 1)
    assert node.tally.stalled_s == 4.0


def test_kv_that_is_computed_faster_than_copied_is_computed() -> None:
    # 33 tokens anew, from 16 to 17 s, and one more.
    node, requests = swapping(TIGHT, 4, host_memory=memory(100, token_s=0.01))
    assert times(requests) == [(1.0, 16.0), (2.0, 18.0)]
    assert node.tally.counts["prefill_tokens"] == 40 + 33
    assert node.host_kv is not None and node.host_kv.most_blocks == 0


def test_without_room_in_host_memory_it_is_computed() -> None:
    node, _ = swapping(TIGHT, 4, host_memory=memory(1))
    assert node.tally.counts["preempted_to_compute"] == 1
    assert swapping(TIGHT, 4, host_memory=memory(2))[0].tally.counts["preempted_to_host"] == 1


def test_copies_in_hold_up_steps_only_where_the_shape_says_so() -> None:
    # The third comes while the second is on its way back (18 to 20 s). Held up, it starts after the step that waited for that.
    asked = (*TIGHT, (18.5, 10, 1))
    assert swapping(asked, 4)[1][2].first_token_s == 22.0
    beside = replace(VLLM_0_2, swaps_block=False)
    assert swapping(asked, 4, shape=beside)[1][2].first_token_s == 19.5


def test_what_was_written_through_leaves_at_once_and_comes_back_but_for_its_last_tokens() -> None:
    # Nobody waits for a copy out. One whole block of 31 tokens is in host memory, and takes 2 s back; 16 tokens are computed, and give the 13th.
    node, requests = swapping(TIGHT, 4, shape=OVERTURE, host_memory=memory(100, block_s=2.0))
    assert times(requests) == [(1.0, 15.0), (2.0, 20.0)]
    assert node.tally.counts["prefill_tokens"] == 40 + 16
    assert node.tally.counts["restored by swap"] == 1 and node.tally.stalled_s == 0.0


def test_a_front_is_computed_while_the_back_is_loaded() -> None:
    # Five whole blocks, each 2 s to load or by prediction to compute: two are computed (a step of 1 s), three loaded from 15 to 21 s.
    host = memory(100, block_s=2.0, token_s=2.0 / 16, can_split=True)
    node, requests = swapping([(0.0, 20, 15), (0.5, 80, 15)], 8, shape=OVERTURE, host_memory=host)
    assert times(requests) == [(1.0, 15.0), (2.0, 24.0)]
    assert node.tally.counts["restored by split"] == 1
    assert node.tally.counts["prefill_tokens"] == 100 + 32 + 12


def test_kv_that_was_written_through_needs_somebody_to_restore_it() -> None:
    with pytest.raises(ValueError, match="restores"):
        swapping(TIGHT, 4, shape=OVERTURE, host_memory=replace(memory(1), restore=None))


def test_copies_in_share_the_link_with_each_other_and_with_adapters() -> None:
    clock, ends = Clock(), {}
    link = SharedLink(clock, KV.block_bytes)
    host = HostKv(clock, memory(10), KV.block_bytes, link)
    host.copy_in(2, lambda now: ends.update(first=now))
    link.transfer(2 * KV.block_bytes, lambda now: ends.update(adapter=now))
    host.copy_out("out", 2, lambda now: ends.update(out=now))
    clock.run()
    assert ends == {"out": 2.0, "first": 4.0, "adapter": 4.0}
    # Twice as long as predicted for it alone; out has the other direction for itself.
    assert sorted(host.errors) == pytest.approx([-0.5, 0.0])


def test_host_memory_takes_no_more_than_it_has() -> None:
    host = HostKv(Clock(), memory(10), KV.block_bytes, SharedLink(Clock(), 1.0))
    host.copy_out("a", 7, lambda now: None)
    with pytest.raises(RuntimeError, match="3 free"):
        host.copy_out("b", 4, lambda now: None)
    host.save("c", 9)
    assert (host.held("b"), host.held("c"), host.free_blocks) == (0, 3, 0)
    # What a request has stays, and what it had before makes room for itself.
    host.save("a", 5)
    assert host.held("a") == 7
    assert host.drop("a") == 7 and host.free_blocks == 7
    host.check_invariants()


class Noted(Fair):
    """Fair that keeps what it was told of those who came again."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool] = []

    def arrived(self, facts: Waiting, now: float) -> None:
        super().arrived(facts, now)
        if now > facts.arrived_s:
            self.told.append(facts.is_swapped)


def test_a_policy_is_told_whose_kv_waits_in_host_memory() -> None:
    for host, shape, told in (
        (memory(100), VLLM_0_2, True),
        (memory(1), VLLM_0_2, False),
        # Live, whoever ran before counts as swapped, by whatever way it comes back.
        (memory(0), OVERTURE, True),
    ):
        policy = Noted()
        swapping(TIGHT, 4, policy=policy, host_memory=host, shape=shape)
        assert policy.told == [told]


SWAP_CASES: dict[str, Any] = {
    "fcfs": lambda: {"preemption": COST},
    "always": lambda: {"preemption": PREEMPTIONS["vllm_swap"]},
    "fair": lambda: {"policy": Fair(), "preemption": PREEMPTIONS["cost_aware"]},
    "mlq": lambda: mlq_parts(40) | {"preemption": PREEMPTIONS["cost_aware"]},
    "beside steps": lambda: {"shape": replace(VLLM_0_2, swaps_block=False), "preemption": COST},
    "mixed": lambda: {"shape": VLLM, "policy": Fair(), "preemption": PREEMPTIONS["cheapest"]},
    "written through": lambda: {"shape": OVERTURE},
    "written through, fair": lambda: {
        "shape": OVERTURE,
        "policy": Fair(),
        "preemption": PREEMPTIONS["fair_recompute"],
    },
}


def swapped(case: str, seed: int, **parts: Any) -> tuple[Node, list[Request]]:
    """A busy hour with adapters, on a slow link and with host memory for a few."""
    host = memory(24, block_s=0.4, token_s=0.2, can_split=True)
    device = gpu(40, link_bytes_per_s=host.costs.link.h2d_bytes_per_s)
    defaults = {"gpu": device, "shape": VLLM_0_2, "host_memory": host, "eviction": ChameleonScore()}
    return served(case, seed, **(defaults | SWAP_CASES[case]() | parts))


@pytest.mark.parametrize("case", SWAP_CASES)
def test_swapping_loses_no_block_and_no_token(case: str) -> None:
    node, requests = swapped(case, 1, check_every_s=3.7)
    assert len(requests) == 300
    assert all(request.num_done == request.arrival.num_answer_tokens for request in requests)
    counts = node.tally.counts
    assert counts["decode_tokens"] + counts["first_tokens"] == sum(r.num_done for r in requests)
    assert node.host_kv is not None and node.host_kv.free_blocks == node.host_kv.num_blocks == 24
    assert node.kv_blocks == 0 and not node.running and not node.waiting
    ways = {"preempted_to_host", "restored by swap", "restored by split"}
    if case != "mlq":  # with quotas hardly anybody is preempted
        assert sum(counts[way] for way in ways) > 5
        assert node.host_kv.most_blocks > 12


@pytest.mark.parametrize("case", ["fair", "written through, fair"])
def test_who_came_first_is_nobodys_victim(case: str) -> None:
    _, requests = swapped(case, 1)
    assert requests[0].num_preempted == 0 and sum(r.num_preempted for r in requests) > 20


@pytest.mark.parametrize("case", ["fair", "beside steps", "written through"])
def test_the_same_seed_swaps_the_same(case: str) -> None:
    (first, requests), (second, again) = swapped(case, 2), swapped(case, 2)
    assert times(requests) == times(again) and first.tally == second.tally


# -- adapters with a host's help ---------------------------------------------------------------------------------------

ASSISTED = replace(SLORA, name="assisted", loads_block=False, assists=True)
# An adapter of rank 8 is 2,048 bytes and takes 2 s; the host takes 3 s for its part of ten tokens, and half a second for being called.
LINK = 1024.0
SLOW_HOST = AssistingHost("slow", 2 * 128 * 8 * 10 / 3, 4, 1.0, 10, 0.5)


def assisted(
    asked: Sequence[tuple[float, int, int]], adapters: Sequence[int | None], link: float = LINK, **parts: Any
) -> tuple[Node, list[Request]]:
    device = gpu(1000, link_bytes_per_s=link)
    return serve(
        asked, shape=ASSISTED, adapters=adapters, gpu=device, assistant=SLOW_HOST, check_every_s=0.25, **parts
    )


def test_the_device_takes_over_in_the_midst_of_a_prompt() -> None:
    # Alone the host would need 1 + 3 + 0.5 s. After 2 s the adapter is there; the rest of the step takes the device that share of its 1 s.
    _, (request,) = assisted([(0.0, 10, 3)], [0])
    assert request.first_token_s == pytest.approx(2 + (1 - 2 / 4.5))
    assert request.ended_s == pytest.approx(request.first_token_s + 2)
    assert request.found_adapter == "missing"


def test_decoding_waits_for_the_adapter_and_nobody_else_does() -> None:
    # The load takes 20 s. The first token is there at 4.5 s, the other two follow the load. Meanwhile another one is served.
    _, (request, other) = assisted([(0.0, 10, 3), (5.0, 10, 4)], [0, None], link=LINK / 10)
    assert request.first_token_s == pytest.approx(4.5)
    assert request.ended_s == pytest.approx(22.0)
    assert times([other]) == [pytest.approx((6.0, 9.0))]


def test_whoever_joins_in_the_midst_of_others_steps_decodes_from_the_next_one_on() -> None:
    # The other one's steps end at 19.5, 20.5 and so on. The load ends at 20 s, so the two tokens that are left come at 21.5 and 22.5 s.
    _, (request, other) = assisted([(0.0, 10, 3), (4.5, 10, 30)], [0, None], link=LINK / 10)
    assert times([other]) == [pytest.approx((5.5, 34.5))]
    assert request.ended_s == pytest.approx(22.5)


def test_an_answer_of_one_token_does_not_wait_for_its_adapter() -> None:
    _, (request,) = assisted([(0.0, 10, 1)], [0], link=LINK / 10)
    assert request.ended_s == pytest.approx(4.5)


def test_more_tokens_than_a_core_takes_have_more_cores_until_there_are_none() -> None:
    for num_tokens, seconds in ((5, 1.5), (10, 3.0), (20, 3.0), (40, 3.0), (80, 6.0)):
        _, (request,) = assisted([(0.0, num_tokens, 1)], [0], link=1.0)
        assert request.first_token_s == pytest.approx(1 + seconds + 0.5), f"{num_tokens} tokens"


def test_a_host_that_is_as_quick_as_the_same_matrices_costs_its_call_alone() -> None:
    cost = StepCost(replace(gpu(1000), flops=1e6), TINY, assistant=SLOW_HOST)
    plain, helped = (cost.step_s((Chunk(10, 0, 8 * assists, True, assists),)) for assists in (False, True))
    hidden_s = (plain - 1.0) * TINY.adapted_share
    assert 0 < hidden_s < 3
    assert helped - plain == pytest.approx(3 - hidden_s + 0.5)
    quick = StepCost(cost.gpu, TINY, assistant=replace(SLOW_HOST, core_flops=1e30))
    assert quick.step_s((Chunk(10, 0, 8, True, True),)) == pytest.approx(plain + 0.5)


def test_a_shape_that_assists_needs_a_host() -> None:
    with pytest.raises(ValueError, match="host"):
        serve([(0.0, 10, 1)], shape=ASSISTED)


@pytest.mark.parametrize("seed", range(3))
def test_with_a_hosts_help_and_little_memory_all_are_served(seed: int) -> None:
    rng = random.Random(seed)
    asked = [(at * 0.8, rng.randrange(5, 60), rng.randrange(1, 60)) for at in range(60)]
    adapters = [rng.choice((None, 0, 1, 2)) for _ in asked]
    device = gpu(40, link_bytes_per_s=LINK)
    node, requests = serve(
        asked,
        shape=replace(ASSISTED, reserves_answer=False),
        adapters=adapters,
        gpu=device,
        assistant=SLOW_HOST,
        guesser=Knows(0.3),
        check_every_s=0.5,
    )
    assert len(requests) == 60 and node.tally.counts["preempted"] > 0
    assert node.tally.stalled_s == 0
    assert all(r.num_done == r.arrival.num_answer_tokens for r in requests)


def test_who_comes_back_from_host_memory_decodes_only_with_its_adapter() -> None:
    # Its KV of three blocks is back long before its adapter of eight, which left as the other one grew.
    shape = replace(ASSISTED, reserves_answer=False)
    node, (_, request, _) = swapping(
        ((0.0, 20, 100), (0.5, 20, 25), (150.0, 10, 1)),  # the last has all checked until then
        12,
        shape=shape,
        adapters=[None, 2, None],
        assistant=SLOW_HOST,
        check_every_s=0.25,
    )
    assert node.tally.counts["preempted_to_host"] > 0
    assert request.num_done == 25


# -- kernels, adapters that are all there, and what changed ------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "read"), [(mbgmv, 8 + 32), (bgmv, 2 * 32)])
def test_decoding_reads_what_the_kernel_reads(kernel: Kernel, read: int) -> None:
    device = replace(gpu(1000), memory_bytes_per_s=1e6)
    clock = Clock()
    cost = StepCost(device, TINY, kernel)
    node = Node(clock, cost, SLORA, Fcfs(), Knows(), adapter_ranks=RANKS, has_all_adapters=True)
    for adapter_id in (0, 2):
        node.submit(Arrival(f"{adapter_id}", 0.0, 10, 2 + adapter_id, adapter_id))
    clock.run()
    short, long = sorted(node.ended, key=lambda request: request.ended_s)
    # The second prompt comes in a step of its own, since the first began at once; then both decode together, then one.
    assert short.ended_s - long.first_token_s == pytest.approx(cost.step_s((), 2, 22, read))
    assert long.ended_s - short.ended_s == pytest.approx(cost.decoding(1, 12, 32).total_s(2))


def test_bgmv_of_nobody_and_of_those_that_left_reads_nothing() -> None:
    assert bgmv({}) == bgmv({8: 0, 64: 0}) == 0
    assert bgmv({8: 2, 64: 0}) == 16


def test_adapters_that_are_all_there_are_never_loaded_and_take_no_blocks() -> None:
    device = gpu(1000, link_bytes_per_s=1e-3)
    node, requests = serve(THREE, adapters=[0, 1, 0], gpu=device, has_all_adapters=True)
    _, without = serve(THREE)
    assert times(requests) == times(without)
    assert node.link.bytes_moved == 0 and node.adapters.used_blocks == 0
    assert {request.found_adapter for request in requests} == {"here"}


def test_what_happens_to_requests_is_counted() -> None:
    node, _ = serve([(0.0, 10, 5)])
    assert node.num_changes == 4, "it came, started, had its first token and left"
