from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import pytest

from engine_bridge.driver.engine import warm_up as module
from engine_bridge.driver.engine.warm_up import warm_up

LAZY_S, STEP_S, TOKEN_S = 5.0, 0.01, 0.001
BLOCK_TOKENS = 16


class Engine:
    """As vLLM's to the warm-up: a prompt in a step, then a token in each; what a prompt begins with like another is cached.

    schedules_ahead: a step returns before it has been computed while there is another one to schedule.
    """

    def __init__(self, *, schedules_ahead: bool) -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=2048))
        self.now = 0.0
        self.tiers: Any = None
        self.seen_paused: set[bool] = set()
        self._ahead = schedules_ahead
        self._lazy_s = LAZY_S
        self._cached: list[list[int]] = []
        self._to_schedule: list[float] = []  # steps, by what each takes
        self._under_way: list[float] = []

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        if params.structured_outputs is not None:
            raise ValueError("no grammars here")
        ids = prompt["prompt_token_ids"]
        num_cached = max((_num_common(ids, other) for other in self._cached), default=0)
        num_cached = min(num_cached, len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self._cached.append(ids)
        self._to_schedule = [self._lazy_s + STEP_S + (len(ids) - num_cached) * TOKEN_S, STEP_S]
        self._lazy_s = 0.0

    def has_requests(self) -> bool:
        return bool(self._to_schedule or self._under_way)

    def step(self) -> list[str]:
        self.seen_paused.add(self.tiers.is_paused)
        if self._to_schedule:
            self._under_way.append(self._to_schedule.pop(0))
            if self._ahead and len(self._under_way) < 2:
                return []
        self.now += self._under_way.pop(0)
        return ["a token"]

    def reset_prefix_cache(self) -> None:
        self._cached = []


def _num_common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.parametrize("schedules_ahead", [False, True])
def test_the_first_table_knows_prefill_times(monkeypatch: pytest.MonkeyPatch, schedules_ahead: bool) -> None:
    engine = Engine(schedules_ahead=schedules_ahead)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: engine.now))
    tiers: Any = SimpleNamespace(is_paused=False)
    engine.tiers = tiers
    steps = warm_up(engine, engine, tiers)
    assert engine.seen_paused == {True} and not tiers.is_paused, "prompts that will not come again"
    assert steps.step_s(0, 1, 0) == pytest.approx(STEP_S)
    assert steps.step_s(1024, 0, 0) == pytest.approx(STEP_S + 1024 * TOKEN_S)
