"""Programs: agents' turns that belong together because tools stand between them, and how many may be under way at once. Pure.

A program begins with a request that may call tools and continues with each request that brings their results. Between its turns its KV is worth
keeping, so no more programs are let in than the device can hold together: a new one waits rather than push out one that is half done, which would
then compute or restore its whole context at each of its turns. A tenant with fewer tokens inside goes first.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import msgspec

from engine_bridge.policy.scheduling.queue_policy import Waiting

# Tokens of all programs inside together: as a share of the device's, since some are always away with their tools, and as a share of the device's
# and host memory's together, since each holds much that the other has, too. Chosen: `bench.emulated agents`.
DEVICE_SHARE, HELD_SHARE = 1.2, 0.6
# A program that has gone away and was not announced to come back is over after this time. Chosen: the word comes with the end of its answer.
UNANNOUNCED_S = 0.5
# After so many turns a program waits with the new ones again, so that endless ones keep nobody out. Chosen: five times as many as agents take.
MAX_TURNS = 50


@dataclass(slots=True)
class Program:
    """One program inside.

    Attributes:
        began_s: when its first request came.
        num_tokens: of its context, with the answer that it is given now as predicted.
        num_active: its requests that wait or run.
        left_s: when its last request ended; None while one is active.
        until_s: by when it comes back, as was announced; 0 while that was not.
    """

    tenant: str
    began_s: float
    num_tokens: int
    num_active: int = 0
    num_turns: int = 0
    left_s: float | None = None
    until_s: float = 0.0


class Programs:
    """The programs of one engine; one caller, in order of time.

    Args:
        num_tokens: what its device holds; infinite: every program is let in.
        num_host_tokens: what host memory holds besides.
    """

    def __init__(self, num_tokens: float, num_host_tokens: float = 0.0) -> None:
        self._room = min(DEVICE_SHARE * num_tokens, HELD_SHARE * (num_tokens + num_host_tokens))
        self._inside: dict[str, Program] = {}
        self._program_of: dict[str, str] = {}
        """Of each request of a program inside."""
        self._outside: dict[str, Waiting] = {}
        """Requests that may begin a program, in order of arrival."""

    def __len__(self) -> int:
        return len(self._inside)

    @property
    def num_outside(self) -> int:
        """The requests that wait to begin a program."""
        return len(self._outside)

    def came(self, request: Waiting, now: float) -> Waiting:
        """Return a request with what the queue needs to know of its program.

        One that continues a program inside starts in the order of programs. One that begins a program waits with the others of its tenant until
        `may_start` lets it in.
        """
        name = request.program
        if not name or request.priority < 0 or request.is_background:
            return request
        program = self._inside.get(name)
        if request.continues and (program is None or program.num_turns < MAX_TURNS):
            if program is None:
                program = self._inside[name] = Program(request.tenant, now, 0)
            self._enter(program, request)
            return msgspec.structs.replace(request, program_s=program.began_s)
        if program is not None and not program.num_active:
            del self._inside[name]
        self._outside[request.request_id] = request
        return request

    def waits_for(self, request: Waiting) -> Hashable:
        """Return what a request waits for before it may start: with others of its tenant to begin a program, or for what it names itself."""
        return ("program", request.tenant) if request.request_id in self._outside else request.waits_for

    def __contains__(self, request_id: str) -> bool:
        """Return whether a request waits to begin a program."""
        return request_id in self._outside

    def may_start(self, request_id: str, now: float) -> bool:
        """Return whether a request may start as far as programs are concerned; the first True lets its program in."""
        request = self._outside.get(request_id)
        if request is None:
            return True
        self._forget_gone(now)
        num_tokens = request.num_prompt_tokens + request.guess.p50
        held = sum(each.num_tokens for each in self._inside.values())
        is_idle = not any(each.num_active for each in self._inside.values())
        if not is_idle and (held + num_tokens > self._room or not self._is_next(request.tenant)):
            return False
        del self._outside[request_id]
        program = self._inside.get(request.program)
        if program is None:
            program = self._inside[request.program] = Program(request.tenant, now, 0)
        self._enter(program, request)
        return True

    def ended(self, request_id: str, num_tokens: int, now: float) -> None:
        """Note that a request has left, with this many tokens of context. One that belongs to no program is ignored."""
        self._outside.pop(request_id, None)
        name = self._program_of.pop(request_id, None)
        program = self._inside.get(name) if name is not None else None
        if program is None:
            return
        program.num_active -= 1
        program.num_tokens = num_tokens
        if not program.num_active:
            program.left_s = now

    def announced(self, name: str, until_s: float) -> None:
        """Note that a program comes back, by this time if at all. One that is not inside is ignored."""
        program = self._inside.get(name)
        if program is not None:
            program.until_s = until_s

    def _enter(self, program: Program, request: Waiting) -> None:
        self._program_of[request.request_id] = request.program
        program.num_active += 1
        program.num_turns += 1
        program.left_s = None
        program.until_s = 0.0
        program.num_tokens = request.num_prompt_tokens + request.guess.p50

    def _is_next(self, tenant: str) -> bool:
        """Return whether no other tenant that waits has fewer tokens inside."""
        tenants = {each.tenant for each in self._outside.values()}
        if len(tenants) < 2:
            return True
        held = dict.fromkeys(tenants, 0)
        for each in self._inside.values():
            if each.tenant in held:
                held[each.tenant] += each.num_tokens
        return held[tenant] <= min(held.values())

    def _forget_gone(self, now: float) -> None:
        gone = [
            name
            for name, each in self._inside.items()
            if each.left_s is not None and now > max(each.left_s + UNANNOUNCED_S, each.until_s)
        ]
        for name in gone:
            del self._inside[name]
