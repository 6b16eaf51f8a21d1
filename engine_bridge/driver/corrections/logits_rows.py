"""Which adapter computes which row of logits.

vLLM tells its LoRA layers once a step which adapters the sampled rows have. A step that was asked for log probabilities of prompt tokens computes
logits of these, too, with the same plan: it has other adapters and other lengths, so deltas go to rows that do not exist. The newer model runner of a
drafting engine plans one row for each request, where it also computes a row for each drafted token.

Here each call of `compute_logits` has the plan of its own rows. Rows of the step's tokens are recognised because they lie in the memory of its hidden
states; sampled rows are copies.

Use: `watch(runner)` once its model is loaded, on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Adapters = tuple[int, ...]
"""An adapter's id for each row, 0 for the base model."""


class LogitsRows:
    """The adapters of one step's rows.

    Args:
        manager: vLLM's LoRAModelManager; its layers compute with the mapping that it was given last.
        mapping_class: vLLM's LoRAMapping.
    """

    def __init__(self, manager: Any, mapping_class: Any) -> None:
        self._manager, self._mapping_class = manager, mapping_class
        self._of_tokens: Adapters = ()
        self._of_sampled: Adapters = ()
        self._planned: Adapters = ()
        self.hidden_states: torch.Tensor | None = None
        """The hidden states of the step's tokens, one row for each, while logits may be asked for of some of them."""

    def begin_step(self, of_sampled: Sequence[int], of_tokens: Sequence[int]) -> None:
        """Note the rows of the step of which vLLM has told its layers: an adapter's id for each sampled row and for each token."""
        self._of_tokens = tuple(of_tokens)
        self._of_sampled = self._planned = tuple(of_sampled)
        self.hidden_states = None

    def sample(self, num_rows: Sequence[int]) -> None:
        """Note that the step samples `num_rows[i]` rows for its request i, where vLLM has told its layers of one."""
        pairs = zip(self._of_sampled, num_rows, strict=False)
        self._of_sampled = tuple(adapter for adapter, count in pairs for _ in range(count))

    def plan(self, rows: torch.Tensor) -> None:
        """Make the layers compute logits of these hidden states with the rows' own adapters."""
        adapters = self._adapters_of(rows)
        if adapters != self._planned:
            self._manager.set_adapter_mapping(self._mapping_class(self._of_tokens, adapters, is_prefill=True))
            self._planned = adapters

    def _adapters_of(self, rows: torch.Tensor) -> Adapters:
        whole = self.hidden_states
        if whole is None or rows.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return self._of_sampled
        first = (rows.storage_offset() - whole.storage_offset()) // whole.stride(0)
        return self._of_tokens[first : first + rows.size(0)]


def watch(runner: Any) -> None:
    """Make each call for logits of this model runner with LoRA compute its rows with their own adapters."""
    from engine_bridge.driver.vllm_api import LoRAMapping, LoRAMappingType

    if not hasattr(runner.model, "compute_logits"):
        return  # a pooling model, which computes no logits
    rows = LogitsRows(runner.lora_manager._adapter_manager, LoRAMapping)
    _note_steps(runner, rows, LoRAMappingType.LANGUAGE)
    _plan_logits(runner.model, rows)
    if hasattr(runner, "_get_prompt_logprobs_dict"):
        _note_prompt_rows(runner, rows)
    else:
        _note_sampled_rows(runner, rows)


def _note_steps(runner: Any, rows: LogitsRows, language: Any) -> None:
    stock = runner._set_active_loras

    def set_active_loras(
        prompt_lora_mapping: Any, token_lora_mapping: Any, lora_requests: Any, mapping_type: Any = language
    ) -> None:
        """Tell vLLM's layers of the step, and note its rows."""
        stock(prompt_lora_mapping, token_lora_mapping, lora_requests, mapping_type)
        if mapping_type == language:
            rows.begin_step(prompt_lora_mapping, token_lora_mapping)

    runner._set_active_loras = set_active_loras


def _plan_logits(model: Any, rows: LogitsRows) -> None:
    stock = model.compute_logits

    def compute_logits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Plan the rows, and compute their logits."""
        rows.plan(hidden_states)
        return stock(hidden_states, *args, **kwargs)

    model.compute_logits = compute_logits


def _note_prompt_rows(runner: Any, rows: LogitsRows) -> None:
    """Follow the prompt rows of vLLM's older model runner, which all CPU engines have."""
    stock = runner._get_prompt_logprobs_dict

    def get_prompt_logprobs_dict(hidden_states: torch.Tensor, num_scheduled_tokens: Any) -> Any:
        """Let logits be asked for of the step's tokens while vLLM collects log probabilities of prompts."""
        rows.hidden_states = hidden_states
        try:
            return stock(hidden_states, num_scheduled_tokens)
        finally:
            rows.hidden_states = None

    runner._get_prompt_logprobs_dict = get_prompt_logprobs_dict


def _note_sampled_rows(runner: Any, rows: LogitsRows) -> None:
    """Follow the rows of vLLM's newer model runner, which samples, and then asks for logits of prompt tokens before `sample_tokens` returns."""
    stock_sample, stock_sample_tokens = runner.sample, runner.sample_tokens

    def sample(hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        """Note how many rows each request samples, and sample."""
        rows.hidden_states = hidden_states
        rows.sample(np.diff(input_batch.cu_num_logits_np).tolist())
        return stock_sample(hidden_states, input_batch, grammar_output)

    def sample_tokens(grammar_output: Any) -> Any:
        """Sample, and let go of the step's hidden states afterwards."""
        try:
            return stock_sample_tokens(grammar_output)
        finally:
            rows.hidden_states = None

    runner.sample, runner.sample_tokens = sample, sample_tokens
