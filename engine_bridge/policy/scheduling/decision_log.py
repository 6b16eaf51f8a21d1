"""A policy's calls and decisions as lines of JSON, and the same calls made again on a new policy. Pure: bytes out, lines in.

A log begins with a policy's life, so it needs no snapshot: the first line names the policy, the others say what it was told and what it decided by
which facts. Facts are written when they first appear, later only their changes. A log with holes cannot be replayed: a recording that has stopped
never resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import NODEFAULT, Struct

from engine_bridge.policy.scheduling.lanes import Lanes
from engine_bridge.policy.scheduling.policies import POLICIES
from engine_bridge.policy.scheduling.queue_policy import (
    Decision,
    DeferReason,
    LanedPolicy,
    QueuePolicy,
    Running,
    StepRoom,
    Waiting,
    with_lanes,
)
from engine_bridge.policy.scheduling.quotas import Ledger

FORMAT: Literal["overture decisions"] = "overture decisions"
VERSION = 2
# A decision that starts no request, while nothing else happens, is written at most this often: it repeats the one before it in every step. Chosen.
REPEAT_EVERY_S = 1.0

Facts = TypeVar("Facts", bound=Waiting | Running)


class BadLog(ValueError):
    """The lines are no log, or a log that cannot be replayed. The message names the line."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
        self.line = line


# -- records -----------------------------------------------------------------------------------------------------------


class _Record(Struct, frozen=True, tag_field="do", omit_defaults=True, forbid_unknown_fields=True): ...


class _Begin(_Record, frozen=True, tag="begin", kw_only=True):
    """The first line. settings: of policies that have some."""

    format: Literal["overture decisions"]
    version: int
    policy: str
    num_tokens: int
    settings: dict[str, Any] | None = None


class _Arrived(_Record, frozen=True, tag="arrived"):
    """A request arrived. sizes: looked up for a refit under way."""

    now: float
    facts: dict[str, Any]
    sizes: dict[str, float] = {}


class _Admitted(_Record, frozen=True, tag="admitted"):
    now: float
    id: str


class _Outgrew(_Record, frozen=True, tag="outgrew"):
    id: str
    size_tokens: int


class _Squashed(_Record, frozen=True, tag="squashed"):
    id: str


class _Ended(_Record, frozen=True, tag="ended"):
    id: str


class _BeginRefit(_Record, frozen=True, tag="begin_refit"):
    centroids: tuple[float, ...]
    boundaries: tuple[float, ...]
    quotas: tuple[int, ...]


class _AdvanceRefit(_Record, frozen=True, tag="advance_refit"):
    max_requests: int
    sizes: dict[str, float] = {}


