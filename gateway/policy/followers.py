"""Who follows whom, and after how long: advisories for agents that send none.

For each owner a Markov chain over agents is learned from the requests alone, with the times that pass between one request and the next. A state
is an agent and how many requests of it the run has seen, so that in planner, coder, planner, tester the planner's two followers are told apart;
with too little evidence for that, the agent alone is the state.

What a run is: the client's `workflow`; without one, what is left of a session id such as `run7:coder` without the agent's name; else, everything of
this owner, where concurrent runs mix and followers are less sure. Chat, without workflow and agent: the session is the run, and its owner's
sessions together teach how likely and how soon a next turn comes.

Which requests does a new one follow? Of its run, the one that ended last, and those that ended before with nothing after them: what still runs
cannot have caused it. So two agents that start together both follow the one before them, and one that waits for both follows both. Where no end is
known, the one that arrived last. A request may have several followers, each agent counted once.

Source: SYMPHONY §4.1 profiles agents' run times beforehand and lets the client announce; here both are learned. Departs in giving a
probability, which the sender weighs against what moving the bytes in vain would cost (`worth`, `WasteBudget`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

MAX_GAP_S = 1800.0
"""A request more than this after another does not follow it. Chosen: 99% of the next turns in Mooncake's trace come within 1,470 s."""
HALF_LIFE_VISITS = 20.0
"""After this many requests of an agent, what an earlier one taught counts half. Measured (400 runs of agents whose graph changes
half-way): recall is 0.959, 0.966, 0.963, 0.954 for 10, 20, 40, 80; what is promised of chats is 0.059, 0.059, 0.066, 0.070 off on average."""
PRIOR = 0.2
PRIOR_WEIGHT = 2.0
"""What is assumed of any follower, and the requests it counts for. Chosen: three runs that agree give 0.67, ten 0.85, a hundred 0.95."""
MIN_COUNT = 3
"""Gaps seen before a follower is believed in at all. Chosen: fewer give no quantiles worth the name."""
MIN_VISITS = 8
"""Requests before the count within the run tells states of an agent apart. Chosen: below it, splitting the evidence costs more than it tells."""
MAX_VISITS_APART = 4
"""From here on all requests of an agent in a run count as one state. Chosen: in Mooncake's trace, u turns make another likely by u / (u + 3)."""
MAX_FOLLOWERS = 8
"""Followers that a state remembers. Chosen: a ninth is too unlikely to be worth an advisory."""
MAX_GAPS = 32
"""Latest gaps that quantiles are taken from. Chosen: three lie beyond each decile."""
QUANTILES = (0.1, 0.9)

_DECAY: float = 0.5 ** (1 / HALF_LIFE_VISITS)

RunKey = tuple[str, str, str]
"""The workflow, and what stands before and after the agent's name in its session ids."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, as far as the chain goes.

    `workflow`: one run of a graph of agents, where the client names it, else "". `agent`: its name, else "". `adapter`: the LoRA adapter or None.
    """

    owner: str
    workflow: str
    agent: str
    session_id: str
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Guess:
    """A request that is likely to come.

    `probability`: that it comes within `MAX_GAP_S` of the one it follows. `earliest_s`, `latest_s`: from now; if it comes, then in four of five
    cases between them.
    """

    agent: str
    session_id: str
    adapter: str | None
    probability: float
    earliest_s: float
    latest_s: float


# -- what is remembered ------------------------------------------------------------------------------------------------


def _gaps() -> deque[float]:
    return deque(maxlen=MAX_GAPS)


@dataclass(slots=True)
class _Follower:
    """`weight`: requests that it followed, faded as of the state's visit `at_visit`. Gaps, by what they are counted from."""

    weight: float = 0.0
    at_visit: int = 0
    is_named_alike: bool = False
    """Its last session id was the other's, with its own name in place of the other's."""
    since_arrival_s: deque[float] = field(default_factory=_gaps)
    since_end_s: deque[float] = field(default_factory=_gaps)

    def weight_at(self, visit: int) -> float:
        return self.weight * _DECAY ** (visit - self.at_visit)


