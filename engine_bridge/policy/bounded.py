"""Short requests first, but no request is overtaken by more than a share of the work that was before it. The default. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from .mlq_places import Entry, LaneQueue, Service
from .mlq_plan import Plan, Walk, share_tokens
from .preemption import Order
from .queue import Decision, Room, Running, Waiting, insert, refuse_twice, remove
from .quotas import Spare


class BoundedSettings(Struct, frozen=True, kw_only=True):
    """overtaken_share: of the tokens that waited before a request, so much may overtake it. 0 is vLLM's own order. Picked from
    0.05, 0.1 and 0.2 (`python -m bench.emulated order`); docs/decisions/0020 says why this one.

    num_looked_at: requests that one decision passes over because their adapter finds no memory. vLLM passes over all of them; with 16, half of what
    could run waited (P50 TTFT 3 to 4 times vLLM's own, 50 adapters on 16 slots at 1.2 of the capacity). So many take about 1 ms.
    """

    overtaken_share: float = 0.05
    num_looked_at: int = 256


class BoundedFlow:
    """One tenant's requests of one priority.

    Its clock is the tokens that have left the queue. In order of arrival a request would start when all that came before it have left: at
    `arrived`, the tokens that had come by then. It is due later than that by the share of those that waited when it came. Until the first is due,
    the shortest go ahead of it, if with them it is still not due.
    """

    def __init__(self, overtaken_share: float) -> None:
        self._share = overtaken_share
        self._arrived_tokens = self._left_tokens = 0
        self._due: list[tuple[float, float, str]] = []
        self._short: list[tuple[int, float, str]] = []
        self._keys: dict[str, tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._due)

    def add(self, entry: Entry) -> None:
        facts = entry.facts
        if facts.is_swapped:
            # It has had its turn: it goes on before all others.
            due_tokens, tokens = -math.inf, 0
        else:
            tokens = facts.size_tokens
            waiting_tokens = self._arrived_tokens - self._left_tokens
            due_tokens = self._arrived_tokens + self._share * waiting_tokens
            self._arrived_tokens += tokens
        self._keys[facts.request_id] = due_tokens, tokens
        insert(self._due, (due_tokens, facts.arrived_s, facts.request_id))
        insert(self._short, (tokens, facts.arrived_s, facts.request_id))

    def remove(self, entry: Entry) -> None:
        facts = entry.facts
        due_tokens, tokens = self._keys.pop(facts.request_id)
        remove(self._due, (due_tokens, facts.arrived_s, facts.request_id))
        remove(self._short, (tokens, facts.arrived_s, facts.request_id))
        self._left_tokens += tokens

    def lists(self) -> list[list[Any]]:
        return [self._due, self._short]

    def order(self, now: float, aging_s: float) -> Iterator[str]:
        """As `Ordered.order`, of which each one that is asked for is taken to start. Time plays no part in it."""
        left_tokens, gone = self._left_tokens, set[str]()
        due = (entry for entry in self._due if entry[-1] not in gone)
        short = (entry for entry in self._short if entry[-1] not in gone)
        first, shortest = next(due, None), next(short, None)
        while first is not None and shortest is not None:
            chosen = shortest if left_tokens + shortest[0] <= first[0] else first
            request_id = chosen[-1]
            gone.add(request_id)
            left_tokens += self._keys[request_id][1]
            yield request_id
            if first[-1] in gone:
                first = next(due, None)
            if shortest[-1] in gone:
                shortest = next(short, None)


class Bounded:
    """Lowest `priority` first, then the tenant who was given the fewest tokens for its weight; of one tenant the shortest, but none is overtaken
    by more than a share of what waited before it.

    Bound: while only one tenant with one priority waits, a request is overtaken by at most twice `overtaken_share` times the most tokens that
    waited at one time, and one request's. So in a queue of any length it waits hardly longer than in order of arrival. Whoever finds no room for
    its KV stops all behind it, as with vLLM; whoever finds none for its adapter is passed over, because `AdapterTurns` sees to its turn.

    Costs: `arrived`, `admitted`, `ended` a few binary searches; `decide` looks up those it starts, and one.

    Source: ours. Waiting in tokens rather than seconds is start-time fair queueing's (Goyal et al., SIGCOMM 1996); the order of arrival
    stands where that has the tenants' shares.
    """

    name = "bounded"
    victim_order: Order | None = None
    charges_tokens = False
    has_lanes = False
    minds_priority = True
    is_timeless = True

    def __init__(self, num_tokens: int, settings: BoundedSettings | None = None) -> None:
        """num_tokens: all that requests may hold together; it plays no part."""
        self.settings = settings or BoundedSettings()
        self._entries: dict[str, Entry] = {}
        self._queue = LaneQueue(lambda: BoundedFlow(self.settings.overtaken_share))
        self._service = Service()

    def arrived(self, facts: Waiting, now: float) -> None:
        if facts.weight <= 0:
            raise ValueError("a weight is positive")
        refuse_twice(facts, self._entries)
        self._service.waits(facts.tenant)
        entry = self._entries[facts.request_id] = Entry(facts, facts.weighted_size, 0)
        self._queue.add(entry, self._service.of(facts.tenant))

    def admitted(self, request_id: str, now: float) -> None:
        entry = self._entries.pop(request_id)
        self._queue.remove(entry)
        facts = entry.facts
        self._service.serve(facts.tenant, share_tokens(facts, facts.size_tokens))
        self._queue.served(facts.tenant, self._service.of(facts.tenant))
        self._service.left(facts.tenant)

    def outgrew(self, request_id: str, size_tokens: int) -> None: ...

    def squashed(self, request_id: str) -> None: ...

    def ended(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._queue.remove(entry)
            self._service.left(entry.facts.tenant)

    def decide(
        self, waiting: Mapping[str, Waiting], running: Mapping[str, Running], room: Room, now: float
    ) -> Decision:
        if not self._entries:
            return Decision()
        plan = Plan(waiting, running, room, Spare([0], 0), self._service, room.num_tokens, now)
        walk = Walk(self._queue, plan, 0.0)
        num_passed = 0
        while walk.head is not None:
            reason = plan.left.refusal(walk.head)
            if reason is None:
                plan.choose(0, walk.head, plan.tokens(walk.head))
            else:
                plan.deferred[walk.head.request_id] = reason
                num_passed += 1
                if reason != "adapter_memory" or num_passed >= self.settings.num_looked_at:
                    break
            walk.advance()
        return Decision(tuple(plan.chosen), plan.deferred)
