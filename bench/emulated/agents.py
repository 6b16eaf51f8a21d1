"""Agents that call tools, on one node: how long their programs take, against vLLM's order with host memory behind it.

    python -m bench.emulated agents [--quick] [--csv FILE] [--seeds N] [--seed N] [--jobs N]

Programs arrive by a Poisson process. Each has a prompt of its own and several turns; an answer calls tools, which take a pause, and the next prompt
is all of that and their results. Nothing but the calls themselves tells the node that they belong together. Device: an A100 with Llama-3-8B.
Kinds: `coding` (10.9 ± 2.1 turns, source: Continuum, arXiv 2511.02230; pauses of which 86% end within a second, source: vllm-project/router #285),
`calls` (6.3 turns of short prompts), `team` (two helpers work while their caller waits; whose they are is told by what clients send). Beside
`coding` a third of the requests may be people's single questions (`chat`).

Recorded runs (`--csv FILE` adds yours) are played on a small device, some at once.

Arms, the same programs to each:
  vllm    vLLM's queue and prefix cache; KV that leaves the device is lost
  host    vLLM's order, with host memory behind the device as vLLM's own: what was used longest ago leaves it first
  ttl     the same, and each program's KV is held on the device for two seconds of its pause
  continuum  the same in the order in which programs began, and held for as long as it pays: see `Continuum`
  ours    the default order, host memory, and each pause announced as the gateway does it, with what it has learned of this kind
  knows   the same, and each pause announced with its true length
  roomy   vLLM's order with room for everything: a bound for moving KV, not for order
Settings are (device tokens, host GB, load); a load is a share of what vLLM with room for everything answers.

The last line is JSON. `job_time_vs_host`: mean job time (from a program's arrival to its last token) of `ours` over that of `host`, mean of the four
settings of `coding`; `worst_job_time_vs_host`: the worst of all settings, kinds and loads; `way_to_roomy`: the part of the way from `host` to `roomy`
that `ours` goes; `vs_continuum`: job time of `ours` over that of `continuum`, mean of the four settings; `chat_p99_vs_vllm`: P99 TTFT of people's
questions; `longest_wait_vs_host`: the longest time that a program waited for first tokens, all its turns together. A new program may wait long for
the first of them: `longest_ttft_vs_host` says how long.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from bench.data import FOLDER, are_recorded
from bench.emulated.agent_runs import RECORDED_TOKENS_PER_S, read_runs
from bench.emulated.core.arrivals import Arrival
from bench.emulated.core.calibration import A100
from bench.emulated.core.clock import Clock
from bench.emulated.core.models import LLAMA3_8B
from bench.emulated.core.node import EmulatedNode, Engine, Job
from bench.emulated.core.steps import StepCost
from bench.emulated.core.tiers import TierSizes
from bench.emulated.table import Bench, Table
from bench.measures import quantile
from engine_bridge.policy.scheduling.baselines import OneOrder
from engine_bridge.policy.scheduling.policies import MakePolicy
from engine_bridge.policy.scheduling.queue_policy import Waiting
from gateway.recognition.tool_pauses import ToolPauses

COST = StepCost(A100, replace(LLAMA3_8B, max_tokens=33_000))
BLOCK_TOKENS, MAX_TOKENS, STEP_TOKENS = 16, 32_768, 4096
SETTINGS = ((100_000, 64.0, 1.5), (100_000, 64.0, 2.5), (50_000, 64.0, 1.5), (100_000, 8.0, 2.0))
"""Device tokens, GB of host memory, load. Source: those at which order and moves were first told apart."""
LIGHT = ((100_000, 64.0, 0.5), (100_000, 64.0, 1.0))
HEAVY = {"calls": (50_000, 64.0, 5.0), "team": (50_000, 64.0, 3.0)}
"""Where the other kinds fill the device. Chosen: of three each, the one in which ours gains least."""
KINDS = ("coding", "calls", "team")
ROOMY = 40
TTL_S = 2.0
RUNS = (FOLDER / "agent_runs/magagent.csv", FOLDER / "agent_runs/taubench.csv")
NUM_PROGRAMS, QUICK_PROGRAMS = 120, 60
# Programs a second at a load of 1: chosen near what vLLM answers of each kind with 100,000 tokens and no host memory.
CAPACITY = {"coding": 0.074, "calls": 0.9, "team": 0.04}
CHAT_SHARE = 1 / 3
# Recorded runs: how many at once, and the node that they share, as their contexts are short. Chosen: KV for some of them on the device, not for all.
AT_ONCE, RECORDED_ON = 16, (20_000, 4.0)
RECORDED_LOADS = (1.0, 3.0)
AIMS = {
    "job_time_vs_host": 0.65,
    "way_to_roomy": 0.5,
    "vs_continuum": 0.95,
    "worst_job_time_vs_host": 1.0,
    "chat_p99_vs_vllm": 1.0,
    "longest_wait_vs_host": 1.1,
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a program. pause_s: of the tools that its answer calls. helpers: programs that it starts and waits for.

    context: of a recorded program, the conversation that it continues, with a prompt of `num_new_tokens` in all; "": the program's only one.
    """

    num_new_tokens: int
    num_answer_tokens: int
    pause_s: float
    helpers: tuple[tuple[Turn, ...], ...] = ()
    context: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """One play. chat: people ask single questions beside the programs."""

    arm: str
    kind: str
    device_tokens: int
    host_gb: float
    load: float
    num: int
    chat: bool = False
    seed: int = 0


