"""Answers with a seed on a CPU, where the prompt takes several steps.

At the end of each part of a prompt vLLM samples a token, throws it away, and sets the request's generator back by what one token takes of a GPU's
generator. A CPU's generator cannot be set back so: the step fails, and the answers of all requests end with it. Here a request whose token will be
thrown away samples without its generator, which stays where it was, so that an answer does not depend on the parts either. Source: vLLM 0.32,
`v1/worker/gpu_model_runner.py`, `_bookkeeping_sync`.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def watch(runner: Any) -> None:
    """Make this model runner on a CPU keep generators for tokens that are not thrown away."""
    if not hasattr(runner, "discard_request_mask"):
        return  # the newer model runner draws by position, and throws nothing away
    stock = runner.sample_tokens

    def sample_tokens(grammar_output: Any) -> Any:
        """Sample, and meanwhile hide the generators of requests whose prompt is not yet computed."""
        batch = runner.input_batch
        if not batch.generators:
            return stock(grammar_output)
        thrown_away = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
        hidden = {row: batch.generators.pop(row) for row in thrown_away if row in batch.generators}
        try:
            return stock(grammar_output)
        finally:
            batch.generators.update(hidden)

    runner.sample_tokens = sample_tokens
