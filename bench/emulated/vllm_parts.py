"""What vLLM's scheduler needs to be built without an engine: its configuration, a cache of blocks that nobody computes with, and outputs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    TORCH_CPP_LOG_LEVEL="ERROR",
)

import torch  # what they read of the environment is set above
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import BlockHash, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from engine_bridge.driver.engine.building import connector_config
from engine_bridge.driver.scheduling.seam import GatedScheduler

MODEL = Path(__file__).parents[2] / "demo/model"
# What vLLM's CPU platform takes; the scheduler's own size is set afterwards.
CPU_BLOCK_TOKENS = 32


@cache
def _config(max_running: int, step_tokens: int, max_tokens: int, has_prefix_cache: bool) -> Any:
    init_none_hash(sha256_cbor)
    return EngineArgs(
        model=str(MODEL),
        block_size=CPU_BLOCK_TOKENS,
        max_num_seqs=max_running,
        max_num_batched_tokens=step_tokens,
        max_model_len=max_tokens,
        enable_prefix_caching=has_prefix_cache,
        dtype="float32",
        enforce_eager=True,
        async_scheduling=False,
    ).create_engine_config()


def make_scheduler(
    *,
    num_blocks: int,
    block_tokens: int,
    max_running: int,
    step_tokens: int,
    max_tokens: int,
    has_prefix_cache: bool,
    tiers: str | None = None,
) -> GatedScheduler:
    """vLLM's own scheduler, by our class; until `use` is called its own queue decides.

    num_blocks: that requests may have; vLLM keeps one more to itself. tiers: by name, what its connector is to find.
    """
    config = copy.copy(_config(max_running, step_tokens, max_tokens, has_prefix_cache))
    # Both are written to: by us below, and by `Pace`.
    config.cache_config, config.scheduler_config = (
        copy.copy(config.cache_config),
        copy.copy(config.scheduler_config),
    )
    config.cache_config.num_gpu_blocks, config.cache_config.block_size = num_blocks + 1, block_tokens
    if tiers is not None:
        config.kv_transfer_config = connector_config(tiers)
    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32)
    blocks = KVCacheConfig(
        num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return GatedScheduler(
        vllm_config=config,
        kv_cache_config=blocks,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_tokens,
        log_stats=False,
    )


def block_names(own: int, first: int, last: int) -> list[BlockHash]:
    """Of the blocks in these places of whatever has this number."""
    return [BlockHash(((own << 32) + place).to_bytes(16)) for place in range(first, last)]


@cache
def block_hasher(block_tokens: int) -> Callable[[Request], list[BlockHash]]:
    """Names of blocks by a prompt's first token, which is a request's own here, or a session's, and by place.

    What vLLM's own cache of prefixes does with them stays vLLM's; its hashing takes a third of a play.
    """

    def name_new_blocks(request: Request) -> list[BlockHash]:
        return block_names(
            request.prompt_token_ids[0], len(request.block_hashes), request.num_tokens // block_tokens
        )

    return name_new_blocks


def output_of(
    request_ids: list[str], tokens: list[list[int]], invalid_block_ids: set[int] | None = None
) -> ModelRunnerOutput:
    """As a worker would give it. invalid_block_ids: of the device, whose KV did not come."""
    failed = KVConnectorOutput(invalid_block_ids=invalid_block_ids) if invalid_block_ids else None
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: place for place, request_id in enumerate(request_ids)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=failed,
    )
