"""Requests that a node computes: those whose prompts are under way, and those that decode.

Those that decode go in step, so one counter of steps says how far each of them is, and many steps are counted together.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bench.sim.core.requests import Arrival, Timed
from bench.sim.core.shapes import BLOCK_TOKENS, Shape
from bench.sim.core.steps import Kernel
from engine_bridge.core.scheduling.pacer import Progress


class Stage(enum.Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Request(Timed):
    """One request in a lean node.

    num_done: tokens of the answer, up to date except while it decodes (`Decoders` counts steps then, from decodes_from on); they stay through a
    preemption. num_prefilled: tokens of the prompt, and of what was answered before, that have their KV. num_blocks: of KV, before it grows
    beyond them. grow_slot: the place in a block at which its growth falls, -1 while it has room. generation: counts its starts, so that what was
    planned for an earlier one can be told apart. num_cached: blocks that a preemption left on the device; the node had taken cached_until blocks
    in all when the last of them is gone.
    """

    arrival: Arrival
    rank: int = 0
    stage: Stage = Stage.WAITING
    num_done: int = 0
    num_prefilled: int = 0
    num_blocks: int = 0
    num_cached: int = 0
    cached_until: int = 0
    grow_slot: int = -1
    decodes_from: int = 0
    generation: int = 0
    num_preempted: int = 0
    first_started_s: float = math.nan
    first_token_s: float = math.nan
    ended_s: float = math.nan

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far: what a start has to compute. Not of one that decodes."""
        return self.arrival.num_prompt_tokens + self.num_done

    @property
    def num_unfilled(self) -> int:
        """Of these: still to be computed."""
        return self.num_tokens - self.num_prefilled


Part = tuple[Request, int]
"""Of a step: so many tokens of a request's prompt."""
What = Literal["end", "look", "grow"]
"""It has its whole answer; the policy is to be told how long it is; its next token needs a block more."""


class Prompts:
    """Requests whose prompts are under way, in the order in which they started. Their first tokens come of what is computed last."""

    def __init__(self, shape: Shape) -> None:
        self._is_mixed, self._step_tokens = shape.is_mixed, shape.step_tokens
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def enter(self, request: Request) -> None:
        request.stage = Stage.PREFILLING
        self._requests.append(request)

    def leave(self, request: Request) -> None:
        self._requests.remove(request)

    def startable(self, sizes: Iterable[int], num_decodes: int) -> int:
        """How many of those that have to compute so much may start, as engines take requests from a queue: none once a step's tokens are used up."""
        left = self._step_tokens - (num_decodes if self._is_mixed else 0)
        left -= sum(min(request.num_unfilled, self._step_tokens) for request in self._requests)
        num = 0
        for size in sizes:
            if left < (1 if self._is_mixed or num == 0 else size):
                break
            left -= min(size, self._step_tokens) if self._is_mixed else size
            num += 1
        return num

    def parts(self, num_decodes: int) -> list[Part]:
        """Of the next step: chunks, or whole prompts where steps are not mixed, and then at least one."""
        left = self._step_tokens - num_decodes
        parts: list[Part] = []
        for request in self._requests:
            num = request.num_unfilled
            if self._is_mixed:
                num = min(num, left)
                if num <= 0:
                    break
            elif num > left and parts:
                break
            parts.append((request, num))
            left -= num
        return parts


class Due(NamedTuple):
    """Something that happens to one of them, at a number of steps."""

    at: int
    order: int
    what: What
    request: Request
    generation: int

    @property
    def is_over(self) -> bool:
        return self.generation != self.request.generation


