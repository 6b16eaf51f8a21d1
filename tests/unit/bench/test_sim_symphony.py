"""Sessions in simulated nodes and tiers, worked out by hand where that is possible; SYMPHONY's tables on a few minutes of traffic."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from bench.sim import symphony
from bench.sim.core.batch import Request
from bench.sim.core.clock import Clock
from bench.sim.core.conversations import Chats, LogNormal, recorded
from bench.sim.core.hardware import Gpu
from bench.sim.core.models import LLAMA_13B, Model
from bench.sim.core.session_cluster import Company, Habits, SessionCluster, Users, facts_of
from bench.sim.core.session_node import SessionNode, StepPrefill, Turn
from bench.sim.core.shapes import ACTIVATION_BYTES, BLOCK_TOKENS
from bench.sim.core.steps import Chunk, StepCost
from bench.sim.core.tables import Workers
from bench.sim.core.tiers import HostTiers, SessionKv
from bench.sim.symphony import Bench
from bench.sim.symphony_runs import (
    BY_LOAD,
    CHAT,
    CLAIRVOYANT,
    DEMAND,
    DEMAND_BALANCED,
    FIRST_LOOK,
    GPU,
    LLAMA31_8B,
    OURS,
    PAPER,
    RECOMPUTE,
    STICKY,
    Arm,
    Point,
    Setting,
    cluster_of,
    of_clairvoyant,
    run,
    run_agents,
    still_baselines,
)
from bench.sim.symphony_scale import Cell, measure
from engine_bridge.policy.kv.restore_method import FullCost
from engine_bridge.policy.nodes.routing import LoadBalance, Relieve, Sticky
from engine_bridge.policy.nodes.session_locations import Doors
from engine_bridge.policy.scheduling.baselines import Fcfs
from kvtiers.policy.eviction import ByValue, EvictionPolicy, Lru

TINY = Model("tiny", 4, 16, 16, 1, 1, 16, 10_000)
LONG = replace(LLAMA_13B, name="llama2-13b-32k", max_tokens=32_768)
"""With the paper's 32K of context; Meta's has 4K."""
BLOCK_BYTES = BLOCK_TOKENS * TINY.kv_bytes_per_token
FAST = 1e12


@dataclass
class World:
    """Machines of one device each. A token of a prompt takes 10 ms and more, a step at least 10 ms."""

    num_hosts: int = 1
    num_blocks: int = 1000
    host_blocks: int = 1000
    link_blocks_per_s: float = FAST
    network_blocks_per_s: float = FAST
    disk_blocks_per_s: float = FAST
    has_cache: bool = True
    eviction: EvictionPolicy = field(default_factory=ByValue)

    def __post_init__(self) -> None:
        self.clock = Clock()
        memory = TINY.weight_bytes + ACTIVATION_BYTES + self.num_blocks * BLOCK_BYTES
        flops = 2 * TINY.layer_weights / 0.01
        gpu = Gpu("unit", flops, 1e30, memory, self.link_blocks_per_s * BLOCK_BYTES)
        gpu = replace(gpu, flops_share=1.0, link_share=1.0, step_s=0.01, usable_share=1.0)
        self.cost = StepCost(gpu, TINY)
        self.ended: list[Request] = []
        self.hosts = [self._host() for _ in range(self.num_hosts)]
        self.nodes = [
            SessionNode(
                self.clock,
                self.cost,
                Fcfs(),
                host=host,
                restore=FullCost(prefill=StepPrefill(self.cost, 2048)),
                has_cache=self.has_cache,
                on_end=lambda request, now: self.ended.append(request),
            )
            for host in self.hosts
        ]

    def _host(self) -> HostTiers:
        return HostTiers(
            self.clock,
            self.eviction,
            memory_bytes=self.host_blocks * BLOCK_BYTES,
            block_bytes=BLOCK_BYTES,
            num_layers=TINY.num_layers,
            disk_bytes_per_s=self.disk_blocks_per_s * BLOCK_BYTES,
            network_bytes_per_s=self.network_blocks_per_s * BLOCK_BYTES,
        )

    def asks(self, kv: SessionKv, at_s: float, num_prompt: int, num_answer: int = 1, node: int = 0) -> None:
        turn = Turn(f"{kv.session_id} {at_s:06.2f}", at_s, num_prompt, num_answer, kv=kv)
        self.clock.at(at_s, lambda now: self.nodes[node].arrive(turn))

    def types(self, kv: SessionKv, at_s: float, node: int = 0, arrival_s: float | None = None) -> None:
        self.clock.at(at_s, lambda now: self.nodes[node].advise(kv, arrival_s, 0, now))

    def runs(self, until_s: float = math.inf) -> None:
        self.clock.run(until_s)
        for node in self.nodes:
            node.check_invariants()

    def tail_s(self, num_new: int, num_cached: int) -> float:
        """What a prompt takes whose first tokens have their KV on the device."""
        return self.cost.step_s((Chunk(num_new, num_cached, 0, True),))


HISTORY = 321  # tokens with KV after a prompt of so many and one answered: 20 blocks
CACHED = HISTORY // BLOCK_TOKENS * BLOCK_TOKENS
NEW = HISTORY + 16


def after_a_turn(**parts: object) -> tuple[World, SessionKv]:
    world, kv = World(**parts), SessionKv("s")  # type: ignore[arg-type]
    world.asks(kv, 0.0, HISTORY)
    world.runs()
    assert kv.saved_blocks == 20 and world.clock.now < 50
    return world, kv


# -- advisories --------------------------------------------------------------------------------------------------------


def test_an_early_advisory_makes_a_turn_a_hit_on_the_device() -> None:
    world, kv = after_a_turn(num_hosts=2, network_blocks_per_s=20.0, link_blocks_per_s=20.0, has_cache=False)
    world.types(kv, 90.0, node=1)
    world.asks(kv, 100.0, NEW, node=1)
    world.runs(99.9)
    assert (kv.device, kv.device_blocks, kv.host) == (world.nodes[1], 20, world.hosts[1])
    world.runs()
    assert world.ended[-1].ttft_s == pytest.approx(world.tail_s(NEW - CACHED, CACHED))
    assert world.nodes[1].tally.counts["device_blocks"] == 20
    assert world.nodes[1].tally.counts["loaded_blocks"] == 0


def test_without_one_the_turn_pays_for_the_move_and_is_answered_all_the_same() -> None:
    world, kv = after_a_turn(num_hosts=2, network_blocks_per_s=20.0, link_blocks_per_s=10.0)
    world.asks(kv, 100.0, NEW, node=1)
    world.runs()
    # A second over the network, then two over the link, for which the step waits.
    assert world.ended[-1].ttft_s == pytest.approx(1.0 + 2.0, rel=1e-3)
    assert world.tail_s(NEW - CACHED, CACHED) < 2.0
    assert (kv.host, kv.saved_blocks) == (world.hosts[1], NEW // BLOCK_TOKENS)
    assert world.nodes[0].cached_blocks == 0


def test_a_late_advisory_saves_what_had_come_by_then() -> None:
    ttfts = []
    for lead_s in (0.0, 0.5, 5.0):
        world, kv = after_a_turn(num_hosts=2, network_blocks_per_s=20.0, link_blocks_per_s=1e6)
        if lead_s:
            world.types(kv, 100.0 - lead_s, node=1)
        world.asks(kv, 100.0, NEW, node=1)
        world.runs()
        ttfts.append(world.ended[-1].ttft_s)
    tail_s = world.tail_s(NEW - CACHED, CACHED)
    assert ttfts == pytest.approx([1.0 + tail_s, 0.5 + tail_s, tail_s], rel=1e-3)


def test_where_moving_is_slower_the_history_is_computed() -> None:
    world, kv = after_a_turn(num_hosts=2, network_blocks_per_s=0.5, link_blocks_per_s=10.0)
    world.asks(kv, 100.0, NEW, node=1)
    world.runs()
    assert world.ended[-1].ttft_s == pytest.approx(world.tail_s(NEW, 0))
    assert world.nodes[1].tally.counts["loaded_blocks"] == 0


def test_an_announced_time_keeps_kv_off_the_device_until_it_is_near() -> None:
    world, kv = after_a_turn(has_cache=False)
    world.types(kv, 50.0, arrival_s=100.0)
    world.runs(97.0)
    assert kv.device_blocks == 0
    world.runs(99.0)
    assert kv.device_blocks == 20


def test_running_requests_overwrite_promoted_kv_and_it_comes_back() -> None:
    world, kv = after_a_turn(num_blocks=40, has_cache=False)
    other = SessionKv("other")
    world.types(kv, 90.0)
    world.asks(other, 100.0, 16 * 30, 2)
    world.runs(100.001)
    assert 0 < kv.device_blocks < 20
    assert world.nodes[0].tally.counts["preempted"] == 0
    assert kv.host_bytes == 20 * BLOCK_BYTES
    world.runs(200.0)
    assert kv.device_blocks == 20  # looked after when the other had ended


def test_a_retracted_advisory_leaves_nothing_behind() -> None:
    world, kv = after_a_turn(has_cache=False, link_blocks_per_s=1.0)
    world.types(kv, 100.0)
    world.clock.at(101.0, lambda now: world.nodes[0].retract(kv))
    world.runs()
    assert (kv.num_pins, kv.device_blocks, kv.expected_s) == (0, 0, None)


# -- tiers -------------------------------------------------------------------------------------------------------------


def test_a_full_host_trims_what_is_on_disk_and_reads_it_again() -> None:
    world, kv = after_a_turn(host_blocks=40, disk_blocks_per_s=10.0, has_cache=False)
    for at_s in (100.0, 150.0):
        world.asks(SessionKv(f"other {at_s}"), at_s, HISTORY)
    world.runs()
    assert kv.host_bytes < 20 * BLOCK_BYTES and kv.saved_blocks == 20
    world.types(kv, 200.0)
    world.runs()
    assert world.hosts[0].is_whole(kv) and kv.device_blocks == 20


def test_without_a_disk_what_leaves_memory_is_lost() -> None:
    world, kv = after_a_turn(host_blocks=30, disk_blocks_per_s=0.0, has_cache=False, eviction=Lru())
    world.asks(SessionKv("other"), 100.0, HISTORY)
    world.runs()
    assert (kv.host, kv.saved_blocks, kv.host_bytes) == (None, 0, 0)
    world.asks(kv, 200.0, NEW)
    world.runs()
    assert world.ended[-1].ttft_s == pytest.approx(world.tail_s(NEW, 0))


def test_a_read_that_nobody_wants_any_more_is_not_begun() -> None:
    world, host = World(host_blocks=60, disk_blocks_per_s=1.0), None
    first, second = SessionKv("first"), SessionKv("second")
    host = world.hosts[0]
    for kv in (first, second):
        host.place(kv, 20)
        host.used_bytes -= kv.host_bytes
        kv.host_bytes = 0
        kv.num_pins = 1
        host.stage(kv, lambda now: None, 0.0)
    second.num_pins = 0
    world.runs()
    assert host.is_whole(first) and second.host_bytes == 0
    assert host.counts["disk_bytes"] == 20 * BLOCK_BYTES and host.counts["given_up_reads"] == 1
    assert host.used_bytes == 20 * BLOCK_BYTES


def test_nothing_is_lost_or_doubled_under_pressure() -> None:
    """Small memories everywhere, so that sessions move, are trimmed, overwritten, preempted and read again."""
    model = replace(LLAMA31_8B, max_tokens=8192)
    setting = Setting(
        model=model,
        gpu=GPU.with_memory(24 * 10**9),
        host_bytes=6 * 10**9,
        disk_bytes_per_s=0.5e9,
        habits=Habits(Chats(max_tokens=8192), missing=0.3),
    )
    for arm in (OURS, BY_LOAD, STICKY, DEMAND):
        ended = served_under_watch(arm, setting)
        assert len(ended) > 100, arm.made_by
        assert all(request.num_done == request.arrival.num_answer_tokens for request in ended)
        assert len({request.arrival.request_id for request in ended}) == len(ended)


def served_under_watch(arm: Arm, setting: Setting) -> list[Request]:
    """By two minutes of 200 users; invariants are checked every two seconds."""
    clock, ended = Clock(), []

    def on_end(request: Request, now: float) -> None:
        ended.append(request)
        users.ended(request, now)

    cluster = cluster_of(arm, setting, clock, on_end)
    habits = replace(setting.habits, has_advisories=arm.has_advisories)
    users = Users(clock, cluster, habits, 200, 1)
    users.start()
    for second in range(1, 60):
        clock.run(2.0 * second)
        for node in cluster.nodes:
            node.check_invariants()
    return ended


# -- routing -----------------------------------------------------------------------------------------------------------


def test_a_request_follows_its_advisory_and_may_be_sent_elsewhere() -> None:
    for second, served_by in ((None, 1), (Relieve(), 0)):
        world = World(num_hosts=2)
        doors = Doors(LoadBalance(), Sticky(), Sticky(), second)
        cluster = SessionCluster(world.nodes, doors, [None, None], 338)
        kv = SessionKv("s")
        cluster.place(kv, 20, 1)
        world.clock.at(1.0, lambda now: cluster.advise(kv, None, 0, now))  # noqa: B023
        for place in range(4):  # in between, that node fills
            world.asks(SessionKv(f"{place}"), 2.0, 400, 200, node=1)
        turn = Turn("s", 5.0, 16 * 21, 2, kv=kv)
        world.clock.at(5.0, lambda now: cluster.submit(turn))  # noqa: B023
        world.runs()
        assert [len(node.ended) for node in world.nodes][served_by] == (5 if served_by else 1)
        assert kv.num_pins == 0


def test_a_node_reports_what_runs_what_waits_and_what_waits_for_its_kv() -> None:
    world = World()
    node, kv = world.nodes[0], SessionKv("s")
    empty = facts_of("0", node)
    world.hosts[0].place(kv, 20)
    world.asks(SessionKv("new"), 0.0, 500, 300, node=0)
    world.asks(kv, 0.1, 16 * 21, 2, node=0)
    world.clock.run(0.1)
    facts = facts_of("0", node)
    assert facts.num_requests == node.num_requests == 2 and facts.running.num >= 1
    assert facts.num_tokens >= 500 and facts.free_tokens < empty.free_tokens
    assert facts.queued_tokens < 16 * 21, "what is in host memory need not be computed"


# -- whole runs --------------------------------------------------------------------------------------------------------

BRIEF = Setting(span_s=150.0, warm_up_s=30.0)


def test_sticky_is_imbalanced_where_load_balance_is_not() -> None:
    sticky, balanced = (run(Point(arm, BRIEF, 256, 1)) for arm in (STICKY, RECOMPUTE))
    assert sticky.imbalance > 1.4 * balanced.imbalance
    first, ours, bound = (run(Point(arm, BRIEF, 256, 1)) for arm in (FIRST_LOOK, OURS, CLAIRVOYANT))
    assert bound.imbalance < 1.1 * ours.imbalance < 0.9 * first.imbalance
    assert bound.latency_s < 1.01 * ours.latency_s < 1.02 * first.latency_s
    assert ours.ttft_p99_s < 2 * bound.ttft_p99_s


def test_what_the_paper_says_of_memory_and_steps_goes_with_the_kv_that_it_counts() -> None:
    assert all(each["matches"] for each in still_baselines(PAPER).values())
    assert not any(each["matches"] for each in still_baselines(Setting()).values())


def test_a_share_of_what_the_clairvoyant_gains() -> None:
    assert of_clairvoyant([1.2, 1.1, 1.0], [1.4, 1.1, 1.0]) == 1.0
    assert of_clairvoyant([1.3], [1.4]) == 0.75


def test_sessions_spare_prefill_and_a_run_is_the_seeds_alone() -> None:
    outcomes = {name: run(Point(arm, BRIEF, 128, 1)) for name, arm in CHAT.items()}
    assert outcomes["ours"].ttft_s < outcomes["sticky"].ttft_s < outcomes["recompute"].ttft_s / 2
    assert run(Point(FIRST_LOOK, BRIEF, 128, 1)).device_share > 0.99 and outcomes["sticky"].device_share == 0
    assert outcomes["sticky"].loaded_share > 0.95
    again = run(Point(OURS, BRIEF, 128, 1))
    # As text, since nan is not equal to itself.
    assert repr(replace(again, took_s=0.0)) == repr(replace(outcomes["ours"], took_s=0.0))
    assert run(Point(OURS, BRIEF, 128, 2)).latency_s != again.latency_s


def test_a_node_that_joins_takes_over_sessions_that_nobody_announces_where_routes_look_at_what_staying_costs() -> (
    None
):
    habits = Habits(missing=1.0, begin_on_first=True)
    setting = replace(BRIEF, num_hosts=2, num_devices=1, habits=habits)
    sticky, ours = (run(Point(arm, setting, 512, 1)) for arm in (DEMAND, OURS))
    assert ours.least > 2 * sticky.least
    assert ours.ttft_p99_s < sticky.ttft_p99_s


def test_agents_are_announced_and_all_workflows_end() -> None:
    ours, recompute = (run_agents(Point(arm, BRIEF, 24, 1)) for arm in (OURS, RECOMPUTE))
    assert ours.lead_s > 1.0
    assert ours.workflow_s < recompute.workflow_s
    documents, chains = Company().drawn(random.Random(1))
    assert len(documents) == 3 and all(len(chain) == 7 for chain in chains)


def test_urgent_people_are_served_first() -> None:
    arm = replace(RECOMPUTE, queue="priority")
    setting = replace(BRIEF, habits=Habits(urgent=0.3), model=LONG)
    outcome = run(Point(arm, setting, 512, 1))
    assert outcome.urgent_latency_s < outcome.other_latency_s


def test_sessions_are_as_published() -> None:
    rng, chats = random.Random(1), Chats()
    sessions = [chats.session(rng) for _ in range(4000)]
    exchanges = [exchange for session in sessions for exchange in session]
    assert statistics.fmean(len(session) > 1 for session in sessions) == pytest.approx(0.734, abs=0.02)
    assert statistics.fmean(map(len, sessions)) == pytest.approx(5.75, rel=0.1)
    assert statistics.fmean(exchange.lead_s for exchange in exchanges) == pytest.approx(11.3, rel=0.03)
    assert sum(e.num_prompt_tokens + e.num_answer_tokens for e in exchanges) / 4000 == pytest.approx(
        2200, rel=0.1
    )
    met = chats.under_way(rng, 500)
    assert all(place < len(session) for session, place in met)
    assert statistics.fmean(len(session) for session, _ in met) > 3 * 5.75
    with pytest.raises(FileNotFoundError):
        recorded(Path("there is none"))


def test_limits_vary_one_thing_at_a_time() -> None:
    bench = Bench(Workers(1), (1,), BRIEF, Path("there is none"))
    settings = symphony.limit_settings(bench)
    assert set(settings) >= {"lead_share", "link_share", "disk_bytes_per_s", "mean_turns", "host_bytes"}
    assert settings["lead_share"]["0"].habits.lead_share == 0
    setting = replace(settings["lead_share"]["1"], span_s=80.0, warm_up_s=20.0)
    bench.run([OURS, BY_LOAD, DEMAND, DEMAND_BALANCED], [setting], [symphony.LIMIT_USERS])
    found = symphony._limit(bench, setting)
    assert found["pays"] == (found["saved_ttft"] >= 0.05 and found["saved_latency"] >= -0.001)
    assert found["saved_ttft"] == pytest.approx(
        1 - found["ttft_s"]["ours"] / min(found["ttft_s"]["demand"], found["ttft_s"]["demand_balanced"]),
        abs=0.01,
    )


def test_a_cell_of_coarse_nodes_serves_everybody() -> None:
    chats = Chats(turns=LogNormal(2.0, 1.0))
    cell = Cell(8, 400, 1, chats, LoadBalance())
    outcome = cell.run()
    cell.check_invariants()
    assert outcome.counts["sessions"] == 400
    # Each turn's typing, sending and answer; a session's first typing comes with its beginning.
    assert outcome.num_events == 3 * outcome.num_turns
    assert Cell(8, 400, 1, chats, LoadBalance()).run().counts == outcome.counts
    found = measure(Workers(1), 1, chats, LoadBalance(), 8, 400)
    assert found["num_sessions"] == 400 and found["events_per_s"] > 0


def test_the_command_ends_with_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symphony, "NUM_WORKFLOWS", (4, 8))
    monkeypatch.setattr(symphony, "MISSING", (0.0, 0.1))
    symphony.main(["--part", "agents", "--part", "missing", "--seeds", "2", "--jobs", "1", "--span-s", "130"])
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert {"agents_speedup", "missing_10pct_penalty"} <= set(result)
    compared = [f for part in result["parts"].values() for f in part["figures"] if f["paper"] is not None]
    assert all(len(figure["seeds"]) == 2 and figure["made_by"] for figure in compared)