@dataclass(slots=True)
class _State:
    """`weight`: its requests, faded."""

    num_visits: int = 0
    weight: float = 0.0
    followers: dict[str, _Follower] = field(default_factory=dict)

    def visit(self) -> int:
        """Count a request. Returns its number."""
        self.num_visits += 1
        self.weight = self.weight * _DECAY + 1.0
        return self.num_visits

    def follow(self, agent: str) -> _Follower:
        """Count a follower. The least likely one makes room for a new one."""
        if agent not in self.followers and len(self.followers) >= MAX_FOLLOWERS:
            del self.followers[
                min(self.followers, key=lambda name: self.followers[name].weight_at(self.num_visits))
            ]
        follower = self.followers.setdefault(agent, _Follower())
        follower.weight = follower.weight_at(self.num_visits) + 1.0
        follower.at_visit = self.num_visits
        return follower

    def probability(self, follower: _Follower, visit: int) -> float:
        """That it follows request number `visit`, which nothing is known of yet: it is left out of the count."""
        weight = self.weight - _DECAY ** (self.num_visits - visit)
        share = (follower.weight_at(self.num_visits) + PRIOR * PRIOR_WEIGHT) / (
            max(weight, 0.0) + PRIOR_WEIGHT
        )
        return min(share, 1.0)  # followers count when they come, so many at once may outweigh later requests


@dataclass(slots=True)
class _Visit:
    """An agent's latest request in a run. `states`: this agent's, with the number of this request in each; the last one is the agent alone."""

    arrival: Arrival
    arrived_s: float
    number: int
    states: Sequence[tuple[_State, int]]
    ended_s: float | None = None
    followed_by: set[str] = field(default_factory=set)

    @property
    def last_s(self) -> float:
        return self.arrived_s if self.ended_s is None else self.ended_s

    def state(self) -> tuple[_State, int]:
        """The most precise state that has seen enough."""
        return next(
            ((state, visit) for state, visit in self.states if state.num_visits > MIN_VISITS), self.states[-1]
        )


@dataclass(slots=True)
class _Run:
    """The agents of a run, by their latest request; the one that asked last is last."""

    last_s: float
    visits: OrderedDict[str, _Visit] = field(default_factory=OrderedDict)

    def causes(self, now: float) -> list[_Visit]:
        """The requests that a new one follows."""
        recent = [visit for visit in self.visits.values() if now - visit.last_s <= MAX_GAP_S]
        ended = [visit for visit in recent if visit.ended_s is not None]
        latest = max(ended or recent, key=lambda visit: visit.last_s, default=None)
        return [
            visit
            for visit in recent
            if visit is latest or (visit.ended_s is not None and not visit.followed_by)
        ]


@dataclass(slots=True)
class _Agent:
    """`states[0]` is the agent alone, the others by its requests in the run. `keeps_session`: the last run did not give it a new session."""

    session_id: str | None = None
    adapter: str | None = None
    keeps_session: bool = False
    states: dict[int, _State] = field(default_factory=dict)

    def visit(self, number: int) -> list[tuple[_State, int]]:
        states = [self.states.setdefault(key, _State()) for key in (min(number, MAX_VISITS_APART), 0)]
        return [(state, state.visit()) for state in states]


