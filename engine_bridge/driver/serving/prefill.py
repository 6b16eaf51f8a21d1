"""Computing KV ahead of a request that may come, in pieces that delay no other request for long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_bridge.driver.background import BACKGROUND_PREFIX
from engine_bridge.driver.in_process import reuses_kv
from engine_bridge.driver.vllm_api import RetryableRequestError
from engine_bridge.protocol.errors import EngineUnavailable
from engine_bridge.protocol.node import GenerateRequest
from engine_bridge.protocol.token_stream import TokenStream

if TYPE_CHECKING:
    from engine_bridge.driver.kv.kv_tiers import KvTiers
    from engine_bridge.driver.serving.engine_client import BridgeEngineClient
    from engine_bridge.driver.serving.serving import Prepared

# Chosen: how long a request may wait behind a piece of background work, and its size before prefill was measured.
BACKGROUND_S, BACKGROUND_TOKENS = 0.05, 256


async def prefill(
    client: BridgeEngineClient, prepared: Prepared, request: GenerateRequest, tiers: KvTiers | None
) -> int:
    """Compute the whole blocks of a prompt, once no other request runs.

    Returns:
        The number of their tokens: 0 where the engine would compute them again anyway.

    Raises:
        EngineUnavailable: where the engine gave the work up.
    """
    if not reuses_kv(client.vllm_config):
        return 0
    token_ids: list[int] = prepared.engine_input["prompt_token_ids"]
    block_size: int = client.vllm_config.cache_config.block_size
    end = len(token_ids) // block_size * block_size
    done = 0
    while done < end:
        done = min(done + _piece_tokens(tiers, block_size), end)
        await _prefill_to(client, prepared, token_ids[:done], request)
    return end


async def _prefill_to(
    client: BridgeEngineClient, prepared: Prepared, token_ids: list[int], request: GenerateRequest
) -> None:
    """Compute the missing KV of these tokens."""
    stream = TokenStream()
    unique_id, core_request = client.submit(
        {"prompt_token_ids": token_ids},
        prepared.params.clone(),
        f"{BACKGROUND_PREFIX}{request.request_id}",
        stream,
        context=request.context,
        lora_request=prepared.lora_request,
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