class Decoders:
    """num: of them. num_context: their tokens. ranks_read: of their adapters in a step, as the kernel reads them."""

    def __init__(self, kernel: Kernel) -> None:
        self.num = self.num_context = self.ranks_read = 0
        self._kernel = kernel
        self._num_steps = 0
        self._num_by_rank: Counter[int] = Counter()
        self._growth = [0] * BLOCK_TOKENS  # how many need a block when the number of steps leaves this rest
        self._due: list[Due] = []
        self._order = itertools.count()

    def enter(self, request: Request) -> None:
        """It has its KV but for its last token's, and decodes with the next step."""
        request.stage = Stage.DECODING
        request.decodes_from = self._num_steps
        self.num += 1
        self.num_context += request.num_tokens
        self._count_rank(request.rank, 1)
        self.plan(request, "end", request.arrival.num_answer_tokens - request.num_done)
        room = request.num_blocks * BLOCK_TOKENS - request.num_tokens
        self.plan(request, "grow", max(room + 1, 0))

    def leave(self, request: Request) -> None:
        """It holds nothing any more."""
        request.num_done = self.num_done(request)
        self.num -= 1
        self.num_context -= request.num_tokens
        self._count_rank(request.rank, -1)
        if request.grow_slot >= 0:
            self._growth[request.grow_slot] -= 1
            request.grow_slot = -1

    def _count_rank(self, rank: int, change: int) -> None:
        if rank:
            self._num_by_rank[rank] += change
            self.ranks_read = self._kernel(self._num_by_rank)

    # -- how far they are ----------------------------------------------------------------------------------------------

    def num_done(self, request: Request) -> int:
        """Tokens of the answer of one that runs, whether it decodes or not."""
        if request.stage is not Stage.DECODING:
            return request.num_done
        return request.num_done + self._num_steps - request.decodes_from

    def num_kv_tokens(self, request: Request) -> int:
        """That have their KV, of one that runs: all but the last one of those who decode."""
        if request.stage is not Stage.DECODING:
            return request.num_prefilled
        return request.arrival.num_prompt_tokens + self.num_done(request) - 1

    def progress(self, requests: Iterable[Request]) -> list[Progress]:
        """Of those that run, as the dispatcher wants it."""
        return [
            (
                request.arrival.request_id,
                request.arrival.num_prompt_tokens + self.num_done(request),
                self.num_kv_tokens(request),
            )
            for request in requests
        ]

    def held_blocks(self, request: Request) -> int:
        """Of KV, by one that runs."""
        if request.grow_slot < 0:
            return request.num_blocks
        # Its last token has none yet: the step that computes with it takes a block where it needs one.
        return -(-(request.arrival.num_prompt_tokens + self.num_done(request) - 1) // BLOCK_TOKENS)

    def grown(self, num_steps: int) -> int:
        """Blocks that they need for so many steps more."""
        rounds, rest = divmod(num_steps, BLOCK_TOKENS)
        blocks = rounds * sum(self._growth) if rounds else 0
        for step in range(1, rest + 1):
            blocks += self._growth[(self._num_steps + step) % BLOCK_TOKENS]
        return blocks

    # -- what is due ---------------------------------------------------------------------------------------------------

    def plan(self, request: Request, what: What, in_steps: int) -> None:
        due = Due(self._num_steps + in_steps, next(self._order), what, request, request.generation)
        heapq.heappush(self._due, due)

    def plan_look(self, request: Request, num_tokens: int) -> None:
        """When it has so many, if its answer is so long."""
        num_more = num_tokens - request.arrival.num_prompt_tokens - self.num_done(request)
        if self.num_done(request) + num_more < request.arrival.num_answer_tokens:
            self.plan(request, "look", num_more)

    def steps_alike(self, free_blocks: int) -> int:
        """How many steps can be counted together: until something is due, or memory lacks. There is one request at least."""
        while self._due[0].is_over:
            heapq.heappop(self._due)
        num = self._due[0].at - self._num_steps
        while num > 1 and self.grown(num) > free_blocks:
            num = num // 2
        return num

    def advance(self, num_steps: int) -> None:
        """So many steps have been taken."""
        self._num_steps += num_steps
        self.num_context += num_steps * self.num

    def take_due(self) -> Iterator[tuple[What, Request]]:
        """Ends and looks that are due by now, in order of planning, since whoever has ended does not grow. Growth is counted here."""
        while self._due and self._due[0].at <= self._num_steps:
            due = heapq.heappop(self._due)
            if due.is_over:
                continue
            if due.what == "grow":
                slot = due.request.grow_slot = (self._num_steps + 1) % BLOCK_TOKENS
                self._growth[slot] += 1
            else:
                yield due.what, due.request

    def check_invariants(self, running: Iterable[Request]) -> None:
        """Raises AssertionError if somebody is lost, or counted twice."""
        decoding = [request for request in running if request.stage is Stage.DECODING]
        assert self.num == len(decoding), "decodes"
        tokens = (request.arrival.num_prompt_tokens + self.num_done(request) for request in decoding)
        assert self.num_context == sum(tokens), "context"
        by_rank = Counter(request.rank for request in decoding if request.rank)
        assert +self._num_by_rank == by_rank and self.ranks_read == self._kernel(by_rank), "ranks"
        assert sum(self._growth) == sum(request.grow_slot >= 0 for request in decoding), "growth"
