"""A simulated node against schedules worked out by hand, and against what must hold whatever happens."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

import bench.sim.core.batch
import bench.sim.core.lean_node
from bench.sim.core.batch import Request
from bench.sim.core.clock import Clock
from bench.sim.core.hardware import Gpu
from bench.sim.core.lean_node import STUCK_WAIT_S, Node
from bench.sim.core.models import Model
from bench.sim.core.requests import Arrival
from bench.sim.core.shapes import ACTIVATION_BYTES, BLOCK_TOKENS, VLLM, Shape
from bench.sim.core.steps import Kernel, StepCost, bgmv, mbgmv
from engine_bridge import core, policy
from engine_bridge.core.scheduling.dispatcher import Dispatcher
from engine_bridge.policy.scheduling.baselines import Fair, Fcfs, Sjf
from engine_bridge.policy.scheduling.decision_log import Recorded, replay
from engine_bridge.policy.scheduling.mlq import Mlq
from engine_bridge.policy.scheduling.mlq_decision import MlqSettings
from engine_bridge.policy.scheduling.queue_policy import Decision, QueuePolicy, Running, StepRoom, Waiting
from engine_bridge.predict.length import LengthGuess

TINY = Model("tiny", 1, 16, 16, 1, 1, 16, 10_000)
RANKS = (8, 16, 32)
WHOLE = replace(VLLM, name="whole prompts", is_mixed=False)


def gpu(num_blocks: int, *, step_s: float = 1.0) -> Gpu:
    """A device of so many blocks on which every step takes `step_s`, whatever is in it."""
    memory = TINY.weight_bytes + ACTIVATION_BYTES + num_blocks * BLOCK_TOKENS * TINY.kv_bytes_per_token
    return Gpu(
        "unit",
        1e30,
        1e30,
        memory,
        1e30,
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
    shape: Shape = WHOLE,
    num_blocks: int = 1000,
    adapters: Sequence[int | None] = (),
    check_every_s: float = 0.0,
    **parts: Any,
) -> tuple[Node, list[Request]]:
    """Serve requests (at, prompt, answer); they come back in order of arrival. parts: more of a node's, and `gpu` and `guesser`."""
    clock = Clock()
    cost = StepCost(parts.pop("gpu", gpu(num_blocks)), TINY)
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

ONE_AT_A_TIME = replace(WHOLE, max_running=1)
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


# -- whatever happens --------------------------------------------------------------------------------------------------


def busy_hour(seed: int, num: int) -> list[tuple[float, int, int]]:
    """More than a small device can take at times."""
    rng = random.Random(seed)
    at_s, asked = 0.0, []
    for _ in range(num):
        at_s += rng.expovariate(0.5)
        asked.append((at_s, rng.randrange(1, 200), rng.randrange(1, 60)))
    return asked


CASES = {
    "fcfs": lambda: {},
    "fcfs, vllm": lambda: {"shape": VLLM},
    "sjf": lambda: {"policy": Sjf()},
    "fair, vllm": lambda: {"policy": Fair(), "shape": VLLM},
    "mlq": lambda: {"policy": Mlq(40 * BLOCK_TOKENS)},
    "mlq, vllm": lambda: {"policy": Mlq(40 * BLOCK_TOKENS), "shape": VLLM},
}


def served(case: str, seed: int, num: int = 300, **parts: Any) -> tuple[Node, list[Request]]:
    asked = busy_hour(seed, num)
    rng = random.Random(seed)
    adapters = [rng.choice((None, 0, 1, 2)) for _ in asked]
    return serve(asked, adapters=adapters, guesser=Knows(0.7), num_blocks=40, **(CASES[case]() | parts))


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
    if not node.dispatcher.counts["preempted"]:
        assert counts["prefill_tokens"] == num_prompt
    assert node.tally.most_blocks <= node.num_blocks
    assert node.kv_blocks == 0 and not node.running and not node.waiting


def test_the_cases_run_out_of_memory() -> None:
    """Else the test above says little."""
    for case in ("fcfs", "fcfs, vllm", "fair, vllm", "mlq, vllm"):
        assert served(case, 1)[0].dispatcher.counts["preempted"] > 5, case
    assert served("mlq", 1)[0].tally.most_blocks > 35


@pytest.mark.parametrize("case", CASES)
def test_the_same_seed_gives_the_same_run(case: str) -> None:
    (first, requests), (second, again) = served(case, 2, 100), served(case, 2, 100)
    assert times(requests) == times(again)
    assert first.tally == second.tally
    assert times(served(case, 3, 100)[1]) != times(requests)


class Asked:
    """Fcfs behind another class: the node cannot know that time means nothing to it, and asks before every step."""

    is_timeless = False

    def __init__(self) -> None:
        self._policy = Fcfs()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


@pytest.mark.parametrize("shape", [WHOLE, VLLM], ids=lambda shape: shape.name)
def test_steps_counted_together_are_the_steps_taken_one_by_one(shape: Shape) -> None:
    asked = busy_hour(4, 300)
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
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: StepRoom, now: float
    ) -> Decision:
        return Decision() if 0 < now < self._at_s else self._policy.decide(waiting, running, room, now)


def test_a_policy_that_goes_by_time_is_asked_before_every_step() -> None:
    _, requests = serve([(0.0, 10, 100), (1.5, 10, 1)], policy=NotBefore(20.5))
    assert requests[1].first_token_s == 22.0


