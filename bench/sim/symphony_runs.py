"""One run of SYMPHONY's tables (`bench.sim.symphony`): which system, on what, for whom, and what came of it."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from msgspec import structs

from bench.measures import quantile
from bench.sim.core.batch import Request
from bench.sim.core.calibration import A100
from bench.sim.core.clock import Clock
from bench.sim.core.conversations import Chats
from bench.sim.core.hardware import GB, Gpu
from bench.sim.core.models import LLAMA3_8B, Model
from bench.sim.core.session_cluster import (
    Company,
    Habits,
    Loads,
    SessionCluster,
    Users,
    Workflows,
)
from bench.sim.core.session_node import SessionNode, StepPrefill
from bench.sim.core.shapes import BLOCK_TOKENS, VLLM, pool_blocks
from bench.sim.core.steps import StepCost
from bench.sim.core.tiers import HostTiers
from engine_bridge.policy.kv.restore_method import FullCost
from engine_bridge.policy.nodes import routing
from engine_bridge.policy.nodes.routing import POLICIES as ROUTES
from engine_bridge.policy.nodes.routing import Measured, RoutingPolicy, fit
from engine_bridge.policy.nodes.session_locations import Doors, loyal
from engine_bridge.policy.scheduling.policies import POLICIES as QUEUES
from engine_bridge.protocol.node_facts import NodeFacts, NodePerf, Ranks
from kvtiers.policy.eviction import ByValue, EvictionPolicy, Lru

SPAN_S, WARM_UP_S = 420.0, 120.0
KV_LINK_SHARE = 0.8
LLAMA31_8B = replace(LLAMA3_8B, name="llama3.1-8b", max_tokens=131_072)
GPU = replace(A100, link_share=KV_LINK_SHARE)
PAPER_USERS, PAPER_LIMIT = 64, 20.5 / 18
# Bytes, and bytes a second, that are as good as endless.
FREE = 1e17
# Of the adapters that people of `Habits.num_adapters` ask for. Source: S-LoRA's, as in bench.sim.caraserve.
ADAPTER_RANKS = (8, 16, 32, 64)


def slower(gpu: Gpu, share: float) -> Gpu:
    """The same at a share of its speed."""
    return replace(
        gpu,
        name=f"{gpu.name} at {share:g}",
        flops=gpu.flops * share,
        memory_bytes_per_s=gpu.memory_bytes_per_s * share,
        step_s=gpu.step_s / share,
    )


@cache
def perf_of(gpu: Gpu, model: Model, network_bytes_per_s: float, disk_bytes_per_s: float) -> NodePerf:
    """How fast a node says it is: fitted to random batches, as a profile would be."""
    cost, rng = StepCost(gpu, model), random.Random("profile")
    steps = []
    for _ in range(400):
        ranks = rng.choices((0, *ADAPTER_RANKS), k=rng.randrange(1, 97))
        context = sum(rng.randrange(100, 6000) for _ in ranks)
        seconds = cost.step_s((), len(ranks), context, sum(ranks))
        steps.append(Measured(Ranks(len(ranks), sum(ranks), max(ranks)), context, seconds))
    decode = fit("mbgmv", steps, with_tokens=True).model
    kv_bytes = model.kv_bytes_per_token
    return NodePerf(
        decode=decode,
        prefill=decode,
        prompt_token_s=(cost.prefill_s(2048) - cost.prefill_s(512)) / 1536,
        answer_tokens=Chats().answers.mean,
        kv_token_s=kv_bytes / gpu.achieved_link_bytes_per_s,
        kv_disk_token_s=kv_bytes / disk_bytes_per_s,
        kv_fetch_token_s=kv_bytes / network_bytes_per_s,
    )


def route_of(name: str, perfs: Sequence[NodePerf]) -> RoutingPolicy:
    """By its name in `routing.POLICIES`. Nodes of these tables never pause anybody, so that `Priority` is only asked where."""
    empty = NodeFacts(
        node_id="", running=Ranks(), queued=Ranks(), num_tokens=0, queued_tokens=0, free_tokens=0
    )
    made = {"relief": routing.relief, "loyal": loyal}.get(name) or ROUTES[name]
    return made(routing.settings_of(structs.replace(empty, perf=perf) for perf in perfs))


EVICTIONS: dict[str, EvictionPolicy] = {"by_value": ByValue(), "lru": Lru()}


# -- arms --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arm:
    """One system. route, unannounced, second, new: names in `routing.POLICIES`, of what is announced, of what is not, when what was announced comes,
    and of sessions that begin unannounced; "" for the first of these, and nobody in second's place.

    eviction: of host memory, "" for none; has_cache: KV stays on the device. queue: a name in `registry.POLICIES`. knows_all: KV is where it is
    needed when it is needed, at no cost.
    """

    route: str
    unannounced: str = ""
    second: str = ""
    new: str = ""
    eviction: str = ""
    has_disk: bool = False
    has_cache: bool = False
    has_advisories: bool = False
    queue: str = "fcfs"
    knows_all: bool = False

    @property
    def made_by(self) -> str:
        """The policy objects, by class."""
        names = [name for name in (self.route, self.unannounced, self.second, self.new) if name]
        routes = "/".join(dict.fromkeys(type(route_of(name, ())).__name__ for name in names))
        parts = [routes, type(QUEUES[self.queue](1)).__name__]
        if self.eviction:
            parts += [
                type(EVICTIONS[self.eviction]).__name__,
                "FullCost",
                "disk" if self.has_disk else "no disk",
            ]
        parts += ["device cache"] * self.has_cache + ["advisories by guesses.plan"] * self.has_advisories
        return " + ".join(parts)


RECOMPUTE = Arm("load_balance")
PREFIX = Arm("sticky", has_cache=True)
STICKY = Arm("sticky", eviction="lru")
DEMAND = Arm("sticky", eviction="by_value", has_disk=True, has_cache=True)
DEMAND_BALANCED = replace(DEMAND, route="load_balance")
BY_LOAD = replace(DEMAND, route="load_balance", unannounced="sticky", has_advisories=True)
# As the live router has it (`policy.homes.doors_of`), and without its second look.
OURS = replace(BY_LOAD, route="overture", unannounced="loyal", new="overture", second="relief")
FIRST_LOOK = replace(OURS, second="")
# For `Setting.with_free_kv`: by the true numbers of requests when a request comes.
CLAIRVOYANT = replace(STICKY, route="load_balance", knows_all=True)
CHAT = {
    "recompute": RECOMPUTE,
    "prefix": PREFIX,
    "sticky": STICKY,
    "ours": OURS,
    "clairvoyant": CLAIRVOYANT,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What all arms share. The defaults: SYMPHONY §4, with KV by the model's config.json.

    host_bytes, disk_bytes_per_s, network_bytes_per_s: of a machine. slow_share: the last machine's speed, of the others'."""

    gpu: Gpu = GPU
    model: Model = LLAMA31_8B
    num_hosts: int = 2
    num_devices: int = 4
    host_bytes: int = 256 * GB
    disk_bytes_per_s: float = 3e9
    network_bytes_per_s: float = 12.5e9
    slow_share: float = 1.0
    habits: Habits = field(default_factory=Habits)
    span_s: float = SPAN_S
    warm_up_s: float = WARM_UP_S

    def lasting(self, other: Setting) -> Setting:
        """As long as another."""
        return replace(self, span_s=other.span_s, warm_up_s=other.warm_up_s)

    def with_free_kv(self) -> Setting:
        """All KV has room, and moves in no time."""
        gpu = replace(self.gpu, link_bytes_per_s=FREE, load_setup_s=0.0)
        return replace(self, gpu=gpu, host_bytes=int(FREE), network_bytes_per_s=FREE)

    @property
    def engine(self) -> str:
        """Cost model and step shape."""
        count = self.num_hosts * self.num_devices
        return f"StepCost({self.gpu.name}, {self.model.name}) on {count} devices, engine {VLLM.name}"

    @property
    def made_by(self) -> str:
        return f"{self.engine}, {self.habits.chats.name}"

    def cost(self, host: int) -> StepCost:
        """Of a machine's devices."""
        is_slow = self.slow_share != 1 and host == self.num_hosts - 1
        gpu = slower(self.gpu, self.slow_share) if is_slow else self.gpu
        return StepCost(gpu, self.model)


