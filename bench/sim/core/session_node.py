"""A node that serves sessions: their KV stays on the device while nobody needs its room, is kept by the host, and comes back before it is asked for.

A subclass of `Node`, which goes on doing all that concerns steps, memory of running requests and who starts. Added are the blocks of ended
requests, which anybody may overwrite, as vLLM's prefix cache has them; loads from host memory, for which a step waits as the live engine's does;
and advisories, as engine_bridge/core/kv/promotions.py acts on them. How much of a prompt is loaded and how much computed is asked of a
`RestorePolicy`, which expected session deserves device memory of `engine_bridge.policy.kv.guesses.plan`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from bench.sim.core.batch import Request
from bench.sim.core.clock import Clock
from bench.sim.core.lean_node import Node
from bench.sim.core.links import SharedLink
from bench.sim.core.requests import Arrival
from bench.sim.core.shapes import BLOCK_TOKENS, VLLM
from bench.sim.core.steps import Chunk, StepCost
from bench.sim.core.tiers import Both, HostTiers, SessionKv
from engine_bridge.core.kv.promotions import LOOK_EVERY_S
from engine_bridge.policy.kv.guesses import GuessFacts, due_s, plan
from engine_bridge.policy.scheduling.queue_policy import QueuePolicy
from engine_bridge.predict.length import LengthGuess
from kvtiers.policy.restore import Action, RestoreDecision, RestoreFacts, RestorePolicy

# Blocks that are copied to the device in one go for an advisory: what came so far is of use when its request comes in between. Chosen: 10 ms.
PIECE_BLOCKS = 128
# A request that waits for its KV is looked at again no sooner. Chosen.
MIN_LOOK_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Arrival):
    """A request that goes on with a session: its prompt is the session's history and new text."""

    kv: SessionKv = field(default_factory=lambda: SessionKv(""))


@dataclass(frozen=True, slots=True)
class StepPrefill:
    """`PrefillCost` by the steps of this model on this device, chunk by chunk."""

    cost: StepCost
    chunk_tokens: int

    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        seconds = 0.0
        while num_tokens > 0:
            num = min(num_tokens, self.chunk_tokens)
            num_tokens -= num
            seconds += self.cost.step_s((Chunk(num, num_context_tokens, 0, num_tokens == 0),))
            num_context_tokens += num
        return seconds


class _Unasked:
    """Foretells nothing: nobody asks where requests start in order."""

    def guess(self, arrival: Arrival) -> LengthGuess:
        return LengthGuess(1 << 20, 1 << 20, "none")

    def ended(self, arrival: Arrival) -> None: ...


@dataclass(slots=True, eq=False)
class _Guess:
    """An advisory. arrival_s: lower bound, None if nobody can tell."""

    kv: SessionKv
    issued_s: float
    arrival_s: float | None
    priority: int
    is_copying: bool = False


