"""Which calls were given their conversation's session, and which another one's. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct


class ToldCall(Struct, frozen=True, kw_only=True):
    """One call as its client saw it.

    thread: the conversation that it is part of, as the program knows it. after: the conversation that this one left off from, "" for none.
    number: of the call in its conversation. session: the name that the server gave it. ttft_s: None where the client does not stream.
    """

    thread: str
    after: str
    number: int
    began_s: float
    session: str
    ttft_s: float | None
    num_prompt: int
    num_cached: int


class Recognising(NamedTuple):
    """Calls after the first of their conversation, those of them that were given its session, and calls that were given another's."""

    num_followups: int
    num_recognised: int
    num_wrong: int


def judge(calls: Iterable[ToldCall]) -> Recognising:
    """Return how the sessions of calls were found.

    A conversation's session is the session that its first call was given: a new one, or that of the conversation that it left off from (the branch
    that continues first, a compacted history), if no other has taken that over. Any other session of another conversation is a wrong one.
    """
    session_of: dict[str, str] = {}
    holder_of: dict[str, str] = {}
    num_followups = num_recognised = num_wrong = 0
    for call in sorted(calls, key=lambda each: each.began_s):
        holder = holder_of.get(call.session, call.thread)
        if call.number == 0:
            may_take_over = bool(call.after) and holder == call.after
            num_wrong += holder != call.thread and not may_take_over
            session_of[call.thread] = call.session
            if holder in (call.thread, call.after):
                holder_of[call.session] = call.thread
            continue
        num_followups += 1
        num_recognised += bool(call.session) and call.session == session_of[call.thread]
        num_wrong += holder != call.thread
    return Recognising(num_followups, num_recognised, num_wrong)