PAPER = Setting(model=replace(LLAMA31_8B, name="llama3.1-8b of 1.1 MB a token", counted_kv_bytes=1_100_000))
"""SYMPHONY's set-up, as far as its text says.

8 A100 of 80 GB in two machines of 256 GB and 4 TB of disk each, 100 Gb/s between them, vLLM's steps, Llama-3.1-8B with 128K of context: §4.
1.1 MB of KV a token: §2.4, which counts 256 GB as 238K tokens and 108 sessions. That a device is full with 36 requests (§2.4), and that 32 requests
decode at almost half the speed of 8 (Fig. 2), agree with it and not with the 131 kB that the model's config.json gives. ShareGPT's turns and
lengths: §2.3, §2.4; reading and typing speeds: the two studies that §4 names; leads of 11.3 s: §1. A fixed number of people at once: §4, Fig. 12
to 14. Baselines recompute by least requests, and load from host memory where the session began: §4. KV is read layer by layer: §3.3.
Chosen, since it does not say: disks of 3 GB/s each way, the share of PCIe that copies get, sessions as they are met at any moment (it serves 1,000
from their beginning, but 1,000 sessions never keep 1,024 people busy), 420 s of which 120 are not counted, LRU in InferCept's host memory, and that a
load is waited for by the step that needs it alone.
"""


