"""What vLLM's scheduler needs to be built without an engine: its configuration, a cache of blocks that nobody computes with, and outputs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
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

import torch  # these modules read the environment that is set above
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import BlockHash, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from engine_bridge.driver.engine.building import connector_config
from engine_bridge.driver.scheduling.seam import GatedScheduler

MODEL = Path(__file__).parents[3] / "demo/model"
# What vLLM's CPU platform takes; the scheduler's own size is set afterwards.
CPU_BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Engine:
    """Bounds that vLLM is started with.

    Attributes:
        num_blocks: that requests may have; vLLM keeps one more to itself.
        max_tokens: longest prompt and answer together.
        max_step_s: as `--max-step-ms`, where the device has a table; 0: steps are as long as vLLM makes them.
        has_prefix_cache: whether blocks are found again.
    """

    num_blocks: int
    block_tokens: int = 16
    max_running: int = 256
    step_tokens: int = 2048
    max_tokens: int = 4096
    max_step_s: float = 0.0
    has_prefix_cache: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens that fit the device's KV blocks."""
        return self.num_blocks * self.block_tokens


@cache
def _config(engine: Engine) -> Any:
    init_none_hash(sha256_cbor)
    return EngineArgs(
        model=str(MODEL),
        block_size=CPU_BLOCK_TOKENS,
        max_num_seqs=engine.max_running,
        max_num_batched_tokens=engine.step_tokens,
        max_model_len=engine.max_tokens,
        enable_prefix_caching=engine.has_prefix_cache,
        dtype="float32",
        enforce_eager=True,
        async_scheduling=False,
    ).create_engine_config()


def make_scheduler(engine: Engine, tiers: str | None) -> GatedScheduler:
    """Return vLLM's own scheduler, by our class; until `use` is called its own queue decides.

    tiers: name of the tiers that its connector is to find.
    """
    # Of engines that differ in the number and size of blocks alone one configuration is made.
    config = copy.copy(_config(replace(engine, num_blocks=0, block_tokens=0, max_step_s=0.0)))
    # Both are written to: by us below, and by `Pace`.
    config.cache_config, config.scheduler_config = (
        copy.copy(config.cache_config),
        copy.copy(config.scheduler_config),
    )
    num_blocks, block_tokens = engine.num_blocks + 1, engine.block_tokens
    config.cache_config.num_gpu_blocks, config.cache_config.block_size = num_blocks, block_tokens
    if tiers is not None:
        config.kv_transfer_config = connector_config(tiers)
    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32)
    blocks = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return GatedScheduler(
        vllm_config=config,
        kv_cache_config=blocks,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_tokens,
        log_stats=False,
    )


def block_names(own: int, first: int, last: int) -> list[BlockHash]:
    """Return the names of the blocks at these places of the prompt with this number."""
    return [BlockHash(((own << 32) + place).to_bytes(16)) for place in range(first, last)]


@cache
def block_hasher(block_tokens: int) -> Callable[[Request], list[BlockHash]]:
    """Return a function that names blocks by a prompt's first token, which is its request's or session's number here, and by place.

    What vLLM's own cache of prefixes does with them stays vLLM's; its hashing takes a third of a play.
    """

    def name_new_blocks(request: Request) -> list[BlockHash]:
        """Return names of the request's full blocks that have none yet."""
        return block_names(
            request.prompt_token_ids[0], len(request.block_hashes), request.num_tokens // block_tokens
        )

    return name_new_blocks


def output_of(
    request_ids: list[str], tokens: list[list[int]], invalid_block_ids: set[int] | None = None
) -> ModelRunnerOutput:
    """Return a step's output as a worker would give it. invalid_block_ids: the device's blocks whose KV did not come."""
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
