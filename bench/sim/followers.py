"""Are learned advisories any good? Recorded chat and generated agents against the live learner, in virtual time.

    python -m bench.sim.followers [--trace PATH] [--runs N] [--repeats N] [--quick] [--seed N]

What runs: `gateway.policy.followers.Followers` itself. It sees each request when it comes (and, for agents, when it ends) and is asked at once what
follows. A guess is right if a request of its session comes within twice its `latest_s`, the lifetime that an advisory would have.

Chat: Mooncake's conversation trace (FAST'25, Apache-2.0) with sessions inferred as in `bench.sim.host_tier`; without it, that bench's generator. The
trace names no users and no ends: sessions are dealt at random to 50 owners, by `--seed`, and nothing sets one apart from another. Scored are requests
from 600 s on (before, few have had the time to follow) until `MAX_GAP_S` before the end (later, what follows is cut off). The base rate is the
precision of announcing every session's next turn.

Agents: synthetic, for no public trace names agents. A software team: product, architect, then engineer and writer at once, then tester, who sends two
of five drafts back to the engineer; else the reviewer, who is skipped in one run of five. Answers take 6 s, pauses 1 s (medians, log-normal, sigma
0.5). Runs start at random, five at a time on average. Three kinds of client: one that names the run, one whose session ids carry it, one that does
neither and keeps one session per agent for all runs, which is thus soon asked again by one run or another: more guesses are right than promised.
Half-way the team changes: the reviewer comes straight after the architect.

The last line is JSON. For each kind of traffic: `precision` of the guesses; `recall`, of requests that were not the first of their run (or session)
those that were guessed; `covered`, of right guesses those that came between `earliest_s` and `latest_s` (aim: 0.8); `lead_p50_s` between a right
guess and its request; `probability`, the mean of what was promised. For chat also `by_probability`: promised and measured shares.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.live.report import report, spread
from bench.sim.host_tier import TRACE, generate, read_trace, requests_of
from gateway.policy.followers import MAX_GAP_S, Arrival, Followers, Guess

WARM_UP_S = 600.0
NUM_OWNERS = 50
ANSWER_S, PAUSE_S, SIGMA = 6.0, 1.0, 0.5
CLIENTS = ("named runs", "session ids carry the run", "neither")
BUCKETS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 1.01)


@dataclass(frozen=True, slots=True)
class Event:
    """`is_first`: of its run or session, so that nothing could foresee it. `is_end`: of a request."""

    at_s: float
    arrival: Arrival
    is_first: bool = False
    is_end: bool = False


@dataclass(slots=True)
class Open:
    """A guess that waits for its request."""

    guess: Guess
    made_s: float

    def is_right(self, at_s: float) -> bool:
        return at_s - self.made_s <= 2 * self.guess.latest_s


@dataclass(slots=True)
class Score:
    guesses: list[tuple[float, bool]] = field(default_factory=list)  # promised probability, came true
    leads_s: list[float] = field(default_factory=list)
    num_covered: int = 0
    num_followers: int = 0
    num_foreseen: int = 0

    def close(self, opened: Open, at_s: float | None) -> None:
        """The next request of a guessed session came, or none ever did."""
        is_right = at_s is not None and opened.is_right(at_s)
        self.guesses.append((opened.guess.probability, is_right))
        if is_right and at_s is not None:
            lead_s = at_s - opened.made_s
            self.leads_s.append(lead_s)
            self.num_covered += opened.guess.earliest_s <= lead_s <= opened.guess.latest_s

    def result(self) -> dict[str, Any]:
        num_right = len(self.leads_s)
        return {
            "num_guesses": len(self.guesses),
            "precision": share(num_right, len(self.guesses)),
            "recall": share(self.num_foreseen, self.num_followers),
            "covered": share(self.num_covered, num_right),
            "lead_p50_s": round(statistics.median(self.leads_s), 2) if self.leads_s else None,
            "probability": round(statistics.fmean(promised for promised, _ in self.guesses), 3)
            if self.guesses
            else None,
        }

    def by_probability(self) -> list[dict[str, Any]]:
        rows = []
        for low, high in itertools.pairwise(BUCKETS):
            inside = [(promised, is_right) for promised, is_right in self.guesses if low <= promised < high]
            if inside:
                promised, right = (statistics.fmean(column) for column in zip(*inside, strict=True))
                rows.append(
                    {"num_guesses": len(inside), "promised": round(promised, 3), "measured": round(right, 3)}
                )
        return rows


def share(part: int, whole: int) -> float | None:
    return round(part / whole, 3) if whole else None


def evaluate(events: Sequence[Event], followers: Followers, scored_s: tuple[float, float]) -> Score:
    """Let the learner see all events in order; score the guesses it makes, and the requests that come, in a span of time."""
    score, opened = Score(), dict[str, Open]()
    for event in events:
        if event.is_end:
            followers.ended(event.arrival, event.at_s)
            continue
        followed = opened.pop(event.arrival.session_id, None)
        if followed is not None and is_within(followed.made_s, scored_s):
            score.close(followed, event.at_s)
        if not event.is_first and is_within(event.at_s, scored_s):
            score.num_followers += 1
            score.num_foreseen += followed is not None and followed.is_right(event.at_s)
        followers.note(event.arrival, event.at_s)
        for guess in followers.expected(event.arrival, event.at_s):
            opened.setdefault(guess.session_id, Open(guess, event.at_s))
    for left in opened.values():
        if is_within(left.made_s, scored_s):
            score.close(left, None)
    return score


def is_within(at_s: float, span_s: tuple[float, float]) -> bool:
    return span_s[0] <= at_s < span_s[1]


# -- chat --------------------------------------------------------------------------------------------------------------


def chat_events(trace: Path, rng: random.Random) -> list[Event]:
    requests = requests_of(read_trace(trace) if trace.exists() else generate(rng), rng)
    owners: dict[str, str] = {}
    events = []
    for request in requests:
        is_first = request.session not in owners
        owner = owners.setdefault(request.session, f"owner {rng.randrange(NUM_OWNERS)}")
        events.append(Event(request.at_s, Arrival(owner, "", "", request.session), is_first))
    return events


def chat(events: Sequence[Event], min_probability: float) -> dict[str, Any]:
    followers = Followers(max_sessions=len(events), min_probability=min_probability)
    score = evaluate(events, followers, (WARM_UP_S, events[-1].at_s - MAX_GAP_S))
    return score.result() | {"by_probability": score.by_probability()}


# -- agents ------------------------------------------------------------------------------------------------------------


def team(rng: random.Random, has_changed: bool) -> Iterator[list[str]]:
    """The agents of one run, in steps; those of a step start together."""
    yield ["product"]
    yield ["architect"]
    if has_changed:
        yield ["reviewer"]
    yield ["engineer", "writer"]
    yield ["tester"]
    while rng.random() < 0.4:
        yield ["engineer"]
        yield ["tester"]
    if not has_changed and rng.random() < 0.8:
        yield ["reviewer"]


def run_events(rng: random.Random, run: int, at_s: float, client: str, has_changed: bool) -> Iterator[Event]:
    is_first = True
    for step in team(rng, has_changed):
        ends_s = []
        for agent in step:
            session_id = agent if client == "neither" else f"run-{run}/{agent}"
            arrival = Arrival("owner", f"run-{run}" if client == "named runs" else "", agent, session_id)
            starts_s = at_s + rng.lognormvariate(0, SIGMA) * PAUSE_S
            ends_s.append(starts_s + rng.lognormvariate(0, SIGMA) * ANSWER_S)
            yield Event(starts_s, arrival, is_first)
            yield Event(ends_s[-1], arrival, is_end=True)
            is_first = False
        at_s = max(ends_s)


def agents(rng: random.Random, client: str, num_runs: int) -> dict[str, Any]:
    """Scored from the 20th run on."""
    run_s = 6 * (ANSWER_S + PAUSE_S)
    starts_s = list(itertools.accumulate(rng.expovariate(5 / run_s) for _ in range(num_runs)))
    changes_at = num_runs // 2
    runs = (run_events(rng, run, at_s, client, run >= changes_at) for run, at_s in enumerate(starts_s))
    events = sorted((event for run in runs for event in run), key=lambda event: event.at_s)
    return evaluate(events, Followers(), (starts_s[20], events[-1].at_s)).result()


# -- the report --------------------------------------------------------------------------------------------------------


def row_of(name: str, repeats: Sequence[dict[str, Any]]) -> tuple[str, str, str]:
    figures = [
        f"{key} {spread([run[key] for run in repeats])}"
        for key in ("precision", "recall", "covered", "lead_p50_s")
    ]
    return name, "; ".join(figures), ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--runs", type=int, default=400, help="of the team of agents")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rows, results = [], {}
    seeds = [args.seed + repeat for repeat in range(1 if args.quick else args.repeats)]
    recorded = [chat_events(args.trace, random.Random(seed)) for seed in seeds]
    everything = [chat(events, 0.0) for events in recorded]
    base_rate = statistics.fmean(run["precision"] for run in everything)
    for min_probability in (0.0, 0.3, 0.4, 0.5):
        name = f"chat, from {min_probability:.1f}"
        results[name] = (
            everything if not min_probability else [chat(events, min_probability) for events in recorded]
        )
        rows.append(row_of(name, results[name]))
    for client in CLIENTS:
        name = f"agents, {client}"
        results[name] = [agents(random.Random(seed), client, args.runs) for seed in seeds]
        rows.append(row_of(name, results[name]))
    result = {
        "bench": "followers",
        "trace": args.trace.name if args.trace.exists() else "generated",
        "seeds": seeds,
        "base_rate": round(base_rate, 3),
        "runs": results,
    }
    report("Learned advisories, replayed in virtual time", rows, result)


if __name__ == "__main__":
    main()
