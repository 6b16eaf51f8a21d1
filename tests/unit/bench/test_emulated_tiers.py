"""KV tiers of an emulated node: what leaves the device comes back, by load or by computing, and all accounts balance."""

from collections.abc import Callable, Iterator

import pytest

from bench.emulated.core.arrivals import Arrival
from bench.emulated.core.calibration import A40
from bench.emulated.core.clock import Clock
from bench.emulated.core.hardware import GB
from bench.emulated.core.links import SharedLink
from bench.emulated.core.models import LLAMA2_7B
from bench.emulated.core.node import EmulatedNode, Engine
from bench.emulated.core.plays import arrivals, lognormal
from bench.emulated.core.steps import Chunk, StepCost
from bench.emulated.core.tiers import EmulatedTiers, TierSizes
from bench.emulated.core.traffic import play
from engine_bridge.core.kv.restoring import LoadBlocks
from engine_bridge.core.kv.step_moves import SaveJob, StepMoves
from engine_bridge.driver.kv.kv_connector import LAYER_TIMEOUT_S
from kvtiers.keys import BlockKey

COST = StepCost(A40, LLAMA2_7B)
TIGHT = Engine(num_blocks=400, max_running=64, has_prefix_cache=False)
TIERS = TierSizes(host_bytes=8 * GB)
REQUESTS = arrivals(lognormal(20, 5), 2.0, 20, 5)


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


def check_ways(node: EmulatedNode, way: str) -> None:
    """All that was preempted came back this way."""
    tiers, num = tiers_of(node), node.scheduler.num_preempted
    assert tiers.way_counts() == {f"predicted:{way}": num, f"preempted:{way}": num}
    stats = tiers.stats()
    assert stats is not None and (stats.host.num_hits > num) == (way == "swap")
    assert tiers.link_in.bytes_moved == stats.host.num_hits * tiers.hollow.shape.block_bytes


def test_over_a_fast_link_it_is_loaded_and_a_play_gives_the_same_times_also_beside_another_node() -> None:
    alone, clock = played(), Clock()
    first, second = node_of(clock), node_of(clock)

    def both(arrival: Arrival) -> None:
        first.submit(arrival)
        second.submit(arrival)

    play(clock, REQUESTS, both)
    assert times_of(first) == times_of(second) == times_of(alone)
    check_ways(alone, "swap")


# -- one step ----------------------------------------------------------------------------------------------------------

KEYS = [BlockKey(bytes([number])) for number in range(10)]


class Steps:
    """Tiers whose steps are begun by hand."""

    def __init__(self, tiers: TierSizes = TIERS) -> None:
        self.clock = Clock()
        self.link = SharedLink(self.clock, A40.achieved_link_bytes_per_s)
        self.tiers = EmulatedTiers(self.clock, tiers, COST, 16, 2048, self.link)
        self.failed = set[int]()
        self.store = self.tiers.hollow
        self.copy_s = self.link.alone_s(len(KEYS) * self.store.shape.block_bytes)

    def step_s(self, moves: StepMoves, compute_s: float) -> float:
        """Its time alone."""
        began_s, ended_s = self.clock.now, list[float]()

        def ended(failed: set[int]) -> None:
            self.failed = failed
            ended_s.append(self.clock.now)

        self.tiers.run_step(moves, compute_s, ended)
        self.clock.run()
        return ended_s[0] - began_s

    def save(self) -> StepMoves:
        save = self.store.begin_save("one", KEYS)
        return StepMoves(saves=[SaveJob(save, list(range(len(KEYS))), [0] * len(KEYS))])

    def load(self, is_whole: bool = True) -> StepMoves:
        return StepMoves(
            [
                LoadBlocks(
                    self.store.stage("one", KEYS), list(range(len(KEYS))), list(range(len(KEYS))), is_whole
                )
            ]
        )


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
    steps.tiers.run_step(steps.save(), 0.01, lambda failed: None)
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


def on_disk(bytes_per_s: float) -> Steps:
    """What was saved lies there alone."""
    steps = Steps(TierSizes(host_bytes=8 * GB, disk_bytes_per_s=bytes_per_s))
    steps.step_s(steps.save(), 0.01)
    steps.store.drop_host()
    steps.store.check_at_rest()
    return steps


def test_layers_that_do_not_come_in_time_are_given_up_and_nothing_is_kept_that_was_computed_on_them() -> None:
    steps = on_disk(bytes_per_s=1e6)
    others = [BlockKey(bytes([number])) for number in range(100, 103)]
    save = SaveJob(steps.store.begin_save("two", others), [20, 21, 22], [0, 0, 0])
    took_s = steps.step_s(StepMoves(steps.load(is_whole=False).loads, saves=[save]), 0.001)
    assert steps.store.num_held(others) == 0
    assert took_s == pytest.approx(LAYER_TIMEOUT_S + 0.001)
    assert steps.failed == set(range(len(KEYS))) and steps.tiers.num_failed_loads == len(KEYS)
    steps.store.check_at_rest()
    steps.tiers.close()


# -- sessions ----------------------------------------------------------------------------------------------------------

ROOMY = Engine(num_blocks=700, max_running=64)
DISK = TierSizes(host_bytes=8 * GB, disk_bytes_per_s=8e9)


def turn(place: int, at_s: float, num_tokens: int) -> Arrival:
    return Arrival(f"turn {place}", at_s, num_tokens, 10, session="one")


class Talk:
    """A session on one node: a first turn of 2,000 tokens, whose KV is on disk alone afterwards."""

    def __init__(self, engine: Engine = ROOMY, tiers: TierSizes = DISK) -> None:
        self.node = EmulatedNode(Clock(), COST, engine, "fcfs", tiers=tiers)
        self.tiers = tiers_of(self.node)
        self.node.submit(turn(0, 0.0, 2000))
        self.node.clock.run()
        self.tiers.hollow.drop_host()
        self.node.scheduler.reset_prefix_cache()

    def ttft_s(self) -> float:
        """Of the second turn, asked now."""
        self.node.submit(turn(1, self.node.clock.now, 2100))
        self.node.clock.run()
        self.tiers.hollow.check_at_rest()
        self.node.close()
        return self.node.ended[-1].ttft_s


@pytest.mark.parametrize(
    ("session", "ahead_s", "end"), [("one", 20, "hit"), ("one", 0.1, "late"), ("two", 20, "unknown")]
)
def test_a_turn_that_was_announced_finds_its_kv_on_the_device_or_nearer(
    session: str, ahead_s: float, end: str
) -> None:
    talk, without_s = Talk(), Talk().ttft_s()
    before = talk.tiers.link_in.bytes_moved
    talk.node.advise(session)
    talk.node.clock.run(talk.node.clock.now + ahead_s)
    assert (talk.tiers.link_in.bytes_moved == before) == (end != "hit")
    found_s = talk.ttft_s()
    assert talk.tiers.advised == {end: 1}
    assert found_s < without_s or (end == "unknown" and found_s == pytest.approx(without_s))
    if end == "hit":
        assert found_s == pytest.approx(COST.step_s((Chunk(2100 - 2000, 2000, 0, True),)), rel=0.05)
