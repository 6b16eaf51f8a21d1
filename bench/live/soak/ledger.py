"""What clients were told, and whether it was true. Pure: facts in, verdicts out."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# What may be answered while something is broken on purpose, and for how long after it was mended. The socket says the same codes.
DISTURBANCES: Mapping[str, frozenset[str]] = {
    "engine": frozenset({"engine_failed", "starting"}),
    "server": frozenset({"engine_failed", "starting", "draining"}),
    "disk": frozenset({"overloaded"}),
}
AFTERMATH_S = 15.0
"""Chosen: an error may have been on its way when the fault was mended, or waits in a turn for a client that was cut off and comes back."""

Expectation = Literal["whole", "beginning"]


@dataclass
class Acknowledged:
    """A turn that the server has said it keeps. answer: None until its `done` was read."""

    turn_id: str
    content: str
    answer: str | None = None
    is_doubtful: bool = False
    """An edit that may have replaced it was sent, and what came of that was never heard."""


@dataclass
class Ledger:
    """All promises of one run.

    Attributes:
        sessions: by (key, session id): its acknowledged turns in order.
        wrong: answers that differ from their reference; lost: acknowledged turns that are gone or changed. Each as a line for people.
        unexpected: 5xx statuses and socket errors that no disturbance explains. apart: what was expected, by code.
    """

    sessions: dict[tuple[str, str], list[Acknowledged]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    unexpected: list[str] = field(default_factory=list)
    apart: Counter[str] = field(default_factory=Counter)
    num_turns: int = 0
    num_answers_checked: int = 0
    disturbed_until_s: dict[str, float] = field(default_factory=dict)

    # -- what is broken on purpose -----------------------------------------------------------------------------------

    def disturb(self, kind: str) -> None:
        self.disturbed_until_s[kind] = float("inf")

    def mend(self, kind: str, now_s: float) -> None:
        self.disturbed_until_s[kind] = now_s + AFTERMATH_S

    def is_expected(self, code: str, now_s: float) -> bool:
        return any(
            code in DISTURBANCES[kind] and now_s <= until_s
            for kind, until_s in self.disturbed_until_s.items()
        )

    def note_error(self, what: str, status: int, code: str, now_s: float) -> None:
        """A call that failed: status 0 for an error frame of the socket."""
        if status == 429 or code == "rate_limited" or self.is_expected(code, now_s):
            self.apart[code] += 1
        elif status >= 500 or status == 0:
            self.unexpected.append(f"{what}: {status or 'frame'} {code}")

    # -- promises ----------------------------------------------------------------------------------------------------

    def asks(self, key: str, session_id: str | None, after: str | None, is_edit: bool) -> None:
        """A message that is about to be sent: an edit may take effect without a word of it coming back."""
        if not is_edit or session_id is None:
            return
        turns = self.sessions.get((key, session_id), [])
        kept = 0
        if after is not None:
            kept = next((n for n, turn in enumerate(turns, 1) if turn.turn_id == after), len(turns))
        for turn in turns[kept:]:
            turn.is_doubtful = True

    def accepted(self, key: str, session_id: str, turn_id: str, content: str) -> None:
        turns = self.sessions.setdefault((key, session_id), [])
        if any(turn.turn_id == turn_id for turn in turns):
            return
        self.num_turns += 1
        turns[:] = [turn for turn in turns if not turn.is_doubtful]
        turns.append(Acknowledged(turn_id, content))

    def done(self, key: str, session_id: str, turn_id: str, answer: str) -> None:
        for turn in self.sessions.get((key, session_id), []):
            if turn.turn_id == turn_id:
                turn.answer = answer

    def forget(self, key: str, session_id: str) -> None:
        """A session that its owner deleted."""
        self.sessions.pop((key, session_id), None)

    def check_session(self, key: str, session_id: str, stored: Sequence[Mapping[str, Any]] | None) -> None:
        """Compare a session's acknowledged turns with what is read back; None: the server knows no such session."""
        by_id = {turn["id"]: turn for turn in stored or ()}
        for turn in self.sessions.get((key, session_id), []):
            found = by_id.get(turn.turn_id)
            where = f"turn {turn.turn_id} of session {session_id}"
            if found is None:
                if not turn.is_doubtful:
                    self.lost.add(f"{where} is gone")
            elif found["content"] != turn.content:
                self.lost.add(f"{where} has another question")
            elif turn.answer is not None and (
                found["answer"] != turn.answer or found["status"] not in ("done", "stopped")
            ):
                self.lost.add(f"{where} is {found['status']} with another answer than was sent")

    # -- answers -----------------------------------------------------------------------------------------------------

    def check_answer(
        self, what: str, answer: str, references: Collection[str], extent: Expectation = "whole"
    ) -> None:
        """references: texts of which the answer must be one, or, for what was cut off, the beginning of one."""
        self.num_answers_checked += 1
        if extent == "whole":
            is_right = answer in references
        else:
            is_right = any(reference.startswith(answer) for reference in references)
        if not is_right:
            self.wrong.append(f"{what}: {answer[:80]!r} instead of {min(references)[:80]!r}")


@dataclass(frozen=True)
class Reading:
    """The server at rest: nobody is connected and nothing runs."""

    at_s: float
    rss_mib: float
    num_fds: int
    num_threads: int
    num_kills: int
    """Engines that were broken on purpose so far."""


@dataclass(frozen=True)
class Growth:
    """rss: share of the first window. rss_mib_per_kill: of what grew, per engine that was killed between the windows. fds, threads: counts."""

    rss: float
    rss_mib_per_kill: float
    fds: int
    threads: int
    num_readings: int


def growth(readings: Sequence[Reading]) -> Growth | None:
    """The last third of the readings against the first third, medians of each; None for fewer than two readings."""
    if len(readings) < 2:
        return None
    size = max(len(readings) // 3, 1)
    first, last = readings[:size], readings[-size:]
    before, after = _median(r.rss_mib for r in first), _median(r.rss_mib for r in last)
    num_kills = _median(r.num_kills for r in last) - _median(r.num_kills for r in first)
    return Growth(
        rss=after / before - 1,
        rss_mib_per_kill=(after - before) / num_kills if num_kills else 0.0,
        fds=round(_median(r.num_fds for r in last) - _median(r.num_fds for r in first)),
        threads=round(_median(r.num_threads for r in last) - _median(r.num_threads for r in first)),
        num_readings=len(readings),
    )


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)
