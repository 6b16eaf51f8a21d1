"""SYMPHONY on one node of vLLM's scheduler with our classes: what advisories give people who type, over tiers without them and over vLLM's own ways.

    python -m bench.emulated symphony [--part users|missing|limits ...] [--quick] [--seeds N] [--seed N] [--jobs N]

A fixed number of users read and type (core/people.py; their sessions are drawn to what is published of ShareGPT's) and ask Llama-3.1-8B on an A100 of
80 GB, one of SYMPHONY's eight devices in two machines (§4) with its share of a machine's memory and disk. A run counts requests that end after the
warm-up. Everything that decides is what serves (core/tiers.py says what is modelled); first come, first served. Several nodes, and which of them
serves a session, are measured by `python -m bench.live.cluster`.

Arms:
  recompute  KV is dropped when its request ends
  on_demand  three tiers without advisories: KV that the device lacks is loaded, or computed again, when its request comes
  advised    three tiers; typing is announced when it begins
  oracle     vLLM's prefix cache alone, on a device that has room for everything

Parts:
  users      users at equal latency (E2E over the answer's tokens): at 20.5/18 of the latency that `recompute` has with 8 users, as the paper has it
             for 64 on 8 devices
  missing    advised, with 10% of the advisories missing (Fig. 17)
  limits     where advisories stop paying: one thing changed at a time, advised against on_demand
The paper's figures are of 8 devices: beside ours they say how large the effect is there. The last line is JSON. Of each figure: median over seeds.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from bench.emulated.core.calibration import A100
from bench.emulated.core.clock import Clock
from bench.emulated.core.hardware import GB
from bench.emulated.core.models import LLAMA3_8B
from bench.emulated.core.node import EmulatedNode, Engine
from bench.emulated.core.people import Chats, LogNormal, Users
from bench.emulated.core.steps import StepCost, pool_blocks
from bench.emulated.core.tiers import TierSizes
from bench.emulated.table import Bench, Table, crossing, median

MODEL = replace(LLAMA3_8B, name="llama3.1-8b", max_tokens=131_072)
# The paper compares at the latency that recomputing has with 64 users on 8 devices; a node here is one of them.
PAPER_LIMIT, LEAST_USERS = 20.5 / 18, 64 // 8
USERS = (LEAST_USERS, 64, 128, 192, 256)
# Times the device's memory, so that no KV has to leave it. Chosen.
ROOM = 6
MISSING_USERS, MISSING_SHARE = 64, 0.1
SPAN_S, WARM_UP_S = 240.0, 60.0
QUICK_SPAN_S = 120.0


@dataclass(frozen=True, slots=True)
class Arm:
    """has_cache: KV stays on the device. has_room: the device's memory holds everything."""

    has_cache: bool = True
    has_room: bool = False
    has_tiers: bool = False
    has_advisories: bool = False


ARMS = {
    "recompute": Arm(has_cache=False),
    "on_demand": Arm(has_tiers=True),
    "advised": Arm(has_tiers=True, has_advisories=True),
    "oracle": Arm(has_room=True),
}
PAPER = {"recompute": 4.0}


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting that all arms share. The defaults are a quarter of a machine of SYMPHONY's (§4); the speed of its disks and of copies is chosen.

    Attributes:
        link_share: of PCIe's speed, that copies get.
        missing: share of turns without an advisory.
        lead_share: as of `Users`.
        mean_turns: of a session.
    """

    host_bytes: int = 256 * GB // 4
    disk_bytes_per_s: float = 3e9 / 4
    link_share: float = 0.8
    device_bytes: int = A100.memory_bytes
    missing: float = 0.0
    lead_share: float = 1.0
    mean_turns: float = Chats().turns.mean

    @property
    def cost(self) -> StepCost:
        """The device's cost of steps."""
        return StepCost(replace(A100.with_memory(self.device_bytes), link_share=self.link_share), MODEL)

    @property
    def tiers(self) -> TierSizes:
        """The sizes of the tiers."""
        return TierSizes(self.host_bytes, self.disk_bytes_per_s)

    @property
    def chats(self) -> Chats:
        """The laws of people's sessions."""
        return Chats(turns=LogNormal(self.mean_turns, Chats().turns.sigma))


SETTING = Setting()


@dataclass(frozen=True, slots=True)
class Point:
    """One run."""

    arm: str
    num_users: int
    span_s: float
    setting: Setting = SETTING
    seed: int = 0


def engine_of(arm: Arm, setting: Setting = SETTING) -> Engine:
    """Return the bounds of the arm's engine."""
    num_blocks = pool_blocks(setting.cost) * (ROOM if arm.has_room else 1)
    return Engine(num_blocks, max_tokens=Chats().max_tokens, has_prefix_cache=arm.has_cache)


