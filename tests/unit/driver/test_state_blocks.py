"""Restored requests with recurrent layers, in vLLM's own manager of the device's blocks."""

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1 import kv_cache_interface as vllm_kv
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.request import Request

from engine_bridge.driver.corrections import state_blocks
from engine_bridge.policy.kv.kv_layout import KvLayout, LayerGroup

BLOCK_TOKENS = 64


def manager_with(num_free: int, num_state_groups: int) -> KVCacheManager:
    """One group of full attention, and some of recurrent layers."""
    page = {"block_size": BLOCK_TOKENS}
    full = vllm_kv.FullAttentionSpec(**page, num_kv_heads=2, head_size=8, dtype=torch.float32)  # type: ignore[arg-type]
    state = vllm_kv.MambaSpec(
        **page,
        shapes=((2, 4),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        page_size_padded=full.page_size_bytes,
    )
    groups = [KVCacheGroupSpec([f"state {at}"], state) for at in range(num_state_groups)]
    config = vllm_kv.KVCacheConfig(num_free + 1, [], [KVCacheGroupSpec(["full"], full), *groups])
    return KVCacheManager(config, 1024, BLOCK_TOKENS, BLOCK_TOKENS)


@pytest.mark.parametrize("num_state_groups", [1, 3])
def test_a_restored_request_gets_all_its_blocks_or_none(num_state_groups: int) -> None:
    """Without the correction vLLM begins to give them out and fails."""
    state_blocks.install()
    state_blocks.install()
    layout = KvLayout(
        (LayerGroup("all", BLOCK_TOKENS), *[LayerGroup("state", BLOCK_TOKENS)] * num_state_groups),
        BLOCK_TOKENS,
    )
    for num_tokens in (192, 200):
        fits = []
        for num_free in range(1, 14):
            manager = manager_with(num_free, num_state_groups)
            request = Request("r", [7] * num_tokens, SamplingParams(), None)
            request.block_hashes = [b"%d" % number for number in range(num_tokens // BLOCK_TOKENS)]
            found = manager.allocate_slots(
                request,
                num_tokens - 2 * BLOCK_TOKENS,
                num_external_computed_tokens=2 * BLOCK_TOKENS,
                full_sequence_must_fit=True,
            )
            fits.append(found is not None)
            assert found is not None or manager.block_pool.get_num_free_blocks() == num_free
        assert fits.index(True) + 1 == layout.num_blocks(num_tokens), "our scheduling counts them alike"
