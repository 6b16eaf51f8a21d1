from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from engine_bridge.driver.corrections import logits_rows
from engine_bridge.driver.corrections.logits_rows import LogitsRows


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


TOKENS = [0, 0, 0, 7, 7, 9, 9, 9, 9]


class Newer(Runner):
    """Computes a row for each drafted token besides, and then the prompts' in pieces."""

    def sample_tokens(self, grammar_output: Any) -> None:
        hidden = torch.randn(len(TOKENS) + 3, 4)[1:]  # padded, and a part of larger memory
        batch = SimpleNamespace(cu_num_logits_np=np.array([0, 1, 3, 6]), logits_indices=[2, 3, 4, 6, 7, 8])
        self.sample(hidden, batch, grammar_output)
        for first in range(0, len(TOKENS), 5):
            self.model.compute_logits(hidden[first : min(first + 5, len(TOKENS))])

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> None:
        self.model.compute_logits(hidden_states[input_batch.logits_indices])


def test_drafted_tokens_have_the_adapter_of_their_request_and_rows_of_prompts_their_own() -> None:
    """vLLM's older runner, of every CPU engine, is asked by tests/integration/test_mixed_batch.py."""
    runner = Newer()
    rows = watched(runner)
    logits_rows._note_sampled_rows(runner, rows)
    runner._set_active_loras([0, 7, 9], TOKENS, None, "language")
    runner.sample_tokens(None)
    assert runner.model.calls == [(0, 7, 7, 9, 9, 9), tuple(TOKENS[:5]), tuple(TOKENS[5:])]
    assert rows.hidden_states is None
    runner._set_active_loras([9, 0], [9, 0], None, "language")
    runner.model.compute_logits(torch.randn(2, 4))
    assert runner.model.calls[-1] == (9, 0), "the next step has its own plan"


def test_an_encoders_plan_leaves_the_language_models_alone() -> None:
    runner = Runner()
    watched(runner)
    runner._set_active_loras([1, 2], [1, 2], None, "language")
    runner._set_active_loras([5], [5, 5], None, "tower")
    runner.model.set_adapter_mapping(Mapping((1, 2), (1, 2)))  # of the language model's own wrapper
    runner.model.compute_logits(torch.randn(2, 4))
    assert runner.model.calls == [(1, 2)]
