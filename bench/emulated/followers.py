"""Who comes next in a run of agents: the gateway's learned advisories against the rule "this agent again", in virtual time.

    python -m bench.emulated followers [--csv PATH]... [--seeds N] [--seed N] [--jobs N]

Each call is foreseen, then learned from: nothing is known before the first one, so every call is judged before it was seen. Runs of one owner
overlap, three at a time on average, and come in an order that each seed shuffles, except where the order is the point (`drift`). A promise is for one
agent's session in one run, and lives as long as the gateway would keep the advisory. Of a session that is expected already a second promise says
nothing more: it renews the first one and is not counted. The rule promises at each call that this agent comes again, for as long as a run may be
silent at all (half an hour).

  precision            of the promises made, how many were followed by a call of that session while they lived
  recall               of the calls that are not their run's first, how many were promised when they came
  calibration_error    promises in ten bins by their probability: the difference of probability and share come true, weighted by promises

`precision_vs_trivial` and `recall_vs_trivial` divide by the rule's on the same calls, both at the one setting that the gateway runs with. Those at
the front of the JSON are the worst over all data sets, seeds put together. The learner's constants were chosen on seeds 1 to 5.

Data: `agent_runs/taubench.csv` from the folder of recorded traffic where it is there; files of `--csv` (columns run, at_s, agent, perhaps end_s); and
runs that are made up: they are not fitted to any recording, but stand for what frameworks do (pipelines of roles with repairs, loops with tools,
debates in rounds, a router with workers), for routing by chance, for agents that no other run has, and for rules that change.
"""

from __future__ import annotations

import csv
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.data import FOLDER
from bench.emulated.table import Bench, Table
from gateway.advisories.followers import MAX_GAP_S, AgentCall, Followers

AGENT_RUNS = FOLDER / "agent_runs/taubench.csv"
NUM_RUNS = 60
NUM_BINS = 10
TOGETHER = 3.0
START_GAP_S = 5.0
Event = tuple[float, str, AgentCall]
"""When a call is noted or has ended, which of both, and whose call it is."""


# -- runs of agents ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """One request: when it comes, from its run's start; when its answer is whole; whose it is."""

    at_s: float
    end_s: float
    agent: str


Run = list[Call]