class _Running(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The changes from the running requests of the last record to those of this one, in their order: `gone` leave, `changed` change or follow."""

    gone: tuple[str, ...] = ()
    changed: dict[str, dict[str, Any]] = {}


class _Decided(_Record, frozen=True, tag="decided", kw_only=True):
    """A decision. waiting: the changes of the facts that were looked up. running: None where none were."""

    now: float
    room: StepRoom
    waiting: dict[str, dict[str, Any]] = {}
    running: _Running | None = None
    starts: tuple[str, ...] = ()
    deferred: dict[str, DeferReason] = {}
    bypassed: dict[str, str] = {}
    squash: tuple[str, ...] = ()
    otherwise: DeferReason = "behind_head"


_Call = _Arrived | _Admitted | _Outgrew | _Squashed | _Ended | _BeginRefit | _AdvanceRefit
_decode: Callable[[bytes], _Begin | _Call | _Decided] = msgspec.json.Decoder(_Begin | _Call | _Decided).decode


def _changes(facts: Waiting | Running, before: Waiting | Running | None = None) -> dict[str, Any]:
    """Return the fields that differ from the ones written before, or from their defaults."""
    if before is None:
        return {
            each.name: value
            for each in msgspec.structs.fields(facts)
            if (value := getattr(facts, each.name)) != each.default or each.default is NODEFAULT
        }
    names = facts.__struct_fields__
    return {name: value for name in names if (value := getattr(facts, name)) != getattr(before, name)}


def _changed(kind: type[Facts], changes: Mapping[str, Any], before: Facts | None = None) -> Facts:
    """Return the facts with these changes: the inverse of `_changes`. Raises msgspec.ValidationError."""
    known = {} if before is None else msgspec.structs.asdict(before)
    return msgspec.convert(known | dict(changes), kind)


# -- writing -----------------------------------------------------------------------------------------------------------


class _Seen(Mapping[str, Facts]):
    """Facts, with a record of which were looked up. Counting or iterating them looks up all."""

    def __init__(self, facts: Mapping[str, Facts]) -> None:
        self._facts = facts
        self.seen: dict[str, Facts] = {}
        self.is_seen = False

    def __getitem__(self, request_id: str) -> Facts:
        self.is_seen = True
        facts = self.seen.get(request_id)
        if facts is None:
            facts = self.seen[request_id] = self._facts[request_id]
        return facts

    def __iter__(self) -> Iterator[str]:
        self.is_seen = True
        for request_id in self._facts:
            self[request_id]
            yield request_id

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _SeenSizes(Mapping[str, float]):
    """Sizes for a refit, which looks them up one by one, also in later calls."""

    def __init__(self, sizes: Mapping[str, float]) -> None:
        self._sizes = sizes
        self._seen: dict[str, float] = {}

    def __getitem__(self, request_id: str) -> float:
        self._seen[request_id] = size = self._sizes[request_id]
        return size

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def take(self) -> dict[str, float]:
        """Return the sizes looked up since the last call."""
        seen, self._seen = self._seen, {}
        return seen


class Recorded:
    """A policy (`QueuePolicy`) that writes down its calls and its decisions.

    Args:
        policy: has been told nothing yet; afterwards it is told everything through this object.
        num_tokens: the number with which it was made.
        write: takes a line; returns False when no more lines are wanted. Must not block.
    """

    def __init__(self, policy: QueuePolicy, num_tokens: int, write: Callable[[bytes], bool]) -> None:
        self.policy = policy
        self.name, self.victim_order = policy.name, policy.victim_order
        self.charges_tokens, self.has_lanes = policy.charges_tokens, policy.has_lanes
        self.minds_priority, self.is_timeless = policy.minds_priority, policy.is_timeless
        self._write = write
        self._encode = msgspec.json.Encoder().encode
        self._is_on = True
        self._waiting: dict[str, Waiting] = {}  # as written last
        self._running: dict[str, Running] = {}
        self._sizes: _SeenSizes | None = None  # while lanes are being fitted anew
        self._repeated: tuple[Decision, float] | None = None  # unless another line was written after it
        settings = getattr(policy, "settings", None)
        self._put(
            _Begin(
                format=FORMAT,
                version=VERSION,
                policy=policy.name,
                num_tokens=num_tokens,
                settings=msgspec.to_builtins(settings) if settings is not None else None,
            )
        )

    @property
    def lanes(self) -> Lanes:
        """The policy's lanes."""
        return self._laned().lanes

    @property
    def ledger(self) -> Ledger:
        """The policy's ledger."""
        return self._laned().ledger

    def num_waiting(self) -> tuple[int, ...]:
        """Return the policy's number of waiting requests in each lane."""
        return self._laned().num_waiting()

    def lane_of(self, request_id: str) -> int | None:
        """Return the policy's lane of a request."""
        return self._laned().lane_of(request_id)

    def arrived(self, facts: Waiting, now: float) -> None:
        """Tell the policy of a request that arrived, and write it down."""
        self.policy.arrived(facts, now)
        if self._is_on:
            self._waiting[facts.request_id] = facts
            self._put(_Arrived(now, _changes(facts), self._take_sizes()))

    def admitted(self, request_id: str, now: float) -> None:
        """Tell the policy of a request that started, and write it down."""
        self.policy.admitted(request_id, now)
        self._put(_Admitted(now, request_id))

    def outgrew(self, request_id: str, size_tokens: int) -> None:
        """Tell the policy of a request that outgrew its prediction, and write it down."""
        self.policy.outgrew(request_id, size_tokens)
        self._put(_Outgrew(request_id, size_tokens))

    def squashed(self, request_id: str) -> None:
        """Tell the policy of a squashed request, and write it down."""
        self.policy.squashed(request_id)
        self._put(_Squashed(request_id))

    def ended(self, request_id: str) -> None:
        """Tell the policy of a request that ended, and write it down."""
        self.policy.ended(request_id)
        self._waiting.pop(request_id, None)
        self._put(_Ended(request_id))

    def begin_refit(
        self, lanes: Lanes, quotas: Sequence[int], weighted_sizes: Mapping[str, float] | None = None
    ) -> None:
        """Begin the policy's refit, and write it down. Raises TypeError for a policy without lanes."""
        sizes = _SeenSizes({} if weighted_sizes is None else weighted_sizes)
        self._laned().begin_refit(lanes, quotas, sizes)
        self._sizes = sizes
        self._put(_BeginRefit(lanes.centroids, lanes.boundaries, tuple(quotas)))

    def advance_refit(self, max_requests: int) -> bool:
        """Advance the policy's refit, and write it down. Raises TypeError for a policy without lanes."""
        is_done = self._laned().advance_refit(max_requests)
        if self._sizes is not None:
            self._put(_AdvanceRefit(max_requests, self._take_sizes()))
            self._sizes = None if is_done else self._sizes
        return is_done

    def _laned(self) -> LanedPolicy:
        """Return the policy as one with lanes. Raises TypeError for a policy without lanes."""
        return with_lanes(self.policy)

    def _take_sizes(self) -> dict[str, float]:
        return self._sizes.take() if self._sizes is not None else {}

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: StepRoom, now: float
    ) -> Decision:
        """Return the policy's decision, and write it down unless it repeats the last one."""
        if not self._is_on:
            return self.policy.decide(waiting, running, room, now)
        seen, seen_running = _Seen(waiting), _Seen(running)
        decision = self.policy.decide(seen, seen_running, room, now)
        if not self._is_repeat(decision, now):
            self._note(decision, seen.seen, seen_running.seen if seen_running.is_seen else None, room, now)
        return decision

    def _is_repeat(self, decision: Decision, now: float) -> bool:
        if self._repeated is None or decision.request_ids or decision.squash:
            return False
        before, at_s = self._repeated
        return decision == before and now - at_s < REPEAT_EVERY_S

    def _note(
        self,
        decision: Decision,
        waiting: dict[str, Waiting],
        running: dict[str, Running] | None,
        room: StepRoom,
        now: float,
    ) -> None:
        record = _Decided(
            now=now,
            room=room,
            waiting={i: _changes(facts, self._waiting.get(i)) for i, facts in waiting.items()},
            running=_difference(self._running, running) if running is not None else None,
            starts=decision.request_ids,
            deferred=dict(decision.deferred),
            bypassed=dict(decision.bypassed),
            squash=decision.squash,
            otherwise=decision.otherwise,
        )
        self._waiting |= waiting
        self._running = running if running is not None else self._running
        self._put(record)
        self._repeated = decision, now

    def _put(self, record: _Record) -> None:
        self._repeated = None
        if self._is_on and not self._write(self._encode(record) + b"\n"):
            self._is_on = False
            self._waiting, self._running = {}, {}