def talk(point: Point) -> EmulatedNode:
    """Let people talk to one node, first come, first served; return the node as it is then, closed."""
    arm, setting, clock = ARMS[point.arm], point.setting, Clock()
    tiers = setting.tiers if arm.has_tiers else None
    node = EmulatedNode(clock, setting.cost, engine_of(arm, setting), "fcfs", tiers=tiers)
    missing = setting.missing if arm.has_advisories else 1.0
    users = Users(clock, node, setting.chats, point.num_users, point.seed, missing, setting.lead_share)
    node.on_end = users.ended
    try:
        users.start()
        clock.run(point.span_s)
    finally:
        node.close()
    return node


def serve(point: Point) -> dict[str, float]:
    """Play one point; return means, that of latency over answers' tokens. Requests count that end after the warm-up."""
    jobs = [job for job in talk(point).ended if job.ended_s >= WARM_UP_S]
    return {
        "latency_s": statistics.fmean(job.e2e_s / job.arrival.num_answer_tokens for job in jobs),
        "ttft_s": statistics.fmean(job.ttft_s for job in jobs),
    }


def users_part(bench: Bench) -> None:
    """Find users at equal latency: of each arm the number at which normalised latency leaves the limit."""
    bench.play(Point(arm, load, bench.size) for load in reversed(USERS) for arm in ARMS)
    limit_s = PAPER_LIMIT * statistics.median(
        bench.values(Point("recompute", LEAST_USERS, bench.size), "latency_s")
    )
    within = {arm: statistics.median(users_within(bench, arm, limit_s)) for arm in ARMS}
    for arm, number in within.items():
        bench.note(("users_within", arm), number)
        if arm != "advised":
            ratio = round(within["advised"] / number, 3)
            bench.figure(("users_ratio", arm), [ratio], PAPER.get(arm), False, "ratio")
    bound = round(within["oracle"] / within["recompute"], 3)
    bench.figure(("bound_users_ratio", "recompute"), [bound], None, False, "ratio")


def users_within(bench: Bench, arm: str, limit_s: float) -> list[float]:
    """Return the number of users at which normalised latency leaves the limit, by seed; the edge of USERS where it does so beyond them."""
    curves = [bench.values(Point(arm, load, bench.size), "latency_s") for load in USERS]
    found = []
    for latencies in zip(*curves, strict=True):
        edge = USERS[0] if latencies[0] > limit_s else USERS[-1]
        found.append(round(crossing(USERS, latencies, limit_s) or float(edge), 1))
    return found


def missing_part(bench: Bench) -> None:
    """Find the cost of every tenth request coming unannounced."""
    lacking, whole = (
        Point("advised", MISSING_USERS, bench.size, replace(SETTING, missing=share))
        for share in (MISSING_SHARE, 0.0)
    )
    bench.play([lacking, whole])
    bench.figure(("missing_10pct_penalty",), bench.changes(lacking, whole, "latency_s"), 0.06)


LIMIT_USERS = 192
LIMITS: dict[str, tuple[float, ...]] = {
    "lead_share": (0, 0.01, 0.1, 0.3, 1),
    "link_share": (0.01, 0.03, 0.1, 0.8),
    "disk_bytes_per_s": (0.125e9, 0.25e9, 0.75e9, 1.75e9),
    "mean_turns": (1.0, 2.0, 5.25, 12.0),
    "host_bytes": (4e9, 16e9, 64e9),
    "device_bytes": (24e9, 40e9, 80e9),
}
# An advisory pays where it takes away this share of the mean TTFT, and no latency is lost. Chosen.
PAYS_SHARE, LATENCY_LOST = 0.05, 0.001


def limits_part(bench: Bench) -> None:
    """Find where advisories stop paying: one property of the setting changed at a time."""
    settings = {
        (name, f"{value:g}"): replace(SETTING, **{name: type(getattr(SETTING, name))(value)})
        for name, values in LIMITS.items()
        for value in values
    }
    arms = ("on_demand", "advised")
    pairs = {
        place: [Point(arm, LIMIT_USERS, bench.size, setting) for arm in arms]
        for place, setting in settings.items()
    }
    bench.play(point for pair in pairs.values() for point in pair)
    for place, (theirs, ours) in pairs.items():
        ttft, latency = (
            median(-each for each in bench.changes(ours, theirs, name)) for name in ("ttft_s", "latency_s")
        )
        pays = ttft >= PAYS_SHARE and latency >= -LATENCY_LOST
        bench.note(("limits", *place), {"pays": pays, "saved_ttft": ttft, "saved_latency": latency})


TABLE = Table(
    "emulated-symphony",
    "SYMPHONY on one node of vLLM's scheduler",
    serve,
    {"users": users_part, "missing": missing_part, "limits": limits_part},
    (SPAN_S, QUICK_SPAN_S),
    f"{QUICK_SPAN_S:.0f} s of talk",
    seeds=3,
)