@cache
def recorded(path: str) -> list[tuple[Turn, ...]]:
    """Return the programs of a file of recorded runs."""
    return [
        tuple(
            Turn(call.num_prompt_tokens, call.num_answer_tokens, call.pause_s, context=call.context)
            for call in calls
        )
        for calls in read_runs(Path(path))
    ]


def capacity(kind: str) -> float:
    """Return the programs a second at a load of 1; for recorded programs, the rate that keeps `AT_ONCE` under way at their recorded durations."""
    if kind in CAPACITY:
        return CAPACITY[kind]
    took_s = [
        sum(turn.pause_s + turn.num_answer_tokens / RECORDED_TOKENS_PER_S for turn in turns)
        for turns in recorded(kind)
    ]
    return AT_ONCE / statistics.fmean(took_s)


def program(kind: str, rng: random.Random) -> tuple[Turn, ...]:
    """Return the turns of a program of this kind."""
    if kind not in KINDS:
        return rng.choice(recorded(kind))
    if kind == "calls":
        return _turns(rng, max(2, round(rng.gauss(6.3, 2.0))), (600, 1500), (30, 400), (20, 150), (-1.6, 1.2))
    turns = _turns(
        rng, max(2, round(rng.gauss(10.9, 2.1))), (2500, 6000), (100, 1200), (40, 500), (-0.7, 1.6)
    )
    if kind == "team":
        helpers = tuple(_turns(rng, 4, (1500, 2500), (100, 800), (40, 300), (-0.7, 1.6)) for _ in range(2))
        turns = (*turns[:3], replace(turns[3 % len(turns)], helpers=helpers), *turns[4:7])
    return turns


def _turns(
    rng: random.Random,
    num: int,
    first: tuple[int, int],
    new: tuple[int, int],
    answer: tuple[int, int],
    pause: tuple[float, float],
) -> tuple[Turn, ...]:
    return tuple(
        Turn(
            rng.randint(*(new if number else first)),
            rng.randint(*answer),
            min(rng.lognormvariate(*pause), 60.0) if number < num - 1 else 0.0,
        )
        for number in range(num)
    )


class Continuum:
    """How long a program's KV is held on the device, by what earlier pauses after the same tools took.

    That is the time for which the delay that it spares its program is largest against the time for which others are kept from its memory: a program
    that comes back within it waits neither for its KV nor in the queue. Source: Continuum (arXiv 2511.02230), its abstract alone.
    """

    def __init__(self) -> None:
        self._pauses: dict[Any, deque[float]] = {}
        self._waits_s: deque[float] = deque([0.0], maxlen=64)

    def order(self) -> Callable[[Waiting], float]:
        """Return the key of an order in which requests of the program that began first start first."""
        began_s: dict[str, float] = {}
        return lambda facts: began_s.setdefault(facts.program or facts.request_id, facts.arrived_s)

    def note(self, tools: Any, pause_s: float) -> None:
        """Note how long a pause was."""
        self._pauses.setdefault(tools, deque(maxlen=256)).append(pause_s)

    def waited(self, wait_s: float) -> None:
        """Note how long a program's later turn waited."""
        self._waits_s.append(wait_s)

    def hold_s(self, tools: Any, reload_s: float) -> float:
        """Return how long to hold KV that is brought back within `reload_s`."""
        seen = sorted(self._pauses.get(tools, ()))
        if len(seen) < 8:  # chosen: fewer say nothing
            return TTL_S
        spared_s = reload_s + statistics.fmean(self._waits_s)
        best_s, best, held_s = 0.0, 0.0, 0.0
        for number, pause_s in enumerate(seen, 1):
            held_s += pause_s
            mean_held_s = (held_s + (len(seen) - number) * pause_s) / len(seen)
            if (gain := number / len(seen) * spared_s - mean_held_s) > best:
                best_s, best = pause_s, gain
        return best_s