def _difference(before: Mapping[str, Running], after: Mapping[str, Running]) -> _Running:
    """Return the changes between two sets of running requests. Their order matters: policies break ties by it."""
    stay = [request_id for request_id in before if request_id in after]
    if stay != list(after)[: len(stay)]:
        stay = []
    kept = set(stay)
    changes = {i: _changes(facts, before[i] if i in kept else None) for i, facts in after.items()}
    return _Running(
        gone=tuple(request_id for request_id in before if request_id not in kept),
        changed={i: fields for i, fields in changes.items() if fields},
    )


# -- replaying ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision in which a replay differs.

    Attributes:
        replayed: None where the policy asked for facts that it had not asked for when it was recorded; `problem` says which.
    """

    line: int
    now: float
    recorded: Decision
    replayed: Decision | None
    problem: str = ""


@dataclass(slots=True)
class Replay:
    """The result of a replay. is_torn: whether the last line was incomplete, as after a crash, and was left out."""

    policy: str
    num_lines: int = 0
    num_decisions: int = 0
    num_different: int = 0
    first_difference: Difference | None = None
    is_torn: bool = False


def replay(lines: Iterable[bytes]) -> Replay:
    """Make the policy of a log anew, tell it the same, and compare its decisions.

    Args:
        lines: each with its newline; only the last may lack it, and may be torn.

    Raises:
        BadLog: the lines are no log, or do not follow from one another.
    """
    player: _Player | None = None
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            record = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if player is not None and not line.endswith(b"\n"):
                player.result.is_torn = True
                break
            raise BadLog(number, f"not a line of a decision log: {error}") from error
        if player is None:
            player = _begin(number, record)
        else:
            player.play(number, record)
        player.result.num_lines = number
    if player is None:
        raise BadLog(1, "the log is empty")
    return player.result


def _begin(number: int, record: _Begin | _Call | _Decided) -> _Player:
    if not isinstance(record, _Begin):
        raise BadLog(number, "the log does not begin with what was recorded")
    if record.version != VERSION:
        raise BadLog(number, f"version {record.version} of the format; this is for {VERSION}")
    make = POLICIES.get(record.policy)
    if make is None:
        raise BadLog(number, f"no policy is named {record.policy!r}")
    try:
        policy = make(record.num_tokens)
        if record.settings is not None:
            settings: Any = policy
            kind = type(settings.settings)
            policy = type(settings)(record.num_tokens, msgspec.convert(record.settings, kind))
    except (AttributeError, TypeError, ValueError) as error:
        raise BadLog(number, f"{record.policy} cannot be made: {error}") from error
    return _Player(policy, Replay(record.policy))


class _NotRecorded(LookupError):
    """A policy asks for facts that it did not ask for when it was recorded."""


class _Given(Mapping[str, Facts]):
    """The facts of a record; None: the policy looked up none."""

    def __init__(self, facts: Mapping[str, Facts] | None, what: str) -> None:
        self._facts, self._what = facts, what

    def __getitem__(self, request_id: str) -> Facts:
        facts = self._known().get(request_id)
        if facts is None:
            raise _NotRecorded(f"it asks for {request_id!r} among those {self._what}")
        return facts

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def _known(self) -> Mapping[str, Facts]:
        if self._facts is None:
            raise _NotRecorded(f"it asks for those {self._what}")
        return self._facts


@dataclass(slots=True)
class _Player:
    policy: QueuePolicy
    result: Replay
    _waiting: dict[str, Waiting] = field(default_factory=dict)
    _running: dict[str, Running] = field(default_factory=dict)
    _sizes: dict[str, float] = field(default_factory=dict)

    def play(self, number: int, record: _Begin | _Call | _Decided) -> None:
        """Tell the policy a record, or compare its decision with it. Raises BadLog."""
        try:
            if isinstance(record, _Decided):
                self._compare(number, record)
            elif isinstance(record, _Begin):
                raise BadLog(number, "the log begins a second time")
            else:
                self._tell(record)
        except BadLog:
            raise
        except (LookupError, TypeError, ValueError) as error:  # msgspec.ValidationError is a ValueError
            raise BadLog(number, f"it does not follow from the lines before it: {error!r}") from error

    def _tell(self, call: _Call) -> None:
        match call:
            case _Arrived():
                facts = _changed(Waiting, call.facts)
                self._waiting[facts.request_id] = facts
                self._sizes |= call.sizes
                self.policy.arrived(facts, call.now)
            case _Admitted():
                self.policy.admitted(call.id, call.now)
            case _Outgrew():
                self.policy.outgrew(call.id, call.size_tokens)
            case _Squashed():
                self.policy.squashed(call.id)
            case _Ended():
                self._waiting.pop(call.id, None)
                self.policy.ended(call.id)
            case _BeginRefit():
                self._sizes = {}
                lanes = Lanes(call.centroids, call.boundaries)
                with_lanes(self.policy).begin_refit(lanes, call.quotas, self._sizes)
            case _AdvanceRefit():
                self._sizes |= call.sizes
                with_lanes(self.policy).advance_refit(call.max_requests)

    def _compare(self, number: int, record: _Decided) -> None:
        recorded = Decision(record.starts, record.deferred, record.bypassed, record.squash, record.otherwise)
        waiting = {
            i: _changed(Waiting, changes, self._waiting.get(i)) for i, changes in record.waiting.items()
        }
        self._waiting |= waiting
        running = self._follow(record.running) if record.running is not None else None
        replayed, problem = None, ""
        try:
            replayed = self.policy.decide(
                _Given(waiting, "that wait"), _Given(running, "that run"), record.room, record.now
            )
        except _NotRecorded as error:
            problem = str(error)
        self.result.num_decisions += 1
        if replayed != recorded:
            self.result.num_different += 1
            difference = Difference(number, record.now, recorded, replayed, problem)
            self.result.first_difference = self.result.first_difference or difference

    def _follow(self, changes: _Running) -> dict[str, Running]:
        for request_id in changes.gone:
            del self._running[request_id]
        for request_id, fields in changes.changed.items():
            self._running[request_id] = _changed(Running, fields, self._running.get(request_id))
        return self._running