class SessionNode(Node):
    """One device with its model, for sessions.

    Args:
        host: the tiers, None without; restore: load, wait or compute.
        has_cache: KV of ended requests stays on the device while there is room.
        on_end: called with each request that ended.
    """

    def __init__(
        self,
        clock: Clock,
        cost: StepCost,
        policy: QueuePolicy,
        *,
        host: HostTiers | None,
        restore: RestorePolicy,
        has_cache: bool,
        on_end: Callable[[Request, float], None],
        adapter_ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(clock, cost, VLLM, policy, _Unasked(), adapter_ranks=adapter_ranks)
        self.host = host
        self.link = SharedLink(clock, cost.gpu.achieved_link_bytes_per_s, cost.gpu.load_setup_s)
        self.cached_blocks = 0
        self.block_bytes = BLOCK_TOKENS * cost.model.kv_bytes_per_token
        self._restore_policy, self._has_cache, self._on_end = restore, has_cache, on_end
        self._token_prefill_s = cost.prefill_s(VLLM.step_tokens) / VLLM.step_tokens
        self._cache: OrderedDict[str, SessionKv] = OrderedDict()
        self._kv: dict[str, SessionKv] = {}  # by request
        self._held: dict[str, Turn] = {}
        self._pinned: set[str] = set()
        self._loads: dict[
            str, Both
        ] = {}  # KV on its way to the device for requests that have started: to host memory, and from there
        self._overdue_since_s: float | None = None
        self._guesses: dict[str, _Guess] = {}  # by session
        self._cold: set[str] = set()  # of them, those not whole on the device
        self._will_look = False

    @property
    def num_requests(self) -> int:
        """That came and have not ended."""
        return len(self.waiting) + len(self.running) + len(self._held)

    @property
    def held(self) -> Collection[Turn]:
        """Turns that came and wait for their KV."""
        return self._held.values()

    def tail_tokens(self, turn: Turn) -> int:
        """Of a held turn, that have no KV anywhere."""
        return max(turn.num_prompt_tokens - turn.kv.saved_blocks * BLOCK_TOKENS, 1)

    # -- advisories ----------------------------------------------------------------------------------------------------

    def advise(self, kv: SessionKv, arrival_s: float | None, priority: int, now: float) -> None:
        """A request of this session will come here. arrival_s: not before, on the clock; None: nobody can tell."""
        if self.host is None or kv.host is None:
            return
        self._guesses[kv.session_id] = guess = _Guess(kv, now, arrival_s, priority)
        kv.num_pins += 1
        kv.expected_s = now if arrival_s is None else arrival_s
        if kv.session_id in self._cache:
            self._cache.move_to_end(kv.session_id)
        if not self._is_warm(kv):
            self._cold.add(kv.session_id)
        due = due_s(self._guess_facts(guess))
        if due is not None and due > now:
            self.clock.at(due, self._promote)
        self.host.stage(kv, self._promote, now)

    def retract(self, kv: SessionKv) -> None:
        """It will not come here after all."""
        if self._guesses.pop(kv.session_id, None) is not None:
            self._cold.discard(kv.session_id)
            kv.num_pins -= 1
            kv.expected_s = None

    def _is_warm(self, kv: SessionKv) -> bool:
        return kv.device is self and kv.device_blocks >= kv.saved_blocks

    def _num_cached(self, kv: SessionKv) -> int:
        """Leading blocks of it that are cached here."""
        return kv.device_blocks if kv.device is self else 0

    def _guess_facts(self, guess: _Guess) -> GuessFacts:
        assert self.host is not None
        num_bytes = guess.kv.saved_blocks * self.block_bytes
        copy_s = self.link.alone_s(num_bytes)
        coming = self.host.coming(guess.kv)
        return GuessFacts(
            name=guess.kv.session_id,
            tenant="",
            num_blocks=guess.kv.saved_blocks,
            probability=1.0,
            priority=guess.priority,
            arrival_s=guess.arrival_s,
            issued_s=guess.issued_s,
            saved_s=copy_s + coming.left_bytes / coming.bytes_per_s,
            copy_s=copy_s,
        )

    def _promote(self, now: float) -> None:
        """Bring expected sessions up as far as they may come."""
        assert self.host is not None
        if not any(not self._guesses[name].is_copying for name in self._cold):
            return
        facts = [self._guess_facts(guess) for guess in self._guesses.values()]
        for target in plan(facts, self.free_blocks, self.num_blocks, now):
            guess = self._guesses[target.name]
            if target.name in self._cold and not guess.is_copying and self.host.is_whole(guess.kv):
                self._copy_up(guess, target.num_device_blocks)

    def _look_after(self, now: float) -> None:
        self._will_look = False
        self._promote(now)

    def _copy_up(self, guess: _Guess, goal: int) -> None:
        """The next piece of a session to the device."""
        kv = guess.kv
        start = self._num_cached(kv)
        num = min(goal - start, PIECE_BLOCKS)
        if num <= 0:
            return
        guess.is_copying = True

        def copied(now: float) -> None:
            guess.is_copying = False
            if self._guesses.get(kv.session_id) is not guess:
                return
            if start == self._num_cached(kv):
                self._put(kv, start + num, now)
            if self._is_warm(kv):
                self._cold.discard(kv.session_id)
            else:
                self._copy_up(guess, goal)

        self.link.transfer(num * self.block_bytes, copied)

    # -- requests ------------------------------------------------------------------------------------------------------

    def arrive(self, turn: Turn) -> None:
        """A request comes now. It is held back while its KV is on its way and waiting for it is faster than computing it."""
        now, kv, request_id = self.clock.now, turn.kv, turn.request_id
        self._kv[request_id] = kv
        if self.host is not None:
            self.host.returns.came(kv.session_id, now)
        kv.last_used_s = now
        kv.expected_s = None
        if self._guesses.pop(kv.session_id, None) is not None:
            self._cold.discard(kv.session_id)
            self._pinned.add(request_id)
        self.tally.counts["known_blocks"] += kv.saved_blocks
        if self.host is None or kv.host is None:
            self.submit(turn)
            return
        self._pin(request_id)
        self._held[request_id] = turn
        if not self._is_warm(kv):
            # Asks at once if it is there.
            self.host.stage(kv, lambda now: self._look(turn, now), now)
        self._look(turn, now)

    def _look(self, turn: Turn, now: float) -> None:
        if turn.request_id not in self._held:
            return
        decision = self._decide_restore(turn, self._usable_blocks(turn.kv, turn.num_prompt_tokens), now)
        if decision is not None and decision.action is Action.WAIT:
            self.clock.at(now + max(decision.expected_s, MIN_LOOK_S), lambda now: self._look(turn, now))
            return
        del self._held[turn.request_id]
        self.submit(turn)

    def _usable_blocks(self, kv: SessionKv, num_tokens: int) -> int:
        """Leading blocks on the device. The last token is computed in any case."""
        return min(self._num_cached(kv), (num_tokens - 1) // BLOCK_TOKENS)

    def _decide_restore(
        self, arrival: Arrival, num_device: int, now: float, num_tokens: int = 0
    ) -> RestoreDecision | None:
        """Of what lies behind the device's blocks; None if there is nothing. num_tokens: of the prompt, with what was answered."""
        host, kv = self.host, self._kv[arrival.request_id]
        num_tokens = num_tokens or arrival.num_prompt_tokens
        num_blocks = min(kv.saved_blocks, (num_tokens - 1) // BLOCK_TOKENS) - num_device
        if host is None or kv.host is None or num_blocks <= 0:
            return None
        is_whole, coming = host.is_whole(kv), host.coming(kv)
        waited_s = now - arrival.at_s
        return self._restore_policy.decide(
            RestoreFacts(
                num_blocks=num_blocks,
                num_ready_blocks=num_blocks if is_whole else 0,
                num_tail_tokens=num_tokens - (num_device + num_blocks) * BLOCK_TOKENS,
                num_context_tokens=num_device * BLOCK_TOKENS,
                block_size_tokens=BLOCK_TOKENS,
                block_bytes=self.block_bytes,
                num_layers=host.num_layers,
                num_ready_layers=host.ready_layers(kv),
                disk_bytes_done=int(waited_s * coming.bytes_per_s),
                disk_bytes_left=coming.left_bytes,
                disk_bytes_ahead=coming.ahead_bytes,
                waited_s=waited_s,
                prefill_s_per_token=self._token_prefill_s,
                disk_bytes_per_s=coming.bytes_per_s,
                host_bytes_per_s=self.link.bytes_per_s / (self.link.num_transfers + 1),
            )
        )

    def start_tokens(self, request: Request) -> int:
        kv = self._kv[request.arrival.request_id]
        num_blocks = self._usable_blocks(kv, request.num_tokens)
        if self.host is not None and self.host.is_whole(kv):
            num_blocks = max(num_blocks, min(kv.saved_blocks, (request.num_tokens - 1) // BLOCK_TOKENS))
        return request.num_tokens - num_blocks * BLOCK_TOKENS

    def _found_tokens(self, request: Request, now: float) -> int:
        """It starts: take over what the device has of it, and begin to load what is worth loading."""
        request_id = request.arrival.request_id
        kv = self._kv[request_id]
        num_device = self._usable_blocks(kv, request.num_tokens)
        decision = self._decide_restore(request.arrival, num_device, now, request.num_tokens)
        if kv.device is not None:
            kv.device.drop(kv)
        num_loaded = 0
        if decision is not None and decision.action is Action.LOAD:
            num_loaded = decision.num_blocks
        if num_loaded:
            self._load(request_id, num_loaded, now)
        else:
            self._unpin(request_id)
        self.tally.counts["device_blocks"] += num_device
        self.tally.counts["loaded_blocks"] += num_loaded
        return (num_device + num_loaded) * BLOCK_TOKENS

    def _load(self, request_id: str, num_blocks: int, now: float) -> None:
        assert self.host is not None

        def came(now: float) -> None:
            if self._loads.get(request_id) is both:
                del self._loads[request_id]
                self._unpin(request_id)
                if self._overdue_since_s is not None:
                    self._end_step(now)

        self._pin(request_id)
        both = self._loads[request_id] = Both(came)
        self.host.stage(self._kv[request_id], both, now)
        self.link.transfer(num_blocks * self.block_bytes, both)

    def _pin(self, request_id: str) -> None:
        if request_id not in self._pinned:
            self._pinned.add(request_id)
            self._kv[request_id].num_pins += 1

    def _unpin(self, request_id: str) -> None:
        if request_id in self._pinned:
            self._pinned.remove(request_id)
            self._kv[request_id].num_pins -= 1

    def _leave(self, request: Request, now: float) -> None:
        request_id = request.arrival.request_id
        num_tokens = self.decoders.num_kv_tokens(request)
        if self._loads.pop(request_id, None) is not None:
            num_tokens = 0  # what has come of it is not known to be whole
        self._unpin(request_id)
        super()._leave(request, now)
        kv, num_blocks = self._kv[request_id], num_tokens // BLOCK_TOKENS
        if self._has_cache and num_blocks:
            self._put(kv, num_blocks, now)
        if self.host is not None:
            self.host.returns.left(kv.session_id, now)
            self.host.save(kv, num_blocks, now)

    def _end(self, request: Request, now: float) -> None:
        super()._end(request, now)
        del self._kv[request.arrival.request_id]
        # After this step, since what follows may come here again.
        self.clock.at(now, lambda now: self._on_end(request, now))
        if self._cold and not self._will_look:
            # Room has come free.
            self._will_look = True
            self.clock.at(now + LOOK_EVERY_S, self._look_after)

    # -- steps that wait for loads -------------------------------------------------------------------------------------

    def _end_step(self, now: float) -> None:
        """A step whose prompts' KV has not all come goes on until it has: the forward pass waits for each layer."""
        assert self._step is not None
        if any(request.arrival.request_id in self._loads for request, _ in self._step.parts):
            if self._overdue_since_s is None:
                self._overdue_since_s = now
            return
        if self._overdue_since_s is not None:
            self.tally.stalled_s += now - self._overdue_since_s
            self._overdue_since_s = None
        super()._end_step(now)

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def _empty_blocks(self) -> int:
        return self.free_blocks - self.cached_blocks

    def _take(self, num_blocks: int) -> None:
        self._overwrite(num_blocks)
        super()._take(num_blocks)

    def _overwrite(self, num_blocks: int) -> None:
        """Have so many blocks empty."""
        missing = num_blocks - self._empty_blocks
        while missing > 0 and self._cache:
            # Of who was used least recently, the last blocks first.
            name, kv = next(iter(self._cache.items()))
            num = min(missing, kv.device_blocks)
            missing -= num
            self._resize(kv, kv.device_blocks - num)
            if name in self._guesses:
                self._cold.add(name)

    def _put(self, kv: SessionKv, num_blocks: int, now: float) -> None:
        """Have its first blocks cached here, as far as there is room."""
        if kv.device is not None and kv.device is not self:
            kv.device.drop(kv)
        kv.device = self
        self._cache[kv.session_id] = kv
        self._cache.move_to_end(kv.session_id)
        num_new = max(min(num_blocks, self.free_blocks) - kv.device_blocks, 0)
        self._overwrite(num_new)
        self._resize(kv, kv.device_blocks + num_new)

    def _resize(self, kv: SessionKv, num_blocks: int) -> None:
        self.cached_blocks += num_blocks - kv.device_blocks
        kv.device_blocks = num_blocks
        if num_blocks == 0:
            kv.device = None
            del self._cache[kv.session_id]

    def drop(self, kv: SessionKv) -> None:
        """Its cached blocks are of no use any more, or somebody holds them now."""
        self._resize(kv, 0)

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self.cached_blocks == sum(kv.device_blocks for kv in self._cache.values()), "cached blocks"
        assert all(kv.device is self and kv.device_blocks for kv in self._cache.values()), "whose cache"
        if self.host is not None:
            self.host.check_invariants()
