"""What clients were told, and whether it was true. Pure: facts in, verdicts out."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

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
    """Every promise of one run.

    Attributes:
        sessions: the acknowledged turns, in order, by (key, session id).
        wrong: a line for each answer that differs from its reference.
        lost: a line for each acknowledged turn that is missing or changed.
        unexpected: a line for each 5xx status or socket error that no disturbance explains.
        apart: number of explained errors by code.
    """

    sessions: dict[tuple[str, str], list[Acknowledged]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    unexpected: list[str] = field(default_factory=list)
    apart: Counter[str] = field(default_factory=Counter)
    num_turns: int = 0
    num_answers_checked: int = 0
    disturbed_until_s: dict[str, float] = field(default_factory=dict)

    # -- breakages ---------------------------------------------------------------------------------------------------

    def disturb(self, kind: str) -> None:
        """Note that this kind of breakage has begun."""
        self.disturbed_until_s[kind] = float("inf")

    def mend(self, kind: str, now_s: float) -> None:
        """Note that this kind of breakage is over at `now_s`, in seconds of the monotonic clock."""
        self.disturbed_until_s[kind] = now_s + AFTERMATH_S

    def is_expected(self, code: str, now_s: float) -> bool:
        """Return whether a breakage explains an error with this code at `now_s`."""
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
        """Note that the server has acknowledged a turn."""
        turns = self.sessions.setdefault((key, session_id), [])
        if any(turn.turn_id == turn_id for turn in turns):
            return
        self.num_turns += 1
        turns[:] = [turn for turn in turns if not turn.is_doubtful]
        turns.append(Acknowledged(turn_id, content))

    def done(self, key: str, session_id: str, turn_id: str, answer: str) -> None:
        """Note the whole answer of a turn."""
        for turn in self.sessions.get((key, session_id), []):
            if turn.turn_id == turn_id:
                turn.answer = answer

    def forget(self, key: str, session_id: str) -> None:
        """A session that its owner deleted."""
        self.sessions.pop((key, session_id), None)

    def check_session(self, key: str, session_id: str, stored: Sequence[Mapping[str, Any]] | None) -> None:
        """Compare a session's acknowledged turns with the stored ones; None if the server does not know the session."""
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
        """Check an answer to the question `what` against the texts of which it must be one, or must begin one if it was cut off ("beginning")."""
        self.num_answers_checked += 1
        if extent == "whole":
            is_right = answer in references
        else:
            is_right = any(reference.startswith(answer) for reference in references)
        if not is_right:
            self.wrong.append(f"{what}: {answer[:80]!r} instead of {min(references)[:80]!r}")


class Reading(NamedTuple):
    """Resources that the server holds at rest, when no client is connected and no request runs. num_kills: engines broken on purpose so far."""

    rss_mib: float
    num_fds: float
    num_threads: float
    num_kills: float


def growth(readings: Sequence[Reading]) -> dict[str, float]:
    """Compare medians of the last third of the readings with those of the first; of one reading nothing has grown.

    Returns:
        rss_growth: as a share of the first third. rss_mib_per_kill: of what grew, per engine that was killed between. fd_growth, thread_growth.
    """
    size = max(len(readings) // 3, 1)
    first, last = (
        Reading(*map(statistics.median, zip(*part, strict=True)))
        for part in (readings[:size], readings[-size:])
    )
    grown_mib, num_kills = last.rss_mib - first.rss_mib, last.num_kills - first.num_kills
    return {
        "rss_growth": round(grown_mib / first.rss_mib, 4),
        "rss_mib_per_kill": round(grown_mib / num_kills, 2) if num_kills else 0.0,
        "fd_growth": round(last.num_fds - first.num_fds),
        "thread_growth": round(last.num_threads - first.num_threads),
    }
