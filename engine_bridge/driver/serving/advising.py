"""How an advisory comes to the engine thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine_bridge.bridge import EngineThread
from engine_bridge.core.kv.expected import Hashes
from engine_bridge.driver.engine.engine import VllmDriver
from engine_bridge.driver.serving.engine_client import BridgeEngineClient
from engine_bridge.driver.vllm_api import LoRARequest
from engine_bridge.protocol.node import Advisory, AdvisoryReport, unpack_token_ids


async def advise(
    thread: EngineThread[VllmDriver],
    client: BridgeEngineClient,
    adapter: LoRARequest | None,
    advisory: Advisory,
    on_change: Callable[[AdvisoryReport], None],
) -> None:
    """Have the engine prepare for a request, and `on_change` called on the event loop with what comes of it. adapter: that it will name."""
    salt = client.versions.salt_of(advisory.tenant, adapter)
    adapter_id = adapter.lora_int_id if adapter is not None else 0
    if adapter_id:
        thread.submit(lambda driver: driver.adapters.announce(advisory, adapter_id))
    loop = asyncio.get_running_loop()

    hashes: Hashes = ()
    # Where the session has gone on elsewhere, what it left here is only how it began.
    is_known = not advisory.kv_from and await thread.call(
        lambda driver: driver.promoter.remembers(advisory.session_id, salt)
    )
    if advisory.token_ids and not is_known:
        token_ids = unpack_token_ids(advisory.token_ids)
        hashes = await asyncio.to_thread(client.versions.hashes_of, token_ids, salt, adapter)

    def begin(driver: VllmDriver) -> None:
        def report(state: AdvisoryReport) -> None:
            told = driver.adapters.accounted(adapter_id, state) if adapter_id else state
            loop.call_soon_threadsafe(on_change, told)

        driver.promoter.advise(advisory, hashes, salt, report)

    thread.submit(begin)