class Agent:
    """One program that runs: asks, waits for its tools and helpers, and asks again."""

    def __init__(
        self, play: Play, name: str, turns: tuple[Turn, ...], ended: Callable[[], None], caller: str = ""
    ) -> None:
        self._play, self._name, self._turns, self._ended, self._caller = play, name, turns, ended, caller
        self._at, self._num_tokens, self._num_helpers = 0, 0, 0
        self._asked: set[str] = set()
        self.ask()

    def ask(self) -> None:
        """Send the next turn's request."""
        turn = self._turns[self._at]
        self._num_tokens = turn.num_new_tokens + (0 if turn.context else self._num_tokens)
        session = self._session(turn)
        arrival = Arrival(
            f"{self._name}/{self._at}",
            self._play.clock.now,
            self._num_tokens,
            turn.num_answer_tokens,
            session=session,
            turn="continues" if session in self._asked else "begins",
            caller="" if session in self._asked else self._caller,
        )
        self._asked.add(session)
        self._play.send(arrival, self._answered)

    def _session(self, turn: Turn) -> str:
        return f"{self._name}/{turn.context}" if turn.context else self._name

    def _answered(self) -> None:
        turn = self._turns[self._at]
        self._num_tokens += turn.num_answer_tokens
        self._at += 1
        if self._at == len(self._turns) or (not turn.context and self._num_tokens + 2000 > MAX_TOKENS):
            self._ended()
            return
        if self._turns[self._at].context == turn.context:
            self._play.goes_away(self._session(turn), turn)
        self._num_helpers = len(turn.helpers)
        for number, turns in enumerate(turn.helpers):
            Agent(self._play, f"{self._name}.{self._at}.{number}", turns, self._helped, self._name)
        if not turn.helpers:
            self._play.after(turn.pause_s, self.ask)

    def _helped(self) -> None:
        self._num_helpers -= 1
        if not self._num_helpers:
            self.ask()


