"""The devices, each with one calibration, from published numbers outside the tables that are compared. All else is their data sheets.

A40   Chameleon §5.2: the SLO of 150 ms for the time between tokens is five times that of low load, hence a step of 30 ms for one request: what
      reading the weights leaves of it is the fixed overhead. Chameleon §3.1, Fig. 2: of the TTFT of one request of rank 128 alone, 17.5% is loading,
      60% loading and the adapter's computation; the other 40% is what the prompt takes, and so gives S-LoRA's shares of the link and of FLOP/s. The
      prompt is "medium": in the work that the paper takes the word from (DynamoLLM), 256 to 1,024 tokens; 512 is their geometric middle. Chosen.
A10   CaraServe §2.3, Fig. 5: 24 requests of rank 32 decode in 35.3 ms with MBGMV (adapters on q, k, v; prompts of Alpaca, some 60 tokens). Its
      shares of the link and for adapters are the A40's. Copying adapters as CaraServe's on-demand baseline does is slower than a link is, see
      A10_ON_DEMAND: CaraServe §2.3, Fig. 3, has loads take 10% of requests' time at 3 requests/s, with rank 64 and 512 adapters of skewed popularity.
      A load holds up everybody, so that share is (load) · (share of cold requests) · (rate + 1 / time of a request). Popularity is taken as a power
      law with exponent 1; at 6 and 9 requests/s, where Fig. 3 has 16% and 20%, the same load comes out within 10% (see tests), while the skew
      of Azure's functions (`traffic.functions`) would ask for loads that are twice as long at 9 as at 3.
A100  No such number was found: the A40's overhead and shares.
A800  vLLM of October 2023 on an A100, whose chip is the A800's: Mistral-7B decodes 46 tokens/s alone and 1,800 tokens/s with 60 requests
      (Mystic's guide, as quoted in ggml-org/llama.cpp#3479; it names no size of the A100 and no lengths of contexts: 80 GB, and some 200 tokens, are
      taken). What weights and KV leave of both steps is the fixed overhead and what each request adds; with 10 requests that gives 423 tokens/s,
      where the guide has 400. Link: 25.13 GB/s from host to device on an A100 (NVIDIA/nvbandwidth#42), and as much back. Copies block by block
      may be much slower: vllm-project/vllm#11531 has 3.1 GB/s for vLLM's own at that time, for blocks whose size it does not say.
"""

from __future__ import annotations

import math
from dataclasses import replace

from bench.emulated.core import hardware
from bench.emulated.core.hardware import Gpu
from bench.emulated.core.models import LLAMA2_7B, LLAMA_7B, MISTRAL_7B
from bench.emulated.core.steps import StepCost
from bench.emulated.core.traffic import ALPACA_ANSWER, ALPACA_PROMPT, power_law

A40_DECODE_S = 0.150 / 5
A40_LOADING_SHARE, A40_ADAPTER_SHARE = 0.175, 0.60 - 0.175
MEDIUM_PROMPT_TOKENS = 512
LARGEST_RANK = 128
A10_DECODE_S, A10_NUM_DECODES, A10_RANK, A10_CONTEXT_TOKENS = 0.0353, 24, 32, 60
A800_TOKENS_PER_S = {1: 46.0, 60: 1800.0}
A800_CONTEXT_TOKENS = 200
A800_LINK_BYTES_PER_S = 25.13e9
# With CaraServe's adapters, on q, k and v.
LLAMA2_7B_QKV = replace(LLAMA2_7B, adapts_output=False)
# Fig. 3 left: requests a second, share of loads in requests' time.
COLD_SHARES = ((3.0, 0.10), (6.0, 0.16), (9.0, 0.20))
COLD_RANK, COLD_ADAPTERS = 64, 512


def _calibrated_a40() -> Gpu:
    bare = replace(hardware._A40, step_s=0.0)
    gpu = replace(bare, step_s=A40_DECODE_S - StepCost(bare, LLAMA_7B).step_s((), 1, MEDIUM_PROMPT_TOKENS))
    base_s = StepCost(gpu, LLAMA_7B).prefill_s(MEDIUM_PROMPT_TOKENS)
    ttft_s = base_s / (1 - A40_LOADING_SHARE - A40_ADAPTER_SHARE)
    lora_flops = 2 * LLAMA_7B.lora_weights_per_rank * LARGEST_RANK * MEDIUM_PROMPT_TOKENS
    link_bytes_per_s = LLAMA_7B.lora_bytes(LARGEST_RANK) / (A40_LOADING_SHARE * ttft_s)
    return replace(
        gpu,
        link_share=link_bytes_per_s / gpu.link_bytes_per_s,
        lora_share=lora_flops / (A40_ADAPTER_SHARE * ttft_s) / gpu.flops,
    )


def _calibrated_a10(shares_of: Gpu) -> Gpu:
    bare = replace(
        hardware._A10, step_s=0.0, link_share=shares_of.link_share, lora_share=shares_of.lora_share
    )
    context, sum_rank = A10_NUM_DECODES * A10_CONTEXT_TOKENS, A10_NUM_DECODES * A10_RANK
    without_s = StepCost(bare, LLAMA2_7B_QKV).step_s((), A10_NUM_DECODES, context, sum_rank)
    return replace(bare, step_s=A10_DECODE_S - without_s)


def on_demand_load_s(gpu: Gpu, per_s: float, share: float) -> float:
    """Return the seconds of a load of rank 64, from loads' share in requests' time at a rate of requests a second."""
    prompt, answer = round(ALPACA_PROMPT[0]), ALPACA_ANSWER[0]
    prefill_s = StepCost(gpu, LLAMA2_7B_QKV).prefill_s(prompt, COLD_RANK)
    # Prompts and loads hold up decoding, so that much less of the time is left for it.
    request_s = answer * A10_DECODE_S / (1 - per_s * prefill_s - share)
    weights = power_law(COLD_ADAPTERS)
    # A request is cold if none with its adapter is there: they are there for a request's time each.
    cold = sum(w * math.exp(-per_s * request_s * w / sum(weights)) for w in weights) / sum(weights)
    return share / (cold * (per_s + 1 / request_s))


def _copying_on_demand(gpu: Gpu) -> Gpu:
    bytes_per_s = LLAMA2_7B_QKV.lora_bytes(COLD_RANK) / on_demand_load_s(gpu, *COLD_SHARES[0])
    return replace(gpu, link_share=bytes_per_s / gpu.link_bytes_per_s)


def _calibrated_a800(lora_share_of: Gpu) -> Gpu:
    bare = replace(hardware._A800, step_s=0.0, lora_share=lora_share_of.lora_share)
    cost = StepCost(bare, MISTRAL_7B)
    few, many = A800_TOKENS_PER_S
    few_s, many_s = (
        num / per_s - cost.step_s((), num, num * A800_CONTEXT_TOKENS)
        for num, per_s in A800_TOKENS_PER_S.items()
    )
    request_s = (many_s - few_s) / (many - few)
    return replace(
        bare,
        step_s=few_s - few * request_s,
        request_s=request_s,
        link_share=A800_LINK_BYTES_PER_S / bare.link_bytes_per_s,
    )


A40 = _calibrated_a40()
A10 = _calibrated_a10(A40)
A10_ON_DEMAND = _copying_on_demand(A10)
A100 = replace(hardware._A100, step_s=A40.step_s, link_share=A40.link_share, lora_share=A40.lora_share)
A800 = _calibrated_a800(A40)
