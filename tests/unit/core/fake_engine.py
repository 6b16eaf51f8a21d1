"""An engine as the dispatcher sees one: blocks of memory, slots, and requests that hold some."""

from collections.abc import Callable
from typing import Any

from engine_bridge.core.scheduling.dispatcher import Dispatcher, StepPlan, StepView
from engine_bridge.core.scheduling.refits import Refits, at_once
from engine_bridge.policy.scheduling.policies import POLICIES
from engine_bridge.policy.scheduling.queue_policy import QueuePolicy, Waiting
from engine_bridge.protocol.engine_request import LengthGuess

BLOCK_TOKENS, NUM_BLOCKS = 16, 40
NUM_TOKENS = BLOCK_TOKENS * NUM_BLOCKS


def arrival(request_id: str, num_prompt_tokens: int = 16, p50: int = 16, **fields: Any) -> Waiting:
    guess = fields.pop("guess", LengthGuess(p50, 4 * p50, "test"))
    return Waiting(request_id=request_id, num_prompt_tokens=num_prompt_tokens, guess=guess, **fields)


class FakeEngine:
    """Makes a token for each running request in each step; preempts who is last when blocks lack."""

    def __init__(self, policy: str | QueuePolicy = "fcfs", num_slots: int = 4, **options: Any) -> None:
        self.now = 0.0
        self.num_slots, self.num_blocks = num_slots, options.pop("num_blocks", NUM_BLOCKS)
        self.tokens: dict[str, int] = {}
        self.prompts: dict[str, int] = {}
        self.running: list[str] = []
        self.unready: set[str] = set()
        self.cached: dict[str, int] = {}
        self.num_looks = 0
        self.missing_bytes: dict[int, int] = {}
        self.held_back: set[int] = set()
        self.free_adapter_bytes: int | None = None
        self.refit_predictor: Callable[[], None] = lambda: None
        refits = options.pop("refits", None) or Refits(at_once, lambda: self.refit_predictor(), now=0.0)
        made = POLICIES[policy](NUM_TOKENS) if isinstance(policy, str) else policy
        self.own = Dispatcher(made, self, refits, num_tokens=NUM_TOKENS, **options)

    # -- what the dispatcher asks ------------------------------------------------------------------------------------

    def is_ready(self, request_id: str) -> bool:
        return request_id not in self.unready

    def is_held_back(self, adapter_id: int) -> bool:
        return adapter_id in self.held_back

    def num_tokens(self, request_id: str) -> int:
        return self.tokens[request_id]

    def start_blocks(self, request_id: str) -> int:
        return min(self.held_blocks(request_id), self.num_blocks)

    def shared_tokens(self, request_id: str) -> int:
        return 0

    def held_blocks(self, request_id: str) -> int:
        return self.tokens[request_id] // BLOCK_TOKENS + 1

    def num_cached_tokens(self, request_id: str) -> int:
        self.num_looks += 1
        return self.cached.get(request_id, 0)

    def missing_adapter_bytes(self, adapter_id: int) -> int:
        return self.missing_bytes.get(adapter_id, 0)

    # -- what happens ------------------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        return self.num_blocks - sum(map(self.held_blocks, self.running))

    def ask(self, request: Waiting) -> None:
        self.tokens[request.request_id] = self.prompts[request.request_id] = request.num_prompt_tokens
        self.own.arrived(request, self.now)

    def begin(self) -> StepPlan:
        view = StepView(
            running=[(each, self.tokens[each], self.tokens[each] - 1) for each in self.running],
            free_blocks=self.free_blocks,
            num_slots=self.num_slots - len(self.running),
            adapter_bytes=self.free_adapter_bytes,
        )
        plan = self.own.begin_step(view, self.now)
        for request_id in plan.squash:
            self.own.squashed(request_id)
            self.preempt(request_id)
        for request_id in plan.pause:
            self.preempt(request_id)
        return plan

    def step(self, num_refused: int = 0, num_tokens: int = 1, step_s: float = 0.1) -> StepPlan:
        """num_refused: of those that were to start, the last so many do not after all."""
        plan = self.begin()
        started = plan.request_ids[: len(plan.request_ids) - num_refused]
        self.running += started
        self.own.end_step(started, self.now)
        for request_id in list(self.running):
            self.grow(request_id, num_tokens)
        self.now += step_s
        return plan

    def grow(self, request_id: str, num_tokens: int) -> None:
        if request_id not in self.running:
            return
        self.tokens[request_id] = min(self.tokens[request_id] + num_tokens, NUM_TOKENS - 1)
        while self.free_blocks < 0:
            self.preempt(self.running[-1])

    def preempt(self, request_id: str) -> None:
        self.running.remove(request_id)
        self.own.preempted(request_id)

    def end(self, request_id: str, is_finished: bool = True) -> None:
        if request_id in self.running:
            self.running.remove(request_id)
        num_output = self.tokens.pop(request_id) - self.prompts[request_id]
        self.own.ended(request_id, num_output, is_finished, self.now)
