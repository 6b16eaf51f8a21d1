"""Who comes next in a run of agents: the gateway's learned advisories against the rule "this agent again", in virtual time.

    python -m bench.sim.followers [--csv PATH]... [--data NAME]... [--seeds N] [--first-seed N] [--json]

Each call is foreseen, then learned from: nothing is known before the first one, so every call is judged before it was seen. Runs of one owner
overlap (`--together` at a time) and come in an order that each seed shuffles, except where the order is the point (`drift`). A promise is for one
agent's session in one run, and lives as long as the gateway would keep the advisory. Of a session that is expected already a second promise says
nothing more: it renews the first one and is not counted. The rule promises at each call that this agent comes again, for as long as a run may be
silent at all (half an hour).

  precision            of the promises made, how many were followed by a call of that session while they lived
  recall               of the calls that are not their run's first, how many were promised when they came
  calibration_error    promises in ten bins by their probability: the difference of probability and share come true, weighted by promises
  first_call_recall    of the calls that are an agent's first in its run (which the rule cannot foresee), how many were promised

`precision_vs_trivial` and `recall_vs_trivial` divide by the rule's on the same calls, both at the one setting that the gateway runs with. Those at
the front of the JSON are the worst over all data sets, seeds put together; `worst_seed` has the least of any single seed.

Data: `agent_runs` from the folder of recorded traffic where it is there, files of `--csv` (columns run, at_s, agent), and `bench.sim.agent_runs`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.data import FOLDER
from bench.live.report import machine, report
from bench.sim.agent_runs import MADE, Run, read
from gateway.advisories.followers import MAX_GAP_S, AgentCall, Followers

AGENT_RUNS = FOLDER / "agent_runs/taubench.csv"
NUM_BINS = 10
START_GAP_S = 5.0
Event = tuple[float, int, str, AgentCall]  # when, its number, what, whose


@dataclass(slots=True)
class Promises:
    """The sessions that are expected, and what became of earlier promises."""

    live: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    outcomes: list[tuple[float, bool]] = field(default_factory=list)

    def make(self, session: tuple[str, str], probability: float, until_s: float, now: float) -> None:
        """Promise, or renew what is live."""
        said, lives_until_s = self.live.get(session, (probability, now))
        if lives_until_s < now:
            self.outcomes.append((said, False))
            said = probability
        self.live[session] = said, max(until_s, lives_until_s)

    def keep(self, session: tuple[str, str], now: float) -> bool:
        """A call has come. Whether it was promised."""
        said, until_s = self.live.pop(session, (0.0, -1.0))
        if until_s >= 0:
            self.outcomes.append((said, until_s >= now))
        return until_s >= now

    def end(self) -> None:
        self.outcomes += [(said, False) for said, _ in self.live.values()]
        self.live.clear()

    def num_kept(self) -> int:
        return sum(has_come for _, has_come in self.outcomes)


@dataclass(slots=True)
class Tally:
    """Of one data set, all seeds in it."""

    ours: Promises = field(default_factory=Promises)
    trivial: Promises = field(default_factory=Promises)
    num_calls: int = 0
    num_foreseen: int = 0
    num_foreseen_by_rule: int = 0
    num_first: int = 0
    num_first_foreseen: int = 0

    def result(self) -> dict[str, Any]:
        precision, rule_precision = (_share(p.num_kept(), len(p.outcomes)) for p in (self.ours, self.trivial))
        recall = _share(self.num_foreseen, self.num_calls)
        rule_recall = _share(self.num_foreseen_by_rule, self.num_calls)
        return {
            "num_calls": self.num_calls,
            "num_promises": len(self.ours.outcomes),
            "precision": round(precision, 4),
            "recall": round(recall, 4),
            "trivial_precision": round(rule_precision, 4),
            "trivial_recall": round(rule_recall, 4),
            "precision_vs_trivial": round(_share(precision, rule_precision), 4),
            "recall_vs_trivial": round(_share(recall, rule_recall), 4),
            "calibration_error": round(calibration_error(self.ours.outcomes), 4),
            "mean_probability": round(
                _share(sum(said for said, _ in self.ours.outcomes), len(self.ours.outcomes)), 4
            ),
            "first_call_recall": round(_share(self.num_first_foreseen, self.num_first), 4),
        }

    def add(self, other: Tally) -> None:
        self.ours.outcomes += other.ours.outcomes
        self.trivial.outcomes += other.trivial.outcomes
        self.num_calls += other.num_calls
        self.num_foreseen += other.num_foreseen
        self.num_foreseen_by_rule += other.num_foreseen_by_rule
        self.num_first += other.num_first
        self.num_first_foreseen += other.num_first_foreseen


def _share(part: float, of: float) -> float:
    """Where neither made a promise, or none could be kept, both are as good."""
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
    """Arrivals and ends of all calls. Runs begin at random, so that about so many are under way at a time."""
    mean_s = sum(run[-1].end_s for run in runs) / len(runs)
    now, found = 0.0, []
    for number, run in enumerate(runs):
        now += rng.expovariate(1.0) * (mean_s + START_GAP_S) / together
        for call in run:
            arrival = AgentCall("owner", f"run{number}", call.agent, f"run{number}:{call.agent}")
            found += [(now + call.at_s, "note", arrival), (now + call.end_s, "ended", arrival)]
    found.sort(key=lambda event: event[0])
    return [(at_s, number, what, arrival) for number, (at_s, what, arrival) in enumerate(found)]


def replay(timeline: Sequence[Event]) -> Tally:
    """What both promised, and what came of it."""
    tally, followers = Tally(), Followers()
    begun: set[str] = set()
    met: set[tuple[str, str]] = set()
    for now, _, what, arrival in timeline:
        if what == "ended":
            followers.ended(arrival, now)
            promise(tally.ours, followers, arrival, now, is_over=True)
            continue
        session = arrival.workflow, arrival.agent
        was_promised, was_by_rule = tally.ours.keep(session, now), tally.trivial.keep(session, now)
        if arrival.workflow in begun:
            tally.num_calls += 1
            tally.num_foreseen += was_promised
            tally.num_foreseen_by_rule += was_by_rule
            tally.num_first += session not in met
            tally.num_first_foreseen += session not in met and was_promised
        begun.add(arrival.workflow)
        met.add(session)
        followers.note(arrival, now)
        tally.trivial.make(session, 1.0, now + MAX_GAP_S, now)
        promise(tally.ours, followers, arrival, now, is_over=False)
    tally.ours.end()
    tally.trivial.end()
    return tally


def promise(
    promises: Promises, followers: Followers, arrival: AgentCall, now: float, *, is_over: bool
) -> None:
    """As `gateway.advisories.learned` does: others as soon as a request comes, the agent itself when its answer is whole."""
    for guess in followers.expected(arrival, now):
        if is_over or guess.agent != arrival.agent:
            promises.make((arrival.workflow, guess.agent), guess.probability, now + guess.lifetime_s, now)


def measure(name: str, make: Any, args: argparse.Namespace) -> dict[str, Any]:
    """One data set's figures over all seeds, and the least of a single seed."""
    whole, single = Tally(), []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        rng = random.Random(f"{name} {seed}")
        tally = replay(events(make(rng), rng, args.together))
        single.append(tally.result())
        whole.add(tally)
    least = {
        key: min(result[key] for result in single) for key in ("precision_vs_trivial", "recall_vs_trivial")
    }
    most = max(result["calibration_error"] for result in single)
    return {"data": name, **whole.result(), "worst_seed": least | {"calibration_error": most}}


