"""Programs: agents' turns that belong together because tools stand between them, and how many may be under way at once. Pure.

A program begins with a request that may call tools and continues with each request that brings their results. Between its turns its KV is worth
keeping, so no more programs are let in than the device and host memory can hold together: a new one waits rather than push out one that is half done,
which would then compute or restore its whole context at each of its turns.

Of a program only what is its own counts: agents begin with the same system prompt and tools. What is away keeps nobody out of an idle device: tools
may take minutes, and an agent may never come back.

A program that waits for its helpers goes on when they are done, so they need no place of their own while together they take no more than it does.
They start when their caller would have. Its own KV lies idle meanwhile: it takes room in host memory, but none of the device's.

Nothing starves: each tenant may fill its share of the room whatever others hold, and where a tenant's first one has waited for `LEAK_S` without any
other of its tenant being let in, it is let in however full the room is.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import msgspec

from engine_bridge.policy.scheduling.queue_policy import Waiting
from engine_bridge.protocol.node import LIKELY

# Tokens of all programs inside together: as a share of the device's, since some are always away with their tools, and as a share of the device's
# and host memory's together, since each holds much that the other has, too. Chosen: `bench.emulated agents`; with a device's share of 1.2 single
# programs wait 2.5 times as long as in vLLM's order where the device is seldom full (bench/LOG.md).
DEVICE_SHARE, HELD_SHARE = 1.35, 0.6
# Programs are let in, however much those that are away hold, while those at work use less than this share of the device: memory that only waits for
# tools is worth less than an idle device. Chosen: bench/LOG.md, "Agents unlike those", where 0.8 was tried, too.
BUSY_SHARE = 0.5
# A program that left without an announced return is over after this time. Chosen: the word comes with the end of its answer, and single requests that
# offer tools keep others out for so long.
UNANNOUNCED_S = 0.2
# An announcement keeps a place for no longer than this. Chosen: nineteen of twenty tools have answered long before.
ANNOUNCED_AT_MOST_S = 60.0
# After this many turns a program waits with the new ones again, so that endless ones let others in. Chosen: five times the turns of agents.
MAX_TURNS = 50
# Seconds after which a request is let in whose tenant had none let in meanwhile. Chosen: a person's patience.
LEAK_S = 30.0
# The most absent programs remembered in case they return; beyond it the first to leave is forgotten.
MAX_LATE = 4096
# Seconds between two looks for programs that are over. Chosen: a thousand are looked at in a tenth of a millisecond.
LOOK_EVERY_S = 0.1


@dataclass(slots=True)
class Program:
    """One program inside.

    Attributes:
        num_shared: the first tokens of its context that others held when it was let in, which take no memory of their own.
        num_tokens: of its context without these, with the answer that it is given now as predicted.
        num_active: its requests that wait or run.
        left_s: when its last request ended; None while one is active.
        until_s: by when it comes back, as was announced; 0 while that was not.
        helpers: the names of programs that have begun in its place, helpers' own helpers among them.
        place: the program in whose place it has begun; None: it has one of its own.
    """

    tenant: str
    began_s: float
    num_shared: int = 0
    num_tokens: int = 0
    num_active: int = 0
    num_turns: int = 0
    left_s: float | None = None
    until_s: float = 0.0
    helpers: list[str] = field(default_factory=list)
    place: Program | None = None


class Programs:
    """The programs of one engine; one caller, in order of time.

    Args:
        num_tokens: what its device holds; infinite: programs are of no account.
        num_host_tokens: what host memory holds besides.
        shared_tokens: returns a waiting request's leading tokens that running requests hold already.
    """

    def __init__(
        self,
        num_tokens: float,
        num_host_tokens: float = 0.0,
        shared_tokens: Callable[[str], int] = lambda request_id: 0,
    ) -> None:
        self._shared_tokens = shared_tokens
        self._device_room = DEVICE_SHARE * num_tokens
        self._held_room = HELD_SHARE * (num_tokens + num_host_tokens)
        self._room = min(self._device_room, self._held_room)
        self._inside: dict[str, Program] = {}
        self._program_of: dict[str, str] = {}
        """Of each request of a program inside."""
        self._outside: dict[str, Waiting] = {}
        """Requests that may begin a program, in order of arrival."""
        self._came_s: dict[str, float] = {}
        self._held: Counter[str] = Counter()
        """Tokens of the programs inside, by tenant."""
        self._num_waiting: Counter[str] = Counter()
        """Requests outside, by tenant."""
        self._weights: dict[str, float] = {}
        """Of tenants with a program inside or a request outside."""
        self._entered_s: dict[str, float] = {}
        """When a tenant's last program was let in, of tenants with requests outside."""
        self._late: OrderedDict[str, None] = OrderedDict()
        """Programs that came back later than announced may go on: they were let in once."""
        self._num_active = 0
        self._active_tokens = 0
        """Of programs that have a request, waiting or running."""
        self._busy_room = BUSY_SHARE * num_tokens
        self._look_s = 0.0

    def __len__(self) -> int:
        return len(self._inside)

    def __contains__(self, request_id: str) -> bool:
        """Return whether a request waits to begin a program."""
        return request_id in self._outside

    def came(self, request: Waiting, now: float) -> Waiting:
        """Return a request with the facts of its program that the queue needs.

        A request of a program that is inside starts in the order of programs. A request that begins a program, or continues a program outside, waits
        until `may_start` lets it in.
        """
        name = request.program
        if not name or request.priority < 0 or request.is_background or self._room == math.inf:
            return request
        if now >= self._look_s:
            self._forget_gone(now)
        program = self._inside.get(name)
        if program is None and name in self._late:
            del self._late[name]
            if request.continues:
                program = self._inside[name] = Program(request.tenant, now)
                self._weights[request.tenant] = request.weight
        if program is None:
            program = self._begun_for_caller(request)
        elif not request.continues or program.num_turns >= MAX_TURNS:
            if not program.num_active:
                self._drop(name)
            program = None
        if program is not None:
            self._enter(program, request)
            return msgspec.structs.replace(request, program_s=program.began_s)
        self._outside[request.request_id] = request
        self._came_s[request.request_id] = now
        self._num_waiting[request.tenant] += 1
        self._weights[request.tenant] = request.weight
        self._entered_s.setdefault(request.tenant, now)
        return request

    def waits_for(self, request: Waiting) -> Hashable:
        """Return what a request waits for before it may start: a place for its program, with others of its kind, or the request's own `waits_for`."""
        if request.request_id in self._outside:
            return "program", request.tenant, request.priority, request.waits_for
        return request.waits_for

    def may_start(self, request_id: str, now: float) -> bool:
        """Return whether a request may start as far as programs are concerned; the first True lets its program in."""
        request = self._outside.get(request_id)
        if request is None:
            return True
        if now >= self._look_s:
            self._forget_gone(now)
        tenant, num_shared = request.tenant, self._shared_tokens(request_id)
        num_tokens = _size(request) - num_shared
        since_s = max(self._came_s[request_id], self._entered_s[tenant])
        num_held = self._held.total() + num_tokens
        has_room = (
            num_held <= min(self._device_room + self._idle_tokens(), self._held_room)
            or self._active_tokens + num_tokens <= self._busy_room
        )
        may = has_room or self._has_share(tenant, num_tokens) or now - since_s >= LEAK_S
        if self._num_active and not may:
            return False
        self._entered_s[tenant] = now
        self._leave(request_id)
        program = self._inside.get(request.program)
        if program is None:
            program = self._inside[request.program] = Program(tenant, now, num_shared)
            self._weights[tenant] = request.weight
        self._enter(program, request)
        return True

    def ended(self, request_id: str, num_tokens: int, now: float) -> None:
        """Note that a request has left, with this many tokens of context. A request without a program is ignored."""
        if request_id in self._outside:
            self._leave(request_id)
        name = self._program_of.pop(request_id, None)
        program = self._inside.get(name) if name is not None else None
        if program is None:
            return
        self._resize(program, num_tokens)
        program.num_active -= 1
        self._num_active -= 1
        if not program.num_active:
            self._active_tokens -= program.num_tokens
            program.left_s = now

    def announced(self, name: str, until_s: float, now: float, probability: float = 1.0) -> None:
        """Note that a program comes back, by this time if at all: its place is kept if that is likely. A program outside is ignored."""
        program = self._inside.get(name)
        if program is not None and probability > LIKELY:
            program.until_s = min(until_s, now + ANNOUNCED_AT_MOST_S)

    def _begun_for_caller(self, request: Waiting) -> Program | None:
        """Return the program of a request that begins a helper of one inside; None where it needs a place of its own."""
        caller = self._inside.get(request.caller)
        if caller is None or caller.tenant != request.tenant:
            return None
        # Helpers of helpers share the place, or a chain of them would have any number inside. Only their caller lies idle as well.
        place = caller.place or caller
        place.helpers = [name for name in place.helpers if name in self._inside]
        num_taken = sum(self._inside[name].num_tokens for name in place.helpers if name != request.caller)
        if num_taken and num_taken + _size(request) > place.num_tokens:
            return None
        place.helpers.append(request.program)
        self._weights[request.tenant] = request.weight
        program = self._inside[request.program] = Program(request.tenant, place.began_s, place=place)
        return program

    def _idle_tokens(self) -> int:
        """Return the tokens of programs that wait for helpers."""
        return sum(
            each.num_tokens
            for each in self._inside.values()
            if each.helpers and not each.num_active and any(name in self._inside for name in each.helpers)
        )

    def _has_share(self, tenant: str, num_tokens: int) -> bool:
        """Return whether a tenant stays within its share of the room with this many tokens more, whatever others hold."""
        share = self._weights[tenant] / sum(self._weights.values())
        return self._held[tenant] + num_tokens <= share * self._room

    def _enter(self, program: Program, request: Waiting) -> None:
        self._program_of[request.request_id] = request.program
        if not program.num_active:
            self._active_tokens += program.num_tokens
        program.num_active += 1
        self._num_active += 1
        program.num_turns += 1
        program.left_s, program.until_s = None, 0.0
        self._resize(program, _size(request))

    def _resize(self, program: Program, num_tokens: int) -> None:
        num_more = max(num_tokens - program.num_shared, 0) - program.num_tokens
        self._held[program.tenant] += num_more
        self._active_tokens += num_more if program.num_active else 0
        program.num_tokens += num_more

    def _leave(self, request_id: str) -> None:
        tenant = self._outside.pop(request_id).tenant
        del self._came_s[request_id]
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant], self._entered_s[tenant]
        self._forget_tenant(tenant)

    def _forget_gone(self, now: float) -> None:
        self._look_s = now + LOOK_EVERY_S
        for name, each in list(self._inside.items()):
            if each.left_s is not None and now > max(each.left_s + UNANNOUNCED_S, each.until_s):
                self._drop(name)
                self._late[name] = None
                if len(self._late) > MAX_LATE:
                    self._late.popitem(last=False)

    def _drop(self, name: str) -> None:
        program = self._inside.pop(name)
        self._resize(program, 0)
        self._forget_tenant(program.tenant)

    def _forget_tenant(self, tenant: str) -> None:
        """Forget a tenant that has nothing inside and nothing outside."""
        if not self._held[tenant]:
            del self._held[tenant]
            if tenant not in self._num_waiting:
                self._weights.pop(tenant, None)


def _size(request: Waiting) -> int:
    return request.num_prompt_tokens + request.guess.p50
