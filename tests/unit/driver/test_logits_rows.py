"""Each call for logits is computed with the adapters of its own rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine_bridge.driver.corrections import logits_rows  # noqa: E402
from engine_bridge.driver.corrections.logits_rows import LogitsRows  # noqa: E402


class Mapping(NamedTuple):
    index_mapping: tuple[int, ...]
    prompt_mapping: tuple[int, ...]
    is_prefill: bool = False


class Model:
    """Notes with which plan each of its calls was made."""

    def __init__(self) -> None:
        self.planned: tuple[int, ...] = ()
        self.calls: list[tuple[int, ...]] = []

    def set_adapter_mapping(self, mapping: Mapping) -> None:
        self.planned = mapping.prompt_mapping

    def compute_logits(self, hidden_states: Any) -> Any:
        assert len(self.planned) == hidden_states.size(0)
        self.calls.append(self.planned)
        return hidden_states


class Runner:
    """The parts of vLLM's model runners that ask for logits."""

    def __init__(self) -> None:
        self.model = Model()

    def _set_active_loras(self, of_sampled: Any, of_tokens: Any, requests: Any, mapping_type: Any) -> None:
        self.model.set_adapter_mapping(Mapping(tuple(of_tokens), tuple(of_sampled)))


def watched(runner: Any) -> LogitsRows:
    rows = LogitsRows(runner.model, Mapping)
    logits_rows._note_steps(runner, rows, "language")
    logits_rows._plan_logits(runner.model, rows)
    return rows


class Older(Runner):
    """Samples first, then asks for rows of the prompts of `prompts`: pairs of the first and the last."""

    prompts: tuple[tuple[int, int], ...] = ()

    def step(self, of_tokens: list[int], sampled: list[int]) -> None:
        self._set_active_loras([of_tokens[at] for at in sampled], of_tokens, None, "language")
        hidden = torch.randn(len(of_tokens) + 3, 4)[1:]  # padded, and a part of larger memory
        self.model.compute_logits(hidden[sampled])
        self._get_prompt_logprobs_dict(hidden[: len(of_tokens)], {})

    def _get_prompt_logprobs_dict(self, hidden_states: Any, num_scheduled_tokens: Any) -> None:
        for first, stop in self.prompts:
            self.model.compute_logits(hidden_states[first:stop])


TOKENS = [0, 0, 0, 7, 7, 9, 9, 9, 9]


def test_rows_of_prompts_have_their_own_adapters() -> None:
    runner = Older()
    rows = watched(runner)
    logits_rows._note_prompt_rows(runner, rows)
    runner.prompts = ((0, 2), (3, 4), (5, 9), (0, 9))
    runner.step(TOKENS, [2, 4, 8])
    assert runner.model.calls == [(0, 7, 9), (0, 0), (7,), (9, 9, 9, 9), tuple(TOKENS)]


def test_the_next_step_samples_with_its_own_plan_after_prompts() -> None:
    runner = Older()
    rows = watched(runner)
    logits_rows._note_prompt_rows(runner, rows)
    runner.prompts = ((3, 5),)
    runner.step(TOKENS, [2, 4, 8])
    runner.prompts = ()
    runner.step([9, 0], [0, 1])
    assert runner.model.calls[-1] == (9, 0)


def test_an_encoders_plan_leaves_the_language_models_alone() -> None:
    runner = Older()
    watched(runner)
    runner._set_active_loras([1, 2], [1, 2], None, "language")
    runner._set_active_loras([5], [5, 5], None, "tower")
    runner.model.set_adapter_mapping(Mapping((1, 2), (1, 2)))  # of the language model's own wrapper
    runner.model.compute_logits(torch.randn(2, 4))
    assert runner.model.calls == [(1, 2)]


class Newer(Runner):
    """Computes a row for each drafted token besides, and then the prompts' in pieces."""

    def sample_tokens(self, grammar_output: Any) -> None:
        hidden = torch.randn(len(TOKENS), 4)
        batch = SimpleNamespace(cu_num_logits_np=np.array([0, 1, 3, 6]), logits_indices=[2, 3, 4, 6, 7, 8])
        self.sample(hidden, batch, grammar_output)
        for first in range(0, len(TOKENS), 5):
            self.model.compute_logits(hidden[first : first + 5])

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> None:
        self.model.compute_logits(hidden_states[input_batch.logits_indices])


def test_drafted_tokens_have_the_adapter_of_their_request() -> None:
    runner = Newer()
    rows = watched(runner)
    logits_rows._note_sampled_rows(runner, rows)
    runner._set_active_loras([0, 7, 9], TOKENS, None, "language")
    runner.sample_tokens(None)
    assert runner.model.calls == [(0, 7, 7, 9, 9, 9), tuple(TOKENS[:5]), tuple(TOKENS[5:])]
    assert rows.hidden_states is None