# Of a figure that the text gives as "almost", "around" or without its load.
NEAR = 0.15
MEAN_SESSION_TOKENS = 2200


def still_baselines(setting: Setting) -> dict[str, Any]:
    """What the paper says of memory and steps, which decide how scarce memory is."""
    cost = setting.cost(0)
    # A session is half grown on average.
    context = MEAN_SESSION_TOKENS // 2
    few, many = (cost.step_s((), num, num * context) for num in (8, 32))
    device_tokens = pool_blocks(cost) * BLOCK_TOKENS
    host_tokens = setting.host_bytes / setting.model.kv_bytes_per_token
    return {
        "tokens in a machine's memory (§2.4)": check(host_tokens, 238_000),
        "half-grown sessions that fill a device (§2.4)": check(device_tokens / context, 36, 0.3),
        "time a token of 32 requests over that of 8 (Fig. 2, almost)": check(many / few, 2.0),
    }


def check(ours: float, paper: float, near: float = NEAR) -> dict[str, Any]:
    """A figure of ours beside the paper's. near: share by which they may differ."""
    return {"ours": round(ours, 3), "paper": paper, "matches": abs(ours / paper - 1) <= near}


def of_clairvoyant(ours: Sequence[float], clairvoyant: Sequence[float]) -> float:
    """What ours gain of what the clairvoyant gains, both ratios to the same baseline; median over seeds. 1 where it gains nothing."""
    shares = [(a - 1) / (b - 1) if b != 1 else 1.0 for a, b in zip(ours, clairvoyant, strict=True)]
    return round(statistics.median(shares), 4)


# -- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    """One run: an arm in a setting, for so many users (or workflows of agents), with a seed."""

    arm: Arm
    setting: Setting
    num_users: int
    seed: int

    @property
    def served(self) -> Setting:
        """What the arm finds."""
        return self.setting.with_free_kv() if self.arm.knows_all else self.setting


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means in seconds; imbalance as in the module's docstring; peak: the most requests at any node at any look over the median node's in the middle
    look; widest: between the fullest and the emptiest node, at most; shares of the sessions' known blocks that came from where."""

    latency_s: float
    urgent_latency_s: float
    other_latency_s: float
    tpot_s: float
    ttft_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    num_requests: int
    imbalance: float
    peak: float
    widest: int
    most: float
    median: float
    least: float
    device_share: float
    loaded_share: float
    stalled_share: float
    counts: dict[str, int]
    num_events: int
    took_s: float


def cluster_of(
    arm: Arm, setting: Setting, clock: Clock, on_end: Callable[[Request, float], None]
) -> SessionCluster:
    nodes, perfs = [], []
    for at in range(setting.num_hosts):
        cost = setting.cost(at)
        host = _host(arm, setting, clock) if arm.eviction else None
        perf = perf_of(cost.gpu, cost.model, setting.network_bytes_per_s, setting.disk_bytes_per_s)
        perfs += [perf] * setting.num_devices
        nodes += [
            SessionNode(
                clock,
                cost,
                QUEUES[arm.queue](1),
                host=host,
                restore=FullCost(prefill=StepPrefill(cost, VLLM.step_tokens)),
                has_cache=arm.has_cache,
                on_end=on_end,
                adapter_ranks=ADAPTER_RANKS,
            )
            for _ in range(setting.num_devices)
        ]
    second = route_of(arm.second, perfs) if arm.second else None
    names = (arm.route, arm.unannounced or arm.route, arm.new or arm.unannounced or arm.route)
    doors = Doors(*(route_of(name, perfs) for name in names), second)
    return SessionCluster(nodes, doors, perfs, round(setting.habits.chats.answers.mean), ADAPTER_RANKS)


