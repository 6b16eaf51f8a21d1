"""A tiny Llama with random weights, PEFT adapters for it, and an engine that answers token lists: for mixed batches of adapters.

Import it before vLLM, whose environment it sets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
)

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCABULARY = 256, 512, 4, 4, 2, 320
WIDTHS = {
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (HIDDEN, HIDDEN // 2),
    "v_proj": (HIDDEN, HIDDEN // 2),
    "o_proj": (HIDDEN, HIDDEN),
    "gate_proj": (HIDDEN, INTERMEDIATE),
    "up_proj": (HIDDEN, INTERMEDIATE),
    "down_proj": (INTERMEDIATE, HIDDEN),
}
BASE = None
NUM_TOKENS = 24
PROMPT = list(range(5, 45))


def write_model(path: Path) -> None:
    """In bfloat16, as most models come."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


def write_adapter(path: Path, rank: int, seed: int, targets: Sequence[str] = tuple(WIDTHS)) -> None:
    """A PEFT adapter of random weights, strong enough to change what the model says."""
    import torch
    from safetensors.torch import save_file

    path.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for target in targets:
            part = "self_attn" if target[0] in "qkvo" else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{target}"
            num_in, num_out = WIDTHS[target]
            for side, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
                tensors[f"{name}.lora_{side}.weight"] = (
                    torch.randn(shape, generator=generator) * 0.05
                ).bfloat16()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
    }
    (path / "adapter_config.json").write_text(
        json.dumps({**config, "bias": "none", "use_dora": False, "use_rslora": False})
    )


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
        from vllm import SamplingParams

        self.count += 1
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, params, lora_request=adapter)
        return str(self.count)

    def step(self, answers: dict[str, list[int]]) -> None:
        """Take one step; the requests that end with it go to `answers` by their ids."""
        for output in self.engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)

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
