"""KV tiers of an emulated node: what leaves the device comes back, by load or by computing, and all accounts balance."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from bench.emulated.node import EmulatedNode, Engine
from bench.emulated.tiers import EmulatedTiers, TierSizes
from bench.emulated.trace import arrivals, lognormal
from bench.sim.core.calibration import A40
from bench.sim.core.clock import Clock
from bench.sim.core.hardware import GB
from bench.sim.core.links import SharedLink
from bench.sim.core.models import LLAMA2_7B
from bench.sim.core.steps import StepCost
from bench.sim.core.traffic import play
from engine_bridge.core.restores import Load, SaveJob, StepMoves
from kvtiers.keys import BlockKey

COST = StepCost(A40, LLAMA2_7B)
SLOW_LINK = StepCost(replace(A40, link_bytes_per_s=A40.link_bytes_per_s / 1000), LLAMA2_7B)
TIGHT = Engine(num_blocks=700, max_running=64, has_prefix_cache=False)
TIERS = TierSizes(host_bytes=8 * GB)
REQUESTS = arrivals(lognormal(40, 5), 2.0, 40, 5)


def node_of(clock: Clock, cost: StepCost = COST, tiers: TierSizes = TIERS) -> EmulatedNode:
    return EmulatedNode(clock, cost, TIGHT, "fcfs", tiers=tiers)


def tiers_of(node: EmulatedNode) -> EmulatedTiers:
    assert node.tiers is not None
    return node.tiers


def times_of(node: EmulatedNode) -> dict[str, tuple[float, float]]:
    """First token and end of each request. All have ended, and the tiers have let go of them."""
    assert len(node.ended) == len(REQUESTS)
    assert node.scheduler.num_preempted > 0
    tiers_of(node).hollow.check_at_rest()
    node.close()
    return {job.arrival.request_id: (job.first_token_s, job.ended_s) for job in node.ended}


def played(cost: StepCost = COST, tiers: TierSizes = TIERS) -> EmulatedNode:
    node = node_of(Clock(), cost, tiers)
    play(node.clock, REQUESTS, node.submit)
    return node


def test_what_was_preempted_is_loaded_where_the_link_is_faster_than_computing() -> None:
    node = played()
    times_of(node)
    num = node.scheduler.num_preempted
    assert tiers_of(node).way_counts() == {"predicted:swap": num, "preempted:swap": num}
    stats = tiers_of(node).stats()
    assert stats is not None and stats.host.num_hits > num
    assert tiers_of(node).link_in.bytes_moved == stats.host.num_hits * tiers_of(node).hollow.shape.block_bytes


def test_what_was_preempted_is_computed_again_where_the_link_is_slow() -> None:
    node = played(SLOW_LINK)
    times_of(node)
    num = node.scheduler.num_preempted
    assert tiers_of(node).way_counts() == {"predicted:recompute": num, "preempted:recompute": num}
    assert tiers_of(node).link_in.bytes_moved == 0


def test_what_finds_no_room_in_host_memory_is_computed_again() -> None:
    node = played(tiers=TierSizes(host_bytes=GB // 20))
    times_of(node)
    stats = tiers_of(node).stats()
    assert stats is not None and stats.host.num_dropped_saves > 0
    assert tiers_of(node).way_counts()["preempted:recompute"] > 0


def test_a_play_with_tiers_gives_the_same_times_again_also_beside_another_node() -> None:
    clock = Clock()
    first, second = node_of(clock), node_of(clock)

    def both(arrival: object) -> None:
        first.submit(arrival)  # type: ignore[arg-type]
        second.submit(arrival)  # type: ignore[arg-type]

    play(clock, REQUESTS, both)
    alone = times_of(played())
    assert times_of(first) == times_of(second) == alone


# -- one step ----------------------------------------------------------------------------------------------------------

KEYS = [BlockKey(bytes([number])) for number in range(10)]


class Steps:
    """Tiers whose steps are begun by hand."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.link = SharedLink(self.clock, A40.achieved_link_bytes_per_s)
        self.tiers = EmulatedTiers(self.clock, TIERS, COST, 16, 2048, self.link)
        self.store = self.tiers.hollow
        self.copy_s = self.link.alone_s(len(KEYS) * self.store.shape.block_bytes)

    def step_s(self, moves: StepMoves, compute_s: float) -> float:
        """Its time alone."""
        began_s, ended = self.clock.now, list[float]()
        self.tiers.run_step(moves, compute_s, ended.append)
        self.clock.run()
        return ended[0] - began_s

    def save(self) -> StepMoves:
        save = self.store.begin_save("one", KEYS)
        return StepMoves(saves=[SaveJob(save, list(range(len(KEYS))))])

    def load(self) -> StepMoves:
        return StepMoves([Load(self.store.stage("one", KEYS), 0, list(range(len(KEYS))), is_whole=True)])


@pytest.fixture
def steps() -> Iterator[Steps]:
    steps = Steps()
    yield steps
    steps.tiers.close()


def test_a_step_does_not_wait_for_what_it_saves(steps: Steps) -> None:
    assert steps.step_s(steps.save(), 0.01) == pytest.approx(0.01)
    assert steps.tiers.link_out.bytes_moved == len(KEYS) * steps.store.shape.block_bytes
    steps.store.check_at_rest()


def test_what_is_saved_can_be_read_only_when_it_has_been_copied_out(steps: Steps) -> None:
    steps.tiers.run_step(steps.save(), 0.01, lambda now: None)
    steps.clock.run(0.01 + steps.copy_s / 2)
    stage = steps.store.stage("one", KEYS)
    assert steps.store.progress(stage).num_ready_blocks == 0
    steps.clock.run()
    assert steps.store.progress(stage).num_ready_blocks == len(KEYS)


@pytest.mark.parametrize(
    ("compute_s", "expected_s"),
    [
        (lambda copy_s: 10 * copy_s, lambda copy_s: copy_s / 8 + 10 * copy_s),
        (lambda copy_s: copy_s / 10, lambda copy_s: copy_s + copy_s / 80),
    ],
    ids=[
        "computing is slower: the first piece is waited for",
        "loading is slower: the last piece is computed after it",
    ],
)
def test_a_steps_pieces_are_loaded_beside_its_computation(
    steps: Steps, compute_s: Callable[[float], float], expected_s: Callable[[float], float]
) -> None:
    steps.step_s(steps.save(), 0.01)
    took_s = steps.step_s(steps.load(), compute_s(steps.copy_s))
    assert took_s == pytest.approx(expected_s(steps.copy_s))
    steps.store.check_at_rest()
