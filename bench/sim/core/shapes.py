"""How an engine forms its steps, and what its device has for requests."""

from __future__ import annotations

from dataclasses import dataclass

from bench.sim.core.steps import StepCost

BLOCK_TOKENS = 16
# What a step's activations take. Chosen.
ACTIVATION_BYTES = 10**9


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine forms its steps.

    step_tokens: in one step at most. max_running: requests. is_mixed: prompts are computed in chunks beside those that decode; else whole, in steps
    of their own.
    """

    name: str
    step_tokens: int
    max_running: int
    is_mixed: bool = True


VLLM = Shape("vllm", 2048, 256)
"""vLLM's default step and number of requests."""


def pool_blocks(cost: StepCost) -> int:
    """Blocks for KV: what the weights and a step's activations leave of the memory. Raises ValueError if that is nothing."""
    gpu, model = cost.gpu, cost.model
    left = int(gpu.memory_bytes * gpu.usable_share) - model.weight_bytes - ACTIVATION_BYTES
    num_blocks = left // (BLOCK_TOKENS * model.kv_bytes_per_token)
    if num_blocks < 1:
        raise ValueError(f"{model.name} does not fit {gpu.name}")
    return num_blocks
