"""The shape of a tiny Llama, and an engine that answers token lists: for mixed batches of adapters.

Import it before vLLM, whose environment it sets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.live.peers.engine import configure_environment, greedy
from bench.live.shared.models import ModelShape

configure_environment()

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=256,
    intermediate_size=512,
    num_heads=4,
    num_kv_heads=2,
    max_model_len=512,
    dtype="bfloat16",  # as most models come
)
BASE = None
NUM_TOKENS = 24
PROMPT = list(range(5, 45))


class Engine:
    """A vLLM engine that answers token lists greedily."""

    def __init__(self, model: Path, **options: Any) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        args = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=16,
            # vLLM's own bf16 arithmetic is not batch-invariant: 1 of 12 base-only answers of this model changed with its
            # companions, no adapter in sight. In fp32 a token changes only if rows are really mixed up.
            dtype="float32",
            enable_prefix_caching=False,  # a hit would skip the arithmetic that we compare
            seed=0,
            **options,
        )
        self.engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        self.count = 0

    def add(self, prompt: list[int], adapter: Any = BASE, num_tokens: int = NUM_TOKENS) -> str:
        """Queue one request; returns its id."""
        self.count += 1
        params = greedy(num_tokens)
        self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, params, lora_request=adapter)
        return str(self.count)

    def step(self, answers: dict[str, list[int]]) -> None:
        """Take one step; its tokens go to `answers` by the ids of their requests."""
        for output in self.engine.step():
            answers.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)

    def run(self, *requests: tuple[list[int], Any]) -> list[list[int]]:
        """Answer `(prompt, adapter)` requests in one batch; returns one token list per request."""
        answers: dict[str, list[int]] = {}
        ids = [self.add(*request) for request in requests]
        while self.engine.has_unfinished_requests():
            self.step(answers)
        return [answers[i] for i in ids]

    def close(self) -> None:
        """End the engine, so that the process can start another one."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
