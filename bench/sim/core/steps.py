"""What a step of the engine takes: max(compute, memory), the adapters' part, and a fixed overhead.

compute   2 FLOPs for each weight and token, and attention's 4 · hidden for each pair of tokens and layer
memory    the weights once, the KV that is attended to once, over the achieved bandwidth
adapters  over a prompt: their FLOPs at the rate of S-LoRA's kernels (`Gpu.lora_share`). In decoding: each request's adapter is read from memory
          for itself: with MBGMV as it is, with BGMV padded to the largest rank of the batch. Source: CaraServe §5, whose figures for both this
          meets (see tests).
assisted  what a host computes of a prompt's adapter while that is on its way to the device. In each layer it goes on beside the base model's own
          product with the same matrices; what takes longer holds up the rest of the layer, and calling costs. Source: CaraServe §4.

A step in which nothing but decoding happens grows by the same amount from one to the next, so that many are summed at once (`Decoding`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from bench.sim.core.hardware import AssistingHost, Gpu
from bench.sim.core.models import Model
from engine_bridge.policy.costs.costs import StepTable

Kernel = Callable[[Mapping[int, int]], int]
"""What it reads of the adapters of a batch that decodes, in ranks; takes the number of requests by rank."""


def mbgmv(num_by_rank: Mapping[int, int]) -> int:
    """S-LoRA's: each adapter as it is."""
    return sum(rank * num for rank, num in num_by_rank.items())


def bgmv(num_by_rank: Mapping[int, int]) -> int:
    """Punica's: each adapter padded to the largest."""
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
        """A step that computes these chunks and one token for each of `num_decodes` requests.

        num_context: tokens of KV that those that decode attend to. sum_rank: of their adapters, as the kernel reads them.
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
        """What assisting makes a step longer by. Each chunk has a core for so many tokens; too many cores for those there are take turns."""
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

    def decoding(self, num_decodes: int, num_context: int, sum_rank: int) -> Decoding:
        """Steps from here on in which the same requests decode and nothing else happens; `num_context` is the first one's."""
        fixed_s = sum_rank * self._lora_decode_s + self.gpu.step_s + num_decodes * self.gpu.request_s
        compute_s = num_decodes * (self._token_s + self._head_s) + num_context * self._pair_s
        memory_s = self._weights_s + num_context * self._kv_token_s
        return Decoding(
            fixed_s, compute_s, num_decodes * self._pair_s, memory_s, num_decodes * self._kv_token_s
        )

    def prefill_s(self, num_tokens: int, rank: int = 0) -> float:
        """A prompt alone."""
        return self.step_s((Chunk(num_tokens, 0, rank, True),))


@dataclass(frozen=True, slots=True)
class Decoding:
    """A run of decode steps: the n-th takes fixed + max(compute + n · its growth, memory + n · its growth), n from 0."""

    fixed_s: float
    compute_s: float
    compute_growth_s: float
    memory_s: float
    memory_growth_s: float

    def total_s(self, num_steps: int) -> float:
        """Of the first so many."""
        cross = self._crossing(num_steps)
        first, second = self._sum(0, cross), self._sum(cross, num_steps)
        return num_steps * self.fixed_s + first + second

    def _sum(self, start: int, end: int) -> float:
        """Of the larger part over steps between which the larger one does not change."""
        if end <= start:
            return 0.0
        middle = (start + end - 1) / 2
        compute_s = self.compute_s + middle * self.compute_growth_s
        memory_s = self.memory_s + middle * self.memory_growth_s
        return (end - start) * max(compute_s, memory_s)

    def _crossing(self, num_steps: int) -> int:
        """The first step from which on the other part is the larger; `num_steps` if there is none."""
        gap_s = self.compute_s - self.memory_s
        growth_s = self.compute_growth_s - self.memory_growth_s
        if gap_s * growth_s >= 0:
            return num_steps
        return min(math.ceil(-gap_s / growth_s), num_steps)

    def steps_until(self, seconds: float, num_steps: int) -> int:
        """How many of `num_steps` end at the first step's end at or after so many seconds: at least one."""
        low, high = 1, num_steps
        while low < high:
            middle = (low + high) // 2
            if self.total_s(middle) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low
