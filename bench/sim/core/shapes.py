"""How an engine forms its steps, and what its device has for requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.sim.core.steps import StepCost

BLOCK_TOKENS = 16
# What a step's activations take. Chosen.
ACTIVATION_BYTES = 10**9


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine forms its steps.

    step_tokens: in one step at most, None for a sixth of the memory's. Who may start and finds none left waits until it may again. is_mixed: prompts
    are computed in chunks beside those that decode; else whole, in steps of their own. reserves_answer: a start takes blocks for the predicted
    answer, too. loads_block: while the adapter of a request that has started is on its way, no step runs. assists: its prompt is computed
    meanwhile, with a host's help (`StepCost.assistant`). swaps_block: no step runs while KV comes back from host memory. writes_through: KV is in
    host memory as soon as it is made, so that whoever is preempted goes at once; else it is copied out then, and the next step waits for that,
    because it needs the blocks. max_step_s: prompts are computed in steps of about so long, as policy/pacing has it; 0: of any length.
    """

    name: str
    step_tokens: int | None
    is_mixed: bool
    reserves_answer: bool
    loads_block: bool
    max_running: int
    assists: bool = False
    swaps_block: bool = False
    writes_through: bool = False
    finds_cached: bool = False
    max_step_s: float = 0.0


SLORA = Shape("s-lora", None, False, True, True, 1000)
"""Source: S-LoRA/S-LoRA at 18895fa, slora/server/router: new requests' adapters are awaited before their prefill, which is a step of its own;
a request joins if it fits with its whole answer; a batch of prompts has a sixth of all tokens. Departs in joining before every step (Chameleon §4),
not every tenth, and in that answers are reserved as predicted, as nobody knows them."""
VLLM = Shape("vllm", 2048, True, False, False, 256, finds_cached=True)
"""vLLM's default step and number of requests; a request whose adapter is on its way waits for it alone, as the live engine has it."""
VLLM_0_2 = Shape("vllm 0.2", 2048, False, False, True, 256, swaps_block=True)
"""vLLM 0.2.5, which AdaptiveLLM is built on: prompts in steps of their own, and copies between device and host take turns with steps (AdaptiveLLM §6,
which leaves doing both at once for later). Departs in that prompts of one step are not padded to the longest, and no block is kept free at starts."""
OVERTURE = replace(VLLM, name="live engine", writes_through=True)
"""The live engine: vLLM's steps; KV is written through. Departs in that a load goes beside the steps, and the rest of its request is computed after
it; live, both go in one step, layer by layer. For a machine that was measured, `max_step_s` can be the live engine's."""


def pool_blocks(cost: StepCost) -> int:
    """Blocks for KV and adapters: what the weights and a step's activations leave of the memory. Raises ValueError if that is nothing."""
    gpu, model = cost.gpu, cost.model
    left = int(gpu.memory_bytes * gpu.usable_share) - model.weight_bytes - ACTIVATION_BYTES
    num_blocks = left // (BLOCK_TOKENS * model.kv_bytes_per_token)
    if num_blocks < 1:
        raise ValueError(f"{model.name} does not fit {gpu.name}")
    return num_blocks