def test_a_policy_that_starts_nobody_is_asked_again_while_nothing_runs() -> None:
    _, (request,) = serve([(0.5, 10, 1)], policy=NotBefore(0.75))
    assert request.first_token_s == pytest.approx(1.75, abs=2 * STUCK_WAIT_S)


def test_who_came_first_is_nobodys_victim_where_the_policy_has_an_order_of_its_own() -> None:
    _, requests = served("fair, vllm", 1)
    assert requests[0].num_preempted == 0 and sum(request.num_preempted for request in requests) > 20


# -- the live engine's own -----------------------------------------------------------------------------------------------


def test_what_decides_are_the_live_engines_classes() -> None:
    live = {
        name
        for package in (core, policy)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        for name, found in vars(importlib.import_module(module.name)).items()
        if inspect.isclass(found) and found.__module__ == module.name
    }
    assert {"Dispatcher", "Refits", "Pacer", "Mlq"} <= live
    own = {"Arrival"}  # the traffic's, of a request whose answer is known
    for module in (bench.sim.core.lean_node, bench.sim.core.batch):
        for name in (live - own) & vars(module).keys():
            assert vars(module)[name].__module__.startswith("engine_bridge."), name
    node, _ = serve([(0.0, 1, 1)], policy=Mlq(16_000))
    assert type(node.dispatcher) is Dispatcher and type(node.dispatcher.policy) is Mlq


def recorded() -> tuple[list[bytes], Node]:
    lines: list[bytes] = []

    def write(line: bytes) -> bool:
        lines.append(line)
        return True

    num_tokens = 40 * BLOCK_TOKENS
    node, _ = served("mlq, vllm", 5, policy=Recorded(Mlq(num_tokens), num_tokens, write))
    return lines, node


def test_a_fresh_policy_that_is_told_the_same_decides_the_same() -> None:
    lines, node = recorded()
    found = replay(lines)
    assert found.num_different == 0 and found.num_decisions > 100
    assert {json.loads(line)["do"] for line in lines} >= {
        "arrived",
        "admitted",
        "ended",
        "outgrew",
        "begin_refit",
        "advance_refit",
    }
    assert node.dispatcher.counts["admitted"] >= 300 and node.dispatcher.counts["refits"] > 0


def test_who_starts_is_who_was_decided_on_and_in_that_order() -> None:
    decided: Iterator[str] = iter(())
    num_started = 0
    for record in map(json.loads, recorded()[0]):
        if record["do"] == "decided":
            decided = iter(record.get("starts", ()))
        elif record["do"] == "admitted":
            assert record["id"] == next(decided)
            num_started += 1
    assert num_started >= 300


@dataclass(frozen=True, slots=True)
class Told:
    """Guesses what it is told, by place."""

    tokens: tuple[int, ...]

    def guess(self, arrival: Arrival) -> LengthGuess:
        p50 = self.tokens[int(arrival.request_id)]
        return LengthGuess(p50, 2 * p50, "test")

    def ended(self, arrival: Arrival) -> None: ...


def test_a_late_bypasser_gives_up_its_blocks_and_is_answered_all_the_same() -> None:
    # The first two say that a token takes a second. The third runs in 19 of 40 blocks and more, so the fourth, which needs 30, waits. The fifth,
    # larger by its adapter, is to take two tokens and passes it, with 10 blocks. It takes 90: when the third ends at 38 s, the fourth lacks two
    # blocks, and the fifth, long overdue, is squashed.
    asked = [(0.0, 1, 2), (0.0, 1, 2), (7.0, 300, 30), (8.5, 480, 2), (9.5, 150, 90)]
    policy = Mlq(10_000, MlqSettings(squash_share=0.5, aging_s=1000.0))
    told, adapters = Told((2, 2, 30, 1, 2)), [None, None, None, None, 2]
    node, requests = serve(
        asked, guesser=told, policy=policy, adapters=adapters, num_blocks=40, check_every_s=1.3
    )
    assert node.dispatcher.counts["bypassed"] == node.dispatcher.counts["squashed"] == 1
    assert [request.num_done for request in requests] == [2, 2, 30, 2, 90]
    assert requests[4].num_preempted == 1
    # Nothing runs after that, so the policy is asked a little later.
    assert requests[3].first_token_s == pytest.approx(38 + STUCK_WAIT_S + 1)
    # What the fifth had answered stays. Of its prompt and 28 tokens the fourth, with 31 of 40 blocks in the end, has left nine whole blocks.
    assert node.tally.counts["prefill_tokens"] == 1 + 1 + 300 + 480 + 150 + (150 + 28 - 9 * 16)


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        serve([(0.0, 2000, 1)], num_blocks=10)


# -- adapters, and what changed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "read"), [(mbgmv, 8 + 32), (bgmv, 2 * 32)])
def test_decoding_reads_what_the_kernel_reads(kernel: Kernel, read: int) -> None:
    device = replace(gpu(1000), memory_bytes_per_s=1e6)
    clock = Clock()
    cost = StepCost(device, TINY, kernel)
    node = Node(clock, cost, WHOLE, Fcfs(), Knows(), adapter_ranks=RANKS)
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


def test_adapters_take_no_blocks() -> None:
    node, requests = serve(THREE, adapters=[0, 1, 0])
    without, others = serve(THREE)
    assert times(requests) == times(others)
    assert node.tally.most_blocks == without.tally.most_blocks


def test_what_happens_to_requests_is_counted() -> None:
    node, _ = serve([(0.0, 10, 5)])
    assert node.num_changes == 4, "it came, started, had its first token and left"
