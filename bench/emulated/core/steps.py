"""What a step of the engine takes: max(compute, memory), the adapters' part, and a fixed overhead.

compute   2 FLOPs for each weight and token, and attention's 4 · hidden for each pair of tokens and layer
memory    the weights once, the KV that is attended to once, over the achieved bandwidth
adapters  over a prompt: their FLOPs at the rate of S-LoRA's kernels (`Gpu.lora_share`). In decoding: each request's adapter is read from memory
          for itself: with MBGMV as it is, with BGMV padded to the largest rank of the batch. Source: CaraServe §5, whose figures for both this
          meets (see tests).
assisted  what a host computes of a prompt's adapter while that is on its way to the device. In each layer it goes on beside the base model's own
          product with the same matrices; what takes longer holds up the rest of the layer, and calling costs. Source: CaraServe §4.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.emulated.core.hardware import AssistingHost, Gpu
from bench.emulated.core.models import Model
from engine_bridge.policy.costs.costs import StepTable

Kernel = Callable[[Mapping[int, int]], int]
"""What it reads of the adapters of a batch that decodes, in ranks; takes the number of requests by rank."""


def mbgmv(num_by_rank: Mapping[int, int]) -> int:
    """Return the ranks that S-LoRA's kernel reads: each adapter as it is."""
    return sum(rank * num for rank, num in num_by_rank.items())


def bgmv(num_by_rank: Mapping[int, int]) -> int:
    """Return the ranks that Punica's kernel reads: each adapter padded to the largest."""
    num = sum(num_by_rank.values())
    return num * max(rank for rank, count in num_by_rank.items() if count) if num else 0


KERNELS: dict[str, Kernel] = {"mbgmv": mbgmv, "bgmv": bgmv}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one prompt that a step computes, behind `num_context` that have their KV.

    rank: 0 without an adapter. is_last: gives a token. is_assisted: the host computes the adapter's part.
    """

    num_tokens: int
    num_context: int
    rank: int
    is_last: bool
    is_assisted: bool = False


class StepCost:
    """Seconds of steps of one model on one device. assistant: what helps it while adapters are on their way, None for nothing."""

    table: StepTable | None = None
    """What the live engine would go by; None: data sheets alone."""

    def __init__(
        self, gpu: Gpu, model: Model, kernel: Kernel = mbgmv, assistant: AssistingHost | None = None
    ) -> None:
        self.gpu, self.model, self.kernel, self.assistant = gpu, model, kernel, assistant
        flops = gpu.achieved_flops
        self._token_s = 2 * model.layer_weights / flops
        self._head_s = 2 * model.head_weights / flops
        self._pair_s = 4 * model.num_layers * model.hidden / flops
        self._weights_s = model.read_bytes / gpu.achieved_bytes_per_s
        self._kv_token_s = model.kv_bytes_per_token / gpu.achieved_bytes_per_s
        self._lora_token_s = 2 * model.lora_weights_per_rank / (gpu.flops * gpu.lora_share)
        self._lora_decode_s = model.lora_bytes(1) / gpu.achieved_bytes_per_s

    def step_s(
        self,
        chunks: Iterable[Chunk],
        num_decodes: int = 0,
        num_context: int = 0,
        sum_rank: int = 0,
    ) -> float:
        """Return the seconds of a step that computes these parts of prompts and one token for each of `num_decodes` requests.

        num_context: tokens of KV that the decoding requests attend to. sum_rank: ranks of their adapters, as the kernel reads them.
        """
        compute_s = num_decodes * (self._token_s + self._head_s) + num_context * self._pair_s
        memory_s = self._weights_s + num_context * self._kv_token_s
        lora_s = sum_rank * self._lora_decode_s
        num_requests = num_decodes
        assisted: list[Chunk] = []
        for chunk in chunks:
            num_requests += 1
            num, context = chunk.num_tokens, chunk.num_context
            compute_s += num * self._token_s + num * (context + num / 2) * self._pair_s
            compute_s += self._head_s * chunk.is_last
            memory_s += context * self._kv_token_s
            if chunk.is_assisted:
                assisted.append(chunk)
            else:
                lora_s += num * chunk.rank * self._lora_token_s
        base_s = max(compute_s, memory_s)
        if assisted:
            lora_s += self._assisted_s(assisted, base_s * self.model.adapted_share)
        return base_s + lora_s + self.gpu.step_s + num_requests * self.gpu.request_s

    def _assisted_s(self, chunks: Iterable[Chunk], hidden_s: float) -> float:
        """Return the seconds that assisting adds to a step. Chunks that need more cores than there are take turns."""
        assistant = self.assistant
        assert assistant is not None, "nothing to assist with"
        num_cores, longest_s = 0, 0.0
        for chunk in chunks:
            cores = -(-chunk.num_tokens // assistant.tokens_per_core)
            flops = 2 * self.model.lora_weights_per_rank * chunk.rank * chunk.num_tokens / cores
            num_cores += cores
            longest_s = max(longest_s, flops / assistant.achieved_core_flops)
        assistant_s = longest_s * max(num_cores / assistant.num_cores, 1.0)
        return max(assistant_s - hidden_s, 0.0) + assistant.call_s

    def prefill_s(self, num_tokens: int, rank: int = 0) -> float:
        """Return the seconds of a prompt alone."""
        return self.step_s((Chunk(num_tokens, 0, rank, True),))


# Grid of `with_table`. Chosen: a step's cost is nearly linear between these.
PREFILL_AXIS = (0, 1, 64, 128, 256, 512, 1024, 2048)
DECODE_AXIS = (0, 1, 8, 32, 64, 128, 256)
CONTEXT_AXIS = (0, 1 << 14, 1 << 16, 1 << 18, 1 << 20)


def with_table(cost: StepCost) -> StepCost:
    """Give a data sheet's cost the table that a live engine would go by, and return it."""

    def seconds(points: Sequence[tuple[int, int, int]]) -> list[float]:
        """Return the seconds of steps by tokens of prompts, decoding requests and their context tokens."""
        return [cost.step_s([Chunk(p, 0, 0, True)] if p else [], d, c) for p, d, c in points]

    cost.table = StepTable.of(seconds, PREFILL_AXIS, DECODE_AXIS, CONTEXT_AXIS)
    return cost