def shuffled(path: Path, rng: random.Random) -> list[Run]:
    runs = read(path)
    rng.shuffle(runs)
    return runs


def data_sets(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    recorded = [AGENT_RUNS] * AGENT_RUNS.exists() + args.csv
    made = {
        ("agent_runs" if path == AGENT_RUNS else path.stem): partial(shuffled, path) for path in recorded
    } | MADE
    for name, make in made.items():
        if not args.data or name in args.data:
            yield name, make


def row_of(result: dict[str, Any]) -> tuple[str, str, str]:
    return (
        result["data"],
        f"precision {result['precision']:.3f} ({result['trivial_precision']:.3f})  recall {result['recall']:.3f} "
        f"({result['trivial_recall']:.3f})  said {result['mean_probability']:.2f}  off {result['calibration_error']:.3f}",
        f"{result['precision_vs_trivial']:.3f}, {result['recall_vs_trivial']:.3f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path, action="append", default=[], help="recorded runs beside ours")
    parser.add_argument("--data", action="append", help="only this data set")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--first-seed", type=int, default=101, help="the learner's constants were chosen on seeds 1 to 5"
    )
    parser.add_argument("--together", type=float, default=3.0, help="runs under way at a time, on average")
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    args = parser.parse_args()
    results = [measure(name, make, args) for name, make in data_sets(args)]
    if not results:
        parser.error("no such data set")
    result = {
        "bench": "followers",
        "precision_vs_trivial": min(result["precision_vs_trivial"] for result in results),
        "recall_vs_trivial": min(result["recall_vs_trivial"] for result in results),
        "calibration_error": max(result["calibration_error"] for result in results),
        "seeds": [args.first_seed, args.first_seed + args.seeds - 1],
        "together": args.together,
        "data": results,
    }
    if args.json:
        print(json.dumps(result | {"machine": machine()}))
    else:
        head = ("data", 'ours ("this agent again")', "precision and recall against the rule's, aim 1.0 each")
        report("Who comes next, replayed in virtual time", [head, *map(row_of, results)], result)


if __name__ == "__main__":
    main()