class Play:
    """A play of all programs of a point on one node."""

    def __init__(self, point: Point) -> None:
        self.point, self.clock = point, Clock()
        is_roomy, arm = point.arm == "roomy", point.arm
        tokens = point.device_tokens * (ROOMY if is_roomy else 1)
        is_ours, self._continuum = arm in ("ours", "knows"), Continuum()
        tiers = None
        if arm not in ("vllm", "roomy"):
            tiers = TierSizes(int(point.host_gb * 1e9), is_plain=not is_ours)
        policy: str | MakePolicy = "bounded" if is_ours else "fcfs" if tiers is not None else "vllm"
        if arm == "continuum":
            policy = lambda num: OneOrder("continuum", self._continuum.order())  # noqa: E731
        engine = Engine(tokens // BLOCK_TOKENS, BLOCK_TOKENS, max_tokens=MAX_TOKENS, step_tokens=STEP_TOKENS)
        self.node = EmulatedNode(self.clock, COST, engine, policy, tiers=tiers)
        self.node.on_end = self._on_end
        self.job_s: list[float] = []
        self._pauses, self._waiting = ToolPauses(), {}  # type: ToolPauses, dict[str, Callable[[], None]]
        at_s, gaps = 0.0, random.Random(f"gaps {point.kind} {point.seed}")
        for number in range(point.num):
            at_s += gaps.expovariate(capacity(point.kind) * point.load)
            turns = program(point.kind, random.Random(f"{point.kind} {point.seed} {number}"))
            self.clock.at(at_s, lambda now, number=number, turns=turns: self._begin(f"p{number}", turns))
        if point.chat:
            self._ask_questions(at_s, random.Random(f"chat {point.seed}"))

    def _ask_questions(self, until_s: float, rng: random.Random) -> None:
        """Let people ask as many single questions as make a third of all requests."""
        per_s = CAPACITY[self.point.kind] * self.point.load * 11 * CHAT_SHARE / (1 - CHAT_SHARE)
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(per_s)) < until_s:
            name = f"c{at_s:.6f}"
            asked = Arrival(name, at_s, rng.randint(50, 800), rng.randint(20, 300), session=name)
            self.clock.at(at_s, lambda now, asked=asked: self.send(asked, lambda: None))

    def _begin(self, name: str, turns: tuple[Turn, ...]) -> None:
        began_s = self.clock.now
        Agent(self, name, turns, lambda: self.job_s.append(self.clock.now - began_s))

    def send(self, arrival: Arrival, answered: Callable[[], None]) -> None:
        """Send a request; `answered` is called at its end."""
        self._waiting[arrival.request_id] = answered
        self.node.submit(arrival)

    def after(self, pause_s: float, then: Callable[[], None]) -> None:
        """Call a function when tools have answered."""
        self.clock.at(self.clock.now + pause_s, lambda now: then())

    def goes_away(self, name: str, turn: Turn) -> None:
        """Tell the node, as the arm would, that a program comes back."""
        tools = (self.point.kind, "helpers" if turn.helpers else "tool")
        if self.point.arm == "knows":
            self.node.advise(name, turn.pause_s)
        elif self.point.arm == "ours":
            back = self._pauses.expected("", tools)
            self.node.advise(name, back.earliest_s, lifetime_s=back.latest_s)
            if not turn.helpers:
                self.after(turn.pause_s, lambda: self._pauses.note("", tools, turn.pause_s))
        elif self.point.arm == "ttl":
            self._hold(name, turn, TTL_S)
        elif self.point.arm == "continuum":
            reload_s = self._tokens_of(name) * LLAMA3_8B.kv_bytes_per_token / A100.achieved_link_bytes_per_s
            self._hold(name, turn, self._continuum.hold_s(tools, reload_s))
            if not turn.helpers:
                self.after(turn.pause_s, lambda: self._continuum.note(tools, turn.pause_s))

    def _hold(self, name: str, turn: Turn, hold_s: float) -> None:
        """Hold a program's blocks on the device until it comes back or `hold_s` are over, or nothing else could run."""
        pool = self.node.scheduler.kv_cache_manager.block_pool
        num_blocks = self._tokens_of(name) // BLOCK_TOKENS
        found = [pool.get_cached_block(each, [0]) for each in self.node.requests.names(name, num_blocks)]
        blocks = [each[0] for each in found[: found.index(None) if None in found else None]]
        if not hold_s or len(blocks) > pool.get_num_free_blocks() // 2:
            return
        pool.touch(blocks)
        self.after(min(hold_s, turn.pause_s + 0.001), lambda: pool.free_blocks(reversed(blocks)))

    def _tokens_of(self, name: str) -> int:
        return next(
            job.arrival.num_tokens for job in reversed(self.node.ended) if job.arrival.session == name
        )

    def _on_end(self, job: Job) -> None:
        if job.arrival.turn == "continues":
            self._continuum.waited(job.started_s - job.arrival.at_s)
        self._waiting.pop(job.arrival.request_id)()


def serve(point: Point) -> dict[str, float]:
    """Play a point to its end and return seconds: job time, the longest wait of a program and of a request, P99 TTFT of people's questions."""
    play = Play(point)
    try:
        play.clock.run()
    finally:
        play.node.close()
    if len(play.job_s) != point.num:
        raise RuntimeError(f"{point.num - len(play.job_s)} programs have not ended")
    waited: dict[str, float] = {}
    for job in play.node.ended:
        waited[job.arrival.session] = waited.get(job.arrival.session, 0.0) + job.ttft_s
    asked = [job.ttft_s for job in play.node.ended if not job.arrival.turn]
    return {
        "job_s": statistics.fmean(play.job_s),
        "job_p99_s": quantile(play.job_s, 0.99),
        "longest_wait_s": max(waited.values()),
        "longest_ttft_s": max(job.ttft_s for job in play.node.ended),
        "chat_p99_s": quantile(asked, 0.99) if asked else 0.0,
    }