def _host(arm: Arm, setting: Setting, clock: Clock) -> HostTiers:
    return HostTiers(
        clock,
        EVICTIONS[arm.eviction],
        memory_bytes=setting.host_bytes,
        block_bytes=BLOCK_TOKENS * setting.model.kv_bytes_per_token,
        num_layers=setting.model.num_layers,
        disk_bytes_per_s=setting.disk_bytes_per_s if arm.has_disk else 0.0,
        network_bytes_per_s=setting.network_bytes_per_s,
    )


def run(point: Point) -> Outcome:
    arm, setting, clock = point.arm, point.served, Clock()
    ended: list[Request] = []

    def on_end(request: Request, now: float) -> None:
        ended.append(request)
        users.ended(request, now)

    cluster = cluster_of(arm, setting, clock, on_end)
    habits = replace(setting.habits, has_advisories=arm.has_advisories)
    users = Users(clock, cluster, habits, point.num_users, point.seed)
    loads, began = Loads(), time.perf_counter()
    loads.watch(clock, cluster.nodes, setting.warm_up_s, setting.span_s)
    users.start()
    clock.run(setting.span_s)
    for node in cluster.nodes:
        node.check_invariants()
    requests = [request for request in ended if request.ended_s >= setting.warm_up_s]
    return _outcome(cluster, requests, loads, setting, clock.num_events, time.perf_counter() - began)


def _outcome(
    cluster: SessionCluster,
    requests: Sequence[Request],
    loads: Loads,
    setting: Setting,
    num_events: int,
    took_s: float,
) -> Outcome:
    counts: Counter[str] = Counter()
    for node in cluster.nodes:
        counts.update(node.tally.counts + node.dispatcher.counts)
    for host in {id(node.host): node.host for node in cluster.nodes if node.host is not None}.values():
        counts.update(host.counts)
    known = max(counts["known_blocks"], 1)
    most, median = statistics.fmean(loads.most), statistics.fmean(loads.median)
    return Outcome(
        latency_s=_mean(map(normalised_s, requests)),
        urgent_latency_s=_mean(normalised_s(request) for request in requests if request.arrival.priority < 0),
        other_latency_s=_mean(normalised_s(request) for request in requests if request.arrival.priority >= 0),
        tpot_s=_mean(request.tpot_s for request in requests if request.arrival.num_answer_tokens > 1),
        ttft_s=_mean(request.ttft_s for request in requests),
        ttft_p99_s=quantile([request.ttft_s for request in requests], 0.99),
        tpot_p99_s=quantile([r.tpot_s for r in requests if r.arrival.num_answer_tokens > 1], 0.99),
        num_requests=len(requests),
        imbalance=most / max(median, 0.5),
        peak=max(loads.most) / max(statistics.median(loads.median), 0.5),
        widest=max(most - least for most, least in zip(loads.most, loads.least, strict=True)),
        most=most,
        median=median,
        least=statistics.fmean(loads.least),
        device_share=counts["device_blocks"] / known,
        loaded_share=counts["loaded_blocks"] / known,
        stalled_share=_mean(node.tally.stalled_s for node in cluster.nodes) / setting.span_s,
        counts=dict(counts),
        num_events=num_events,
        took_s=took_s,
    )


def normalised_s(request: Request) -> float:
    return request.e2e_s / request.arrival.num_answer_tokens


def _mean(values: Iterable[float]) -> float:
    """nan of none."""
    found = list(values)
    return statistics.fmean(found) if found else float("nan")


@dataclass(frozen=True, slots=True)
class AgentsOutcome:
    """Seconds: of a workflow on average, until the last one's end, and by which advisories came before their requests."""

    workflow_s: float
    all_s: float
    lead_s: float


def run_agents(point: Point) -> AgentsOutcome:
    """`num_users` workflows, begun within ten seconds."""
    clock = Clock()
    cluster = cluster_of(point.arm, point.served, clock, lambda request, now: workflows.ended(request, now))
    workflows = Workflows(
        clock, cluster, Company(), point.num_users, point.seed, has_advisories=point.arm.has_advisories
    )
    workflows.start()
    clock.run()
    for node in cluster.nodes:
        node.check_invariants()
    if len(workflows.took_s) != point.num_users:
        raise RuntimeError("workflows were never served")
    return AgentsOutcome(statistics.fmean(workflows.took_s), clock.now, _mean(workflows.leads_s))
