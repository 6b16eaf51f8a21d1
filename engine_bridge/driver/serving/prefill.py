"""Computing KV ahead of a request that may come, in pieces that delay no other request for long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_bridge.driver.background import BACKGROUND_PREFIX
from engine_bridge.driver.in_process import reuses_kv
from engine_bridge.driver.serving.picture_prompts import beginning, picture_end, pictures_in
from engine_bridge.driver.vllm_api import LoRARequest, RetryableRequestError, SamplingParams
from engine_bridge.protocol.engine_request import EngineRequest
from engine_bridge.protocol.errors import EngineUnavailable
from engine_bridge.protocol.token_stream import TokenStream

if TYPE_CHECKING:
    from engine_bridge.driver.kv.kv_tiers import KvTiers
    from engine_bridge.driver.serving.engine_client import BridgeEngineClient

# Chosen: how long a request may wait behind a piece of background work, and its size before prefill was measured.
BACKGROUND_S, BACKGROUND_TOKENS = 0.05, 256


async def prefill(
    client: BridgeEngineClient,
    request: EngineRequest,
    prompt: Any,
    lora_request: LoRARequest | None,
    tiers: KvTiers | None,
) -> int:
    """Compute the whole blocks of a prompt, once no other request runs. Raises EngineUnavailable where the engine gave the work up.

    prompt: as vLLM's engine takes it. tiers: know how fast this engine computes; None where there are none. Returns the number of the blocks' tokens:
    0 where the engine would compute them again anyway.
    """
    if not reuses_kv(client.vllm_config):
        return 0
    block_size: int = client.vllm_config.cache_config.block_size
    end = len(prompt["prompt_token_ids"]) // block_size * block_size
    pictures = pictures_in(prompt)
    done = 0
    while done < end:
        # A picture is read whole, so a piece that would end within one ends behind it.
        done = picture_end(pictures, min(done + _piece_tokens(tiers, block_size), end))
        await _prefill_to(client, request, beginning(prompt, done), lora_request)
    return end


async def _prefill_to(
    client: BridgeEngineClient,
    request: EngineRequest,
    prompt: Any,
    lora_request: LoRARequest | None,
) -> None:
    stream = TokenStream()
    unique_id, core_request = client.submit(
        prompt,
        SamplingParams(max_tokens=1, temperature=0, detokenize=False),
        f"{BACKGROUND_PREFIX}{request.request_id}",
        stream,
        request=request,
        lora_request=lora_request,
    )
    client.launch_in_background(unique_id, core_request)
    try:
        while (await stream.next()).finish_reason is None:
            pass
    except RetryableRequestError as error:
        raise EngineUnavailable(str(error)) from error
    finally:
        client.forget(unique_id, abort=not stream.is_ended_by_engine)


def _piece_tokens(tiers: KvTiers | None, block_size: int) -> int:
    """Return how many tokens a piece of background work computes: a request that comes meanwhile waits for at most BACKGROUND_S."""
    seconds = tiers.prefill_s_per_token() if tiers is not None else None
    num_tokens = int(BACKGROUND_S / seconds) if seconds else BACKGROUND_TOKENS
    return max(num_tokens // block_size, 1) * block_size