def _points(bench: Bench) -> list[tuple[str, Point]]:
    num = int(bench.size)
    heavy = [
        (f"coding {number}", Point("host", "coding", *each, num)) for number, each in enumerate(SETTINGS, 1)
    ]
    light = [(f"coding at {each[2]}", Point("host", "coding", *each, num)) for each in LIGHT]
    others = [
        (f"{kind} at {each[2]}", Point("host", kind, *each, num))
        for kind in KINDS[1:]
        for each in (LIGHT[1], HEAVY[kind])
    ]
    return heavy + light + others


def programs_part(bench: Bench) -> None:
    """Compare arms in each setting."""
    points = _points(bench)
    arms = ("host", "continuum", "ours", "roomy")
    if not bench.is_quick:
        arms = (*arms, "vllm", "ttl", "knows")
    bench.play(replace(point, arm=arm) for _, point in points for arm in arms)
    ratios: dict[str, float] = {}
    ways, waits, ttfts, of_continuum = [], [], [], []
    for name, point in points:
        host = statistics.fmean(bench.values(point, "job_s"))
        by_arm: dict[str, Any] = {
            arm: statistics.fmean(bench.values(replace(point, arm=arm), "job_s")) / host for arm in arms
        }
        bench.note(
            ("at", name), {arm: round(value, 3) for arm, value in by_arm.items()} | {"host_s": round(host, 1)}
        )
        ratios[name] = by_arm["ours"]
        if name in [each for each, _ in points[: len(SETTINGS)]]:
            ways.append((1 - by_arm["ours"]) / (1 - by_arm["roomy"]))
            of_continuum.append(by_arm["ours"] / by_arm["continuum"])
        waits += bench.ratios(replace(point, arm="ours"), point, "longest_wait_s")
        ttfts += bench.ratios(replace(point, arm="ours"), point, "longest_ttft_s")
    heavy = [ratios[name] for name, _ in points[: len(SETTINGS)]]
    for name, value, is_less_better in (
        ("job_time_vs_host", statistics.fmean(heavy), True),
        ("worst_job_time_vs_host", max(ratios.values()), True),
        ("way_to_roomy", statistics.fmean(ways), False),
        ("vs_continuum", statistics.fmean(of_continuum), True),
        ("longest_wait_vs_host", max(waits), True),
    ):
        bench.figure((name,), [value], AIMS[name], is_less_better, "ratio")
    bench.figure(("longest_ttft_vs_host",), [max(ttfts)], None, unit="ratio")


def chat_part(bench: Bench) -> None:
    """Compare people's questions beside programs."""
    point = Point("vllm", "coding", 100_000, 64.0, 1.0, int(bench.size) // 2, chat=True)
    ours = replace(point, arm="ours")
    bench.play((point, ours))
    ratio = statistics.fmean(bench.ratios(ours, point, "chat_p99_s"))
    bench.figure(("chat_p99_vs_vllm",), [ratio], AIMS["chat_p99_vs_vllm"], unit="ratio")


def recorded_part(bench: Bench) -> None:
    """Compare arms on recorded runs: those of the folder of recorded traffic, where it is there, and the user's."""
    paths = [path for path in RUNS if are_recorded(path)] + list(bench.files)
    arms = ("host", "continuum", "ours")
    points = [
        (path, Point("host", str(path), *RECORDED_ON, load, int(bench.size)))
        for path in paths
        for load in RECORDED_LOADS
    ]
    bench.play(replace(point, arm=arm) for _, point in points for arm in arms)
    for path, point in points:
        host = statistics.fmean(bench.values(point, "job_s"))
        for arm in arms[1:]:
            ratio = statistics.fmean(bench.values(replace(point, arm=arm), "job_s")) / host
            aim = AIMS["worst_job_time_vs_host"] if arm == "ours" else None
            bench.figure(("recorded", f"{path.stem} at {point.load}", arm), [ratio], aim, unit="ratio")


TABLE = Table(
    "emulated-agents",
    "Programs of agents with pauses of tools",
    serve,
    {"programs": programs_part, "chat": chat_part, "recorded": recorded_part},
    (NUM_PROGRAMS, QUICK_PROGRAMS),
    "fewer programs, four arms",
    seeds=1,
    files=("--csv", "recorded runs of yours beside ours; columns: bench/emulated/agent_runs.py"),
)