@dataclass(slots=True)
class _Owner:
    """Both in order of use, the latest last. `num_sessions` counts the visits of all runs."""

    agents: OrderedDict[str, _Agent] = field(default_factory=OrderedDict)
    runs: OrderedDict[RunKey, _Run] = field(default_factory=OrderedDict)
    num_sessions: int = 0

    def run(self, key: RunKey, now: float) -> _Run:
        """The run, a new one where it is unknown or has been silent for too long for anything to follow."""
        run = self.runs.get(key)
        if run is not None and now - run.last_s > MAX_GAP_S:
            self.num_sessions -= len(run.visits)
            run = None
        if run is None:
            run = self.runs[key] = _Run(now)
        self.runs.move_to_end(key)
        run.last_s = max(run.last_s, now)
        return run

    def agent(self, name: str) -> _Agent:
        agent = self.agents.setdefault(name, _Agent())
        self.agents.move_to_end(name)
        return agent

    def visit(self, run: _Run, arrival: Arrival, now: float) -> None:
        """Put a request in its run, in place of the agent's former one, and count it."""
        former = run.visits.get(arrival.agent)
        agent = self.agent(arrival.agent)
        if former is None:
            self.num_sessions += 1
            agent.keeps_session = agent.session_id == arrival.session_id
        agent.session_id, agent.adapter = arrival.session_id, arrival.adapter
        number = 1 if former is None else former.number + 1
        run.visits[arrival.agent] = _Visit(arrival, now, number, agent.visit(number))
        run.visits.move_to_end(arrival.agent)

    def shrink(self, max_agents: int, max_sessions: int) -> None:
        """Forget what was used least recently."""
        while len(self.agents) > max_agents:
            self.agents.popitem(last=False)
        while self.num_sessions > max_sessions:
            key, run = next(iter(self.runs.items()))
            run.visits.popitem(last=False)
            self.num_sessions -= 1
            if not run.visits:
                del self.runs[key]


# -- the learner -------------------------------------------------------------------------------------------------------


class Followers:
    """Learns from arrivals and ends of requests; says what follows one. Owners never see anything of each other.

    Args:
        max_owners: beyond it, the owner that was silent for longest is forgotten.
        max_agents, max_sessions: of each owner; beyond them its own oldest are forgotten. A session is an agent's latest in a run.
        max_guesses: that `expected` returns; min_probability: of each.
    Raises ValueError where a bound is below 1.
    """

    def __init__(
        self,
        *,
        max_owners: int = 256,
        max_agents: int = 64,
        max_sessions: int = 512,
        max_guesses: int = 3,
        min_probability: float = 0.3,
    ) -> None:
        if min(max_owners, max_agents, max_sessions, max_guesses) < 1:
            raise ValueError("bounds must be at least 1")
        self._max_owners = max_owners
        self._max_agents = max_agents
        self._max_sessions = max_sessions
        self._max_guesses = max_guesses
        self._min_probability = min_probability
        self._owners: OrderedDict[str, _Owner] = OrderedDict()

    @property
    def num_owners(self) -> int:
        """Owners whose workflows are remembered."""
        return len(self._owners)

    def num_agents(self, owner: str) -> int:
        """Agents of an owner that are remembered."""
        known = self._owners.get(owner)
        return 0 if known is None else len(known.agents)

    def num_sessions(self, owner: str) -> int:
        """Sessions of an owner that are remembered."""
        known = self._owners.get(owner)
        return 0 if known is None else known.num_sessions

    def note(self, arrival: Arrival, now: float) -> None:
        """A request has come. `expected` then says what follows it."""
        owner = self._owners.setdefault(arrival.owner, _Owner())
        self._owners.move_to_end(arrival.owner)
        if len(self._owners) > self._max_owners:
            self._owners.popitem(last=False)
        run = owner.run(_run_key(arrival), now)
        for cause in run.causes(now):
            _learn(cause, arrival, now)
        owner.visit(run, arrival, now)
        owner.shrink(self._max_agents, self._max_sessions)

    def ended(self, arrival: Arrival, now: float) -> None:
        """A request that was noted has finished. Optional; with it, gaps do not vary with the time that answers take.

        Of several requests that an agent has running in one run, only the latest one's end counts.
        """
        found = self._find(arrival)
        if found is None:
            return
        run, visit = found
        if visit.ended_s is None and visit.arrival.session_id == arrival.session_id:
            visit.ended_s = max(now, visit.arrived_s)
            run.last_s = max(run.last_s, now)

    def expected(self, arrival: Arrival, now: float) -> list[Guess]:
        """What is likely to follow a request that was noted, the likeliest first.

        Ask when it has come, or for better times when it has ended. Left out: what has followed already, and what is overdue.
        """
        found = self._find(arrival)
        if found is None:
            return []
        run, visit = found
        guesses = [
            guess
            for guess in self._guesses(self._owners[arrival.owner], run, visit, now)
            if guess.probability >= self._min_probability
        ]
        guesses.sort(key=lambda guess: (-guess.probability, guess.agent))
        return guesses[: self._max_guesses]

    def forget(self, owner: str) -> None:
        """Drop what is known of an owner."""
        self._owners.pop(owner, None)

    def _find(self, arrival: Arrival) -> tuple[_Run, _Visit] | None:
        owner = self._owners.get(arrival.owner)
        run = None if owner is None else owner.runs.get(_run_key(arrival))
        visit = None if run is None else run.visits.get(arrival.agent)
        return None if run is None or visit is None else (run, visit)

    def _guesses(self, owner: _Owner, run: _Run, visit: _Visit, now: float) -> Iterator[Guess]:
        state, number = visit.state()
        for agent, follower in state.followers.items():
            window = _window(visit, follower, now)
            session = _session(owner, run, visit.arrival, agent, follower)
            if agent in visit.followed_by or window is None or session is None:
                continue
            yield Guess(agent, *session, state.probability(follower, number), *window)