def read(path: Path) -> list[Run]:
    """The runs of a CSV file with the columns `run`, `at_s` and `agent`, and perhaps `end_s`; without it a call ends shortly before the next one.

    Raises OSError, and ValueError where a column is missing or no number.
    """
    rows: dict[str, list[tuple[float, float | None, str]]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if not {"run", "at_s", "agent"} <= row.keys():
                raise ValueError(f"{path} has no columns run, at_s and agent")
            end_s = float(row["end_s"]) if row.get("end_s") else None
            rows[row["run"]].append((float(row["at_s"]), end_s, row["agent"]))
    return [_ended(sorted(calls, key=lambda call: call[0])) for calls in rows.values()]


def _ended(calls: list[tuple[float, float | None, str]]) -> Run:
    found = []
    for place, (at_s, end_s, agent) in enumerate(calls):
        next_s = calls[place + 1][0] if place + 1 < len(calls) else at_s + 1.0
        found.append(Call(at_s, at_s + 0.9 * (next_s - at_s) if end_s is None else end_s, agent))
    return found


def timed(agents: Iterator[str], rng: random.Random) -> Run:
    """One after the other: each works for some seconds, and the next one comes after a pause."""
    now, run = 0.0, []
    for agent in agents:
        took_s = rng.lognormvariate(1.0, 0.5)
        run.append(Call(now, now + took_s, agent))
        now += took_s + 0.5 * rng.lognormvariate(0.0, 0.8)
    return run


def roles(rng: random.Random) -> Iterator[str]:
    """A pipeline: documents first, then an engineer file by file, and tests that send some of it back."""
    yield from ("product_manager", "architect", "project_manager")
    for _ in range(rng.randint(1, 5)):
        yield "engineer"
    for _ in range(4):
        yield "tester"
        if rng.random() < 0.5:
            return
        yield "engineer"


def tools(rng: random.Random) -> Iterator[str]:
    """A loop of one agent with tools, looked at by a critic now and then; an editor ends it."""
    yield "planner"
    while True:
        yield "solver"
        if rng.random() < 0.12:
            yield "critic"
        if rng.random() < 0.1:
            break
    yield "editor"


def debate(rng: random.Random) -> Iterator[str]:
    """Three to five speakers in turn, three to five rounds, and a judge."""
    speakers = [f"speaker{i}" for i in range(rng.randint(3, 5))]
    for _ in range(rng.randint(3, 5)):
        yield from speakers
    yield "judge"


def router(rng: random.Random) -> Iterator[str]:
    """Every second call is the router's; it calls one of six workers, some of them oftener."""
    for _ in range(rng.randint(3, 15)):
        yield "router"
        yield f"worker{rng.choices(range(6), [6, 4, 3, 2, 1, 1])[0]}"
    yield "router"


def chance(rng: random.Random) -> Iterator[str]:
    """Call any of six agents, with equal probability."""
    for _ in range(rng.randint(10, 40)):
        yield f"agent{rng.randrange(6)}"


def short(rng: random.Random) -> Iterator[str]:
    """One agent, four times at most, most often once or twice."""
    for _ in range(rng.choices([1, 2, 3, 4], [4, 3, 2, 1])[0]):
        yield "assistant"


def roles_again(rng: random.Random) -> Iterator[str]:
    """The roles of `roles` where the engineer works once and the manager looks at everything."""
    yield from ("architect", "product_manager", "engineer", "product_manager", "tester")
    if rng.random() < 0.5:
        yield "product_manager"


def strangers(rng: random.Random, number: int) -> Iterator[str]:
    """Agents whose names no other run has, some of which act once and some throughout."""
    weights = [rng.expovariate(1.0) for _ in range(rng.randint(2, 6))]
    names = [f"agent{number}-{i}" for i in range(len(weights))]
    yield from rng.choices(names, weights, k=rng.randint(2, 30))


RULES: dict[str, Callable[[random.Random], Iterator[str]]] = {
    f.__name__: f for f in (roles, tools, debate, router, chance, short)
}
MADE = (*RULES, "drift", "strangers")


def made(name: str, rng: random.Random) -> list[Run]:
    """Return made-up runs. In `drift` the rules change, and roles keep their names in another order."""
    if name == "strangers":
        return [timed(strangers(rng, number), rng) for number in range(NUM_RUNS)]
    if name == "drift":
        rules = [roles] * (NUM_RUNS // 2) + [roles_again] * (NUM_RUNS // 2)
    else:
        rules = [RULES[name]] * NUM_RUNS
    return [timed(rule(rng), rng) for rule in rules]


# -- accounts ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Promises:
    """The sessions that one of both expects, what became of its earlier promises, and the number of calls that were promised."""

    live: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    outcomes: list[tuple[float, bool]] = field(default_factory=list)
    num_foreseen: int = 0

    def make(self, session: tuple[str, str], probability: float, until_s: float, now: float) -> None:
        """Promise a call of this session, or renew a promise that is live."""
        said, lives_until_s = self.live.get(session, (probability, now))
        if lives_until_s < now:
            self.outcomes.append((said, False))
            said = probability
        self.live[session] = said, max(until_s, lives_until_s)

    def keep(self, session: tuple[str, str], now: float) -> bool:
        """Note a call that has come. Return whether it was promised."""
        said, until_s = self.live.pop(session, (0.0, -1.0))
        if until_s >= 0:
            self.outcomes.append((said, until_s >= now))
        return until_s >= now

    def end(self) -> None:
        """Count all live promises as broken."""
        self.outcomes += [(said, False) for said, _ in self.live.values()]
        self.live.clear()


@dataclass(slots=True)
class Tally:
    """Promises of ours and of the rule on one data set, and its calls that are not their run's first."""

    ours: Promises = field(default_factory=Promises)
    rule: Promises = field(default_factory=Promises)
    num_calls: int = 0

    def add(self, other: Tally) -> None:
        """Add another seed's tally."""
        for own, more in ((self.ours, other.ours), (self.rule, other.rule)):
            own.outcomes += more.outcomes
            own.num_foreseen += more.num_foreseen
        self.num_calls += other.num_calls

    def result(self) -> dict[str, float]:
        """Return the figures of the module's docstring."""
        found = {}
        for prefix, own in (("", self.ours), ("trivial_", self.rule)):
            num_kept = sum(has_come for _, has_come in own.outcomes)
            found[f"{prefix}precision"] = _share(num_kept, len(own.outcomes))
            found[f"{prefix}recall"] = _share(own.num_foreseen, self.num_calls)
        for name in ("precision", "recall"):
            found[f"{name}_vs_trivial"] = _share(found[name], found[f"trivial_{name}"])
        found["calibration_error"] = calibration_error(self.ours.outcomes)
        return {name: round(value, 4) for name, value in found.items()}


def _share(part: float, of: float) -> float:
    """Return a share; 1 of nothing, so that two predictors without promises, or without calls to promise, are as good."""
    return part / of if of else 1.0


def calibration_error(outcomes: Sequence[tuple[float, bool]]) -> float:
    """See the module's docstring. 0 where nothing was promised."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(NUM_BINS)]
    for said, has_come in outcomes:
        bins[min(int(said * NUM_BINS), NUM_BINS - 1)].append((said, has_come))
    off = sum(abs(sum(said - has_come for said, has_come in inside)) for inside in bins)
    return off / max(len(outcomes), 1)


# -- replay ------------------------------------------------------------------------------------------------------------


def events(runs: Sequence[Run], rng: random.Random, together: float) -> list[Event]:
    """Return arrivals and ends of all calls. Runs begin at random, so that about `together` are under way at a time."""
    mean_s = sum(run[-1].end_s for run in runs) / len(runs)
    now = 0.0
    found: list[Event] = []
    for number, run in enumerate(runs):
        now += rng.expovariate(1.0) * (mean_s + START_GAP_S) / together
        for call in run:
            arrival = AgentCall("owner", f"run{number}", call.agent, f"run{number}:{call.agent}")
            found += [(now + call.at_s, "note", arrival), (now + call.end_s, "ended", arrival)]
    return sorted(found, key=lambda event: event[0])


def replay(timeline: Sequence[Event]) -> Tally:
    """Return what ours and the rule promised, and what came true."""
    tally, followers = Tally(), Followers()
    begun: set[str] = set()
    for now, what, arrival in timeline:
        if what == "ended":
            followers.ended(arrival, now)
        else:
            session = arrival.workflow, arrival.agent
            for promises in (tally.ours, tally.rule):
                promises.num_foreseen += promises.keep(session, now)
            tally.num_calls += arrival.workflow in begun
            begun.add(arrival.workflow)
            followers.note(arrival, now)
            tally.rule.make(session, 1.0, now + MAX_GAP_S, now)
        # As `gateway.advisories.learned`: other agents as soon as a request comes, the agent itself when its answer is whole.
        for guess in followers.expected(arrival, now):
            if what == "ended" or guess.agent != arrival.agent:
                of_guess, until_s = (arrival.workflow, guess.agent), now + guess.lifetime_s
                tally.ours.make(of_guess, guess.probability, until_s, now)
    tally.ours.end()
    tally.rule.end()
    return tally


# -- the command -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    """One order of one data set: a file's runs in random order, or made-up ones."""

    data: str
    path: Path | None = None
    seed: int = 0


def serve(point: Point) -> Tally:
    """Replay one point."""
    rng = random.Random(f"{point.data} {point.seed}")
    if point.path is None:
        runs = made(point.data, rng)
    else:
        runs = read(point.path)
        rng.shuffle(runs)
    return replay(events(runs, rng, TOGETHER))


def followers_part(bench: Bench) -> None:
    """Find the figures of each data set over all seeds, and the worst of them."""
    paths = ([AGENT_RUNS] if AGENT_RUNS.exists() else []) + list(bench.files)
    points = [*(Point(path.stem, path) for path in paths), *map(Point, MADE)]
    bench.play(points)
    results = []
    for point in points:
        whole = Tally()
        for tally in bench.of(point):
            whole.add(tally)
        results.append({"data": point.data, **whole.result()})
    bench.note(("data",), results)
    for name, worst, aim in (
        ("precision_vs_trivial", min, 1.0),
        ("recall_vs_trivial", min, 1.0),
        ("calibration_error", max, None),
    ):
        bench.figure((name,), [worst(found[name] for found in results)], aim, aim is None, "number")


TABLE = Table(
    "emulated-followers",
    "Who comes next",
    serve,
    {"followers": followers_part},
    (1, 1),
    "two seeds",
    first_seed=101,
    files=("--csv", "recorded runs beside ours"),
)
