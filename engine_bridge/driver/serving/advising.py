"""The way of advice to the engine thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from engine_bridge.bridge import EngineThread
from engine_bridge.core.kv.expected import Hashes
from engine_bridge.driver.engine.engine import VllmDriver
from engine_bridge.driver.serving.engine_client import BridgeEngineClient
from engine_bridge.driver.serving.serving import Serving
from engine_bridge.driver.vllm_api import LoRARequest
from engine_bridge.protocol.engine_request import session_key
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import Advisory, AdvisoryReport, SessionHint
from kvtiers.store import KvStore


def hint_session(
    thread: EngineThread[VllmDriver],
    client: BridgeEngineClient,
    serving: Serving,
    store: KvStore,
    hint: SessionHint,
) -> None:
    """Keep a session's KV in host memory, and let the device take it first, as the hint says. Of an adapter that has gone the device has none."""
    store.keep(hint.session_id, hint.keep_s, tenant=hint.tenant, is_shared=hint.is_shared)
    with contextlib.suppress(InvalidRequest):
        salt = client.versions.salt_of(hint.tenant, serving.lora_request(hint.adapter or ""))
        if hint.is_idle:
            thread.submit(lambda driver: driver.promoter.set_idle(hint.session_id, salt))


async def advise(
    thread: EngineThread[VllmDriver],
    client: BridgeEngineClient,
    adapter: LoRARequest | None,
    advisory: Advisory,
    on_change: Callable[[AdvisoryReport], None],
) -> None:
    """Make the engine prepare for a request. `on_change` is called on the event loop with each report on the advisory.

    `adapter` is the adapter that the request will name; None: the base model.
    """
    salt = client.versions.salt_of(advisory.tenant, adapter)
    adapter_id = adapter.lora_int_id if adapter is not None else 0
    if adapter_id:
        thread.submit(lambda driver: driver.adapters.announce(advisory, adapter_id))
    loop = asyncio.get_running_loop()

    hashes: Hashes = ()
    # If the session has continued on another node, the prefix that it left here is only its beginning.
    is_known = not advisory.kv_from and await thread.call(
        lambda driver: driver.promoter.remembers(advisory.session_id, salt)
    )
    if advisory.token_ids and not is_known:
        hashes = await asyncio.to_thread(client.versions.hashes_of, advisory.token_ids, salt, adapter)

    def begin(driver: VllmDriver) -> None:
        """Hand the advisory to the promoter."""
        adapters = driver.adapters  # an engine that is closed ends its advisories, and has no parts by then

        def report(state: AdvisoryReport) -> None:
            """Pass a report on to the event loop, with the adapter's part of it."""
            told = adapters.accounted(adapter_id, state) if adapter_id else state
            loop.call_soon_threadsafe(on_change, told)

        if driver.scheduling is not None:
            program = session_key(advisory.tenant, advisory.session_id)
            driver.scheduling.announced(program, advisory.lifetime_s, advisory.probability)
        driver.promoter.advise(advisory, hashes, salt, report)

    thread.submit(begin)
