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

    schedules_ahead: a step returns before it has been computed while there is another one to schedule. held_up: a request whose prompt takes long.
    """

    def __init__(self, *, schedules_ahead: bool, held_up: str = "") -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=2048))
        self.now = 0.0
        self.tiers: Any = None
        self.adapters: set[int] = set()
        self.lora_config = SimpleNamespace(max_lora_rank=4)
        self.prompts_with_adapter: list[int] = []
        worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=self))
        executor = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
        self.engine_core = SimpleNamespace(engine_core=executor)
        self.seen_paused: set[bool] = set()
        self._ahead, self._held_up = schedules_ahead, held_up
        self._lazy_s = LAZY_S
        self._cached: list[list[int]] = []
        self._to_schedule: list[float] = []  # steps, by what each takes
        self._under_way: list[float] = []

    def add_request(self, request_id: str, prompt: Any, params: Any, lora_request: Any = None) -> None:
        if lora_request is not None:
            assert lora_request.lora_int_id in self.adapters
            self.prompts_with_adapter.append(len(prompt["prompt_token_ids"]))
        ids = prompt["prompt_token_ids"]
        assert 0 < len(ids) < self.vllm_config.model_config.max_model_len
        if params.structured_outputs is not None:
            raise ValueError("no grammars here")
        num_cached = max((_num_common(ids, other) for other in self._cached), default=0)
        num_cached = min(num_cached, len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self._cached.append(ids)
        extra_s = self._lazy_s + LAZY_S * (request_id == self._held_up)
        self._to_schedule = [extra_s + STEP_S + (len(ids) - num_cached) * TOKEN_S, STEP_S]
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

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        return default_rank

    def add_dummy_lora(self, lora_request: Any, rank: int) -> None:
        assert rank <= self.lora_config.max_lora_rank
        self.adapters.add(lora_request.lora_int_id)

    def remove_all_adapters(self) -> None:
        self.adapters.clear()


def _num_common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.parametrize("held_up", ["", "warm-up-1", "warm-up-2"])
@pytest.mark.parametrize("schedules_ahead", [False, True])
def test_the_first_table_knows_prefill_times(
    monkeypatch: pytest.MonkeyPatch, schedules_ahead: bool, held_up: str
) -> None:
    engine = Engine(schedules_ahead=schedules_ahead, held_up=held_up)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: engine.now))
    tiers: Any = SimpleNamespace(is_paused=False)
    engine.tiers = tiers
    steps = warm_up(engine, engine, tiers)
    assert engine.seen_paused == {True} and not tiers.is_paused, "prompts that will not come again"
    assert steps.step_s(0, 1, 0) == pytest.approx(STEP_S)
    assert steps.step_s(1024, 0, 0) == pytest.approx(STEP_S + 1024 * TOKEN_S)
    assert not engine.prompts_with_adapter


@pytest.mark.parametrize(
    ("max_model_len", "lengths"), [(2048, [9, 16, 137, 208, 521, 528]), (130, [9, 16, 128])]
)
def test_on_a_gpu_the_kernels_of_adapters_are_compiled_before_anybody_waits_for_them(
    max_model_len: int, lengths: list[int]
) -> None:
    engine = Engine(schedules_ahead=True)
    engine.vllm_config.model_config.max_model_len = max_model_len
    engine.tiers = tiers = SimpleNamespace(is_paused=False)
    warm_up(engine, engine, tiers, with_adapter=True)
    assert engine.prompts_with_adapter == lengths
    assert not engine.adapters, "what serves adapters finds none"
    assert engine.seen_paused == {True}


@pytest.mark.parametrize("max_model_len", [2, 3, 4])
def test_the_shortest_contexts_are_warmed_up_with_a_token(max_model_len: int) -> None:
    engine = Engine(schedules_ahead=False)
    engine.vllm_config.model_config.max_model_len = max_model_len
    engine.tiers = tiers = SimpleNamespace(is_paused=False)
    warm_up(engine, engine, tiers, with_adapter=True)
    assert set(engine.prompts_with_adapter) == {max(1, max_model_len - 2)}
