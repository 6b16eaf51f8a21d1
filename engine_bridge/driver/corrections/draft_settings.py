"""Temperature, top p and top k of requests whose tokens are drafted, on a CPU.

vLLM writes each request's setting once for each drafted token. Where these are no whole numbers of 64 bits, its kernel for CPUs writes into a copy,
and the sampler reads memory that nothing was written to. Sampled answers follow no setting then, and greedy answers of the same step are wrong, too:
their logits are divided by such a number. Source: vLLM 0.32, `utils/cpu_triton_utils.py` and `v1/sample/rejection_sampler.py`.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Have vLLM's sampler for drafted tokens expand settings without that kernel."""
    from engine_bridge.driver.vllm_api import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Any:
    """Return each request's value in `x`, or `replace_to` where it is `replace_from`, repeated for each of its drafted tokens.

    cu_num_tokens: for each request, the drafted tokens up to its last one. num_tokens: the drafted tokens of all requests.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