@dataclass(frozen=True, slots=True)
class StepPrefill:
    """`PrefillCost` by the steps of this model on this device, chunk by chunk."""

    cost: StepCost
    chunk_tokens: int

    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        """Return the seconds of computing these tokens behind their context."""
        seconds = 0.0
        while num_tokens > 0:
            num = min(num_tokens, self.chunk_tokens)
            num_tokens -= num
            seconds += self.cost.step_s((Chunk(num, num_context_tokens, 0, num_tokens == 0),))
            num_context_tokens += num
        return seconds


BLOCK_TOKENS = 16
# What a step's activations take. Chosen.
ACTIVATION_BYTES = 10**9


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of an engine's steps. is_mixed: prompts are computed in chunks beside decoding requests; else whole, in steps without decoding."""

    step_tokens: int
    max_running: int
    is_mixed: bool = True


VLLM = Shape(2048, 256)
"""vLLM's default step and number of requests."""


def pool_blocks(cost: StepCost) -> int:
    """Return the number of KV blocks that weights and a step's activations leave of the memory. Raises ValueError if that is none."""
    gpu, model = cost.gpu, cost.model
    left = int(gpu.memory_bytes * gpu.usable_share) - model.weight_bytes - ACTIVATION_BYTES
    num_blocks = left // (BLOCK_TOKENS * model.kv_bytes_per_token)
    if num_blocks < 1:
        raise ValueError(f"{model.name} does not fit {gpu.name}")
    return num_blocks


class StepWork(NamedTuple):
    """A step's seconds on the device, and the requests that get a token at its end (`giving`)."""

    seconds: float
    giving: list[str]


def work_of(
    cost: StepCost,
    num_scheduled_tokens: Mapping[str, int],
    requests: Mapping[str, Any],
    ranks: Mapping[str, int],
    assisted: Collection[int] = (),
) -> StepWork:
    """Return the work of the step that vLLM has just scheduled.

    A request gets a token if all its tokens are computed by then; it decodes if that took one token alone. num_scheduled_tokens: by request.
    requests: vLLM's, which count a step's tokens as computed once it is scheduled. ranks: of requests' adapters. assisted: ids of adapters that the
    host computes.
    """
    chunks: list[Chunk] = []
    giving: list[str] = []
    num_decodes = num_context = 0
    by_rank: dict[int, int] = {}
    for request_id, num_tokens in num_scheduled_tokens.items():
        request = requests[request_id]
        num_computed = request.num_computed_tokens
        gives = num_computed >= request.num_tokens
        if gives:
            giving.append(request_id)
        rank = ranks.get(request_id, 0)
        is_assisted = len(assisted) > 0 and rank > 0 and request.lora_request.lora_int_id in assisted
        if num_tokens == 1 and gives and request.num_output_tokens and not is_assisted:
            num_decodes += 1
            num_context += num_computed
            if rank:
                by_rank[rank] = by_rank.get(rank, 0) + 1
        else:
            chunks.append(Chunk(num_tokens, num_computed - num_tokens, rank, gives, is_assisted))
    sum_rank = cost.kernel(by_rank) if by_rank else 0
    return StepWork(cost.step_s(chunks, num_decodes, num_context, sum_rank), giving)