def _run_key(arrival: Arrival) -> RunKey:
    """See the module's docstring."""
    if arrival.workflow:
        return arrival.workflow, "", ""
    if not arrival.agent:
        return "", arrival.session_id, ""
    return "", *(_around(arrival.session_id, arrival.agent) or ("", ""))


def _around(session_id: str, agent: str) -> tuple[str, str] | None:
    """What stands before and after the agent's name in a session id, where it stands there as a word of its own."""
    start = session_id.find(agent) if agent else -1
    while start >= 0:
        end = start + len(agent)
        # `a` is no name in `7fa3`.
        if not session_id[:start][-1:].isalnum() and not session_id[end : end + 1].isalnum():
            return session_id[:start], session_id[end:]
        start = session_id.find(agent, start + 1)
    return None


def _renamed(arrival: Arrival, agent: str) -> str | None:
    """The arrival's session id with another agent's name in place of its own."""
    around = _around(arrival.session_id, arrival.agent)
    return None if around is None else agent.join(around)


def _learn(cause: _Visit, arrival: Arrival, now: float) -> None:
    """This request follows that one. Only the first of each agent counts, and only so many agents."""
    if arrival.agent in cause.followed_by or len(cause.followed_by) >= MAX_FOLLOWERS:
        return
    cause.followed_by.add(arrival.agent)
    for state, _ in cause.states:
        follower = state.follow(arrival.agent)
        follower.is_named_alike = _renamed(cause.arrival, arrival.agent) == arrival.session_id
        follower.since_arrival_s.append(max(now - cause.arrived_s, 0.0))
        if cause.ended_s is not None:
            follower.since_end_s.append(max(now - cause.ended_s, 0.0))


def _session(
    owner: _Owner, run: _Run, arrival: Arrival, agent: str, follower: _Follower
) -> tuple[str, str | None] | None:
    """The session and adapter that an agent is likely to use: what it used in this run, else what names or its last runs suggest."""
    visit = run.visits.get(agent)
    if visit is not None:
        return visit.arrival.session_id, visit.arrival.adapter
    known = owner.agents.get(agent)
    if known is None:
        return None
    renamed = _renamed(arrival, agent) if follower.is_named_alike else None
    if renamed is not None:
        return renamed, known.adapter
    if known.keeps_session and known.session_id is not None:
        return known.session_id, known.adapter
    return None


