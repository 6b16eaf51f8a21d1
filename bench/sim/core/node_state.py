"""What a node is and holds: its device, its memory in blocks, its requests, and how far those are that decode."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.sim.core.adapters import Adapters
from bench.sim.core.clock import Clock, Event
from bench.sim.core.host_kv import HostKv, HostMemory
from bench.sim.core.links import SharedLink
from bench.sim.core.requests import Request, Stage
from bench.sim.core.shapes import BLOCK_TOKENS, Shape, pool_blocks
from bench.sim.core.steps import Decoding, StepCost
from engine_bridge.policy.adapter_cache import EvictionPolicy
from engine_bridge.policy.arrivals import Arrivals
from engine_bridge.policy.preemption import Preemption
from engine_bridge.policy.queue import QueuePolicy


class Due(NamedTuple):
    """Something that happens to a request that decodes, at a number of decode steps."""

    at: int
    order: int
    what: str
    request: Request
    generation: int


@dataclass(slots=True)
class Step:
    """One step, or a run of `num` that only decode. chunks: of which prompts how many tokens.

    left, since_s: what share of it was to be done when it was last planned, and when that was.
    """

    began_s: float
    num: int
    chunks: list[tuple[Request, int]]
    decoding: Decoding | None
    does_decode: bool
    end: Event
    left: float
    since_s: float


@dataclass(slots=True)
class Tally:
    """Of a whole run. counts: admitted, bypassed, squashed, preempted, steps, decode_tokens, prefill_tokens."""

    counts: Counter[str] = field(default_factory=Counter)
    busy_s: float = 0.0
    stalled_s: float = 0.0
    most_blocks: int = 0


class NodeState:
    """The books of a node. The layers above it change them: steps (`NodeSteps`), moves of KV and adapters (`NodeMoves`), and who starts (`Node`).

    Blocks, counters and stages are kept in step with each other by the methods here; arguments are those of `Node`.
    """

    def __init__(
        self,
        clock: Clock,
        cost: StepCost,
        shape: Shape,
        policy: QueuePolicy,
        *,
        eviction: EvictionPolicy | None,
        adapter_ranks: Sequence[int],
        preemption: Preemption,
        forecast: Arrivals | None,
        has_all_adapters: bool,
        num_blocks: int | None,
        host_memory: HostMemory | None,
    ) -> None:
        gpu, model = cost.gpu, cost.model
        self.clock, self.cost, self.shape, self.policy = clock, cost, shape, policy
        self.num_blocks = pool_blocks(cost) if num_blocks is None else num_blocks
        self.num_tokens = self.num_blocks * BLOCK_TOKENS
        self.link = SharedLink(clock, gpu.achieved_link_bytes_per_s, gpu.load_setup_s)
        block_bytes = BLOCK_TOKENS * model.kv_bytes_per_token
        bytes_by_rank = {rank: model.lora_bytes(rank) for rank in set(adapter_ranks)}
        sizes = [bytes_by_rank[rank] for rank in adapter_ranks]
        self.adapters = Adapters(sizes, block_bytes, eviction, self.link, has_all=has_all_adapters)
        self.host_kv = HostKv(clock, host_memory, block_bytes, self.link) if host_memory is not None else None
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.ended: list[Request] = []
        self.tally = Tally()
        self.kv_blocks = 0
        self.num_changes = 0
        """Counts requests that came, started, began to answer and left: while it stays, so do the facts about them."""
        self._num_taken = 0  # blocks, ever
        self._most_step_tokens = shape.step_tokens or max(self.num_tokens // 6, model.max_tokens)
        self._step_tokens = self._chunk_tokens = self._most_step_tokens
        self._preemption, self._forecast = preemption, forecast
        self._has_changed = True
        # Their KV or their adapter came while a step was under way, of which they are no part.
        self._joining: list[Request] = []
        self._stalled_since_s: float | None = None
        self._num_copies_in = self._num_copies_out = 0
        self._loading: dict[int, list[Request]] = {}
        self._prefilling: deque[Request] = deque()
        self._start_counting()

    def _start_counting(self) -> None:
        """Those that decode go in step, so one counter of steps says how far each is."""
        self._counter = 0
        self._num_decodes = 0
        self._context = 0
        self._num_by_rank: Counter[int] = Counter()
        self._ranks_read = 0  # in a decode step
        self._growth = [0] * BLOCK_TOKENS
        self._due: list[Due] = []
        self._order = itertools.count()

    # -- requests ------------------------------------------------------------------------------------------------------

    def start_blocks(self, request: Request) -> int:
        """Of KV, that its start takes: the prompt's and what was answered before, and the answer's if that is reserved."""
        num_answer = request.num_done
        if self.shape.reserves_answer:
            num_answer = max(num_answer, request.guess.p50)
        return -(-(request.arrival.num_prompt_tokens + num_answer) // BLOCK_TOKENS)

    def start_tokens(self, request: Request) -> int:
        """That its start has to compute, if all that is in host memory is loaded."""
        num_held = self.host_kv.held(request.arrival.request_id) if self.host_kv is not None else 0
        if num_held and not self.shape.writes_through:
            return 0
        return request.num_tokens - max(num_held * BLOCK_TOKENS, self._cached_tokens(request))

    def held_blocks(self, request: Request) -> int:
        """Of KV, now."""
        if request.grow_slot < 0:
            return request.num_blocks
        # Its last token has none yet: the step that computes with it takes a block where it needs one.
        return -(-(request.arrival.num_prompt_tokens + self._done(request) - 1) // BLOCK_TOKENS)

    def _done(self, request: Request) -> int:
        if request.stage is not Stage.DECODING:
            return request.num_done
        return request.num_done + self._counter - request.decodes_from

    def _num_kv_tokens(self, request: Request) -> int:
        """That have their KV on the device: all but the last one of those who decode."""
        if request.stage is Stage.DECODING:
            return request.arrival.num_prompt_tokens + self._done(request) - 1
        return request.num_prefilled if request.stage is Stage.PREFILLING else 0

    def _cached_tokens(self, request: Request) -> int:
        """That are still on the device of one that was preempted. vLLM takes free blocks in the order in which they came free."""
        if not request.num_cached:
            return 0
        num_left = max(request.cached_until - self._num_taken - self._grown(1), 0)
        return min(min(request.num_cached, num_left) * BLOCK_TOKENS, request.num_tokens - 1)

    def _has_adapter(self, request: Request) -> bool:
        adapter_id = request.arrival.adapter_id
        return adapter_id is None or self.adapters.is_here(adapter_id)

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        """That a start may take: free ones, and those of adapters that nobody uses."""
        return self._empty_blocks + self.adapters.idle_blocks

    @property
    def _empty_blocks(self) -> int:
        return self.num_blocks - self.kv_blocks - self.adapters.used_blocks

    def _claim(self, num_blocks: int, now: float) -> None:
        """Have so many empty, by letting unused adapters go."""
        missing = num_blocks - self._empty_blocks
        if missing > 0:
            self.adapters.free(missing, now)

    def _take(self, num_blocks: int, now: float) -> None:
        self._claim(num_blocks, now)
        self.kv_blocks += num_blocks
        self._num_taken += num_blocks
        used = self.kv_blocks + self.adapters.used_blocks
        self.tally.most_blocks = max(self.tally.most_blocks, used)

    def _grown(self, num_steps: int) -> int:
        """Blocks that those who decode need for so many steps more."""
        rounds, rest = divmod(num_steps, BLOCK_TOKENS)
        blocks = rounds * sum(self._growth) if rounds else 0
        for step in range(1, rest + 1):
            blocks += self._growth[(self._counter + step) % BLOCK_TOKENS]
        return blocks

    # -- stages --------------------------------------------------------------------------------------------------------

    @property
    def _is_held_up(self) -> bool:
        """No step may run now: it would lack what is still being copied."""
        is_loading = self.shape.loads_block and len(self._loading) > 0
        return is_loading or self._num_copies_out > 0 or (self.shape.swaps_block and self._num_copies_in > 0)

    def _await_adapter(self, request: Request) -> None:
        adapter_id = request.arrival.adapter_id
        assert adapter_id is not None, "only adapters are loaded"
        request.stage = Stage.LOADING
        self._loading.setdefault(adapter_id, []).append(request)

    def _forget_load(self, request: Request) -> None:
        """It waits no more for its adapter, which comes all the same."""
        adapter_id = request.arrival.adapter_id
        assert adapter_id is not None, "only adapters are loaded"
        self._loading[adapter_id].remove(request)
        if not self._loading[adapter_id]:
            del self._loading[adapter_id]

    def _enter_prefill(self, request: Request, num_ready: int = 0) -> None:
        """Compute what follows the first `num_ready` tokens."""
        request.stage = Stage.PREFILLING
        request.num_prefilled = num_ready
        request.num_front = 0
        self._prefilling.append(request)

    def _enter_decoding(self, request: Request) -> None:
        request.stage = Stage.DECODING
        request.decodes_from = self._counter
        self._num_decodes += 1
        self._context += request.num_tokens
        self._count_rank(request.rank, 1)
        self._plan(request, "end", request.arrival.num_answer_tokens - request.num_done)
        self._plan(request, "outgrown", max(request.guess.p50 - request.num_done, 0))
        room = request.num_blocks * BLOCK_TOKENS - request.num_tokens
        self._plan(request, "grow", max(room + 1, 0))

    def _count_rank(self, rank: int, change: int) -> None:
        if rank:
            self._num_by_rank[rank] += change
            self._ranks_read = self.cost.kernel(self._num_by_rank)

    def _plan(self, request: Request, what: str, in_steps: int) -> None:
        due = Due(self._counter + in_steps, next(self._order), what, request, request.generation)
        heapq.heappush(self._due, due)

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raises AssertionError if blocks or requests are lost, or counted twice."""
        self.adapters.check_invariants()
        if self.host_kv is not None:
            self.host_kv.check_invariants()
            on_its_way = {i for i, r in self.running.items() if r.stage is not Stage.DECODING}
            assert self.host_kv.holders() <= self.waiting.keys() | on_its_way, "KV kept for nobody"
        assert self.kv_blocks == sum(map(self.held_blocks, self.running.values())), "blocks lost"
        assert 0 <= self._empty_blocks <= self.num_blocks, "more blocks than there are"
        decoding = [request for request in self.running.values() if request.stage is Stage.DECODING]
        assert self._num_decodes == len(decoding), "decodes"
        assert all(map(self._has_adapter, decoding)), "decodes without its adapter"
        assert self._context == sum(r.arrival.num_prompt_tokens + self._done(r) for r in decoding), "context"
        by_rank = Counter(r.rank for r in decoding if r.rank)
        assert +self._num_by_rank == by_rank and self._ranks_read == self.cost.kernel(by_rank), "ranks"
        assert sum(self._growth) == sum(r.grow_slot >= 0 for r in decoding), "growth"