def _window(visit: _Visit, follower: _Follower, now: float) -> tuple[float, float] | None:
    """When it comes, from now: quantiles of the gap. None with too few gaps to tell, or when it should have come already."""
    start_s, gaps = visit.arrived_s, follower.since_arrival_s
    if visit.ended_s is not None and len(follower.since_end_s) >= MIN_COUNT:
        start_s, gaps = visit.ended_s, follower.since_end_s
    if len(gaps) < MIN_COUNT:
        return None
    ordered = sorted(gaps)
    earliest_s, latest_s = (start_s + _quantile(ordered, share) - now for share in QUANTILES)
    return None if latest_s < 0 else (max(earliest_s, 0.0), latest_s)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """What that share of later values lies below, on the line between two of these; the least or the greatest where they are too few."""
    place = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


# -- whether to act on a guess -----------------------------------------------------------------------------------------


def worth(probability: float, saved_s: float, cost_s: float) -> bool:
    """Whether to prepare for a request that comes with this probability: the expected gain is positive.

    Args:
        saved_s: how much sooner the request's first token comes when its KV is there.
        cost_s: what others wait when nobody comes: the time that the bytes keep a link busy, and reading back what they pushed out.
    """
    return probability * saved_s > (1 - probability) * cost_s


Outcome = Literal["used", "wasted", "not_moved"]


class WasteBudget:
    """Bounds the bytes that learned advisories move for nothing: a bucket that useful bytes and time refill.

    At any time, bytes wasted and bytes still out are at most `allowance_bytes`, plus `share` of the bytes that were used, plus
    `allowance_bytes` for each `refill_s`. A larger advisory than the allowance is never let through.

    Args:
        share: of each useful byte, how much may be wasted later. Chosen: with 0.25, four of five bytes are useful in the long run.
        allowance_bytes: that may be out or lost before anything was useful; the bucket holds no more.
        refill_s: in which an empty bucket fills by itself, so that an owner whose guesses failed gets another chance.
    Raises ValueError where an argument is negative or refill_s is 0.
    """

    def __init__(self, share: float = 0.25, allowance_bytes: float = 1e9, refill_s: float = 3600.0) -> None:
        if share < 0 or allowance_bytes < 0 or refill_s <= 0:
            raise ValueError("share and allowance_bytes must not be negative, refill_s must be positive")
        self._share = share
        self._allowance_bytes = allowance_bytes
        self._refill_bytes_per_s = allowance_bytes / refill_s
        self._level_bytes = allowance_bytes
        self._updated_s: float | None = None
        self._out_bytes = 0.0

    @property
    def out_bytes(self) -> float:
        """Started, outcome unknown."""
        return self._out_bytes

    def allows(self, num_bytes: float, now: float) -> bool:
        """Whether an advisory that moves this many bytes may start. Nothing is taken: `start` does."""
        self._refill(now)
        return num_bytes <= self._level_bytes

    def start(self, num_bytes: float, now: float) -> bool:
        """Take an advisory's bytes, no fewer than it may move. False where they are not allowed: then nothing is taken.

        The caller must `note` what became of all of them.
        """
        if not self.allows(num_bytes, now):
            return False
        self._level_bytes -= max(num_bytes, 0.0)
        self._out_bytes += max(num_bytes, 0.0)
        return True

    def note(self, outcome: Outcome, num_bytes: float, now: float) -> None:
        """What became of bytes that were started, of an advisory's parts one by one; more than are out count for nothing."""
        self._refill(now)
        num_bytes = min(max(num_bytes, 0.0), self._out_bytes)
        self._out_bytes -= num_bytes
        if outcome == "wasted":
            return
        # More than the bucket holds runs over in `_refill`, before anybody looks.
        self._level_bytes += num_bytes * (1 + self._share) if outcome == "used" else num_bytes

    def _refill(self, now: float) -> None:
        """Let time fill the bucket. A clock that goes back does nothing."""
        passed_s = 0.0 if self._updated_s is None else max(now - self._updated_s, 0.0)
        self._updated_s = now if self._updated_s is None else max(now, self._updated_s)
        refilled = self._level_bytes + passed_s * self._refill_bytes_per_s
        self._level_bytes = min(refilled, self._allowance_bytes)
