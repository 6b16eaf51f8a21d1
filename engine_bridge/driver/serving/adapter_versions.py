"""The versions of adapters that requests are computed with: their ids, and the salts that keep their KV apart."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any

import msgspec

from engine_bridge.adapters.catalog import Catalog
from engine_bridge.adapters.registry import AdapterRecord
from engine_bridge.bridge import EngineThread
from engine_bridge.core.kv.expected import Hashes
from engine_bridge.driver.carried import facts_of, tell
from engine_bridge.driver.engine.engine import VllmDriver
from engine_bridge.driver.kv.kv_keys import AdapterVersion, cache_salt, version_of
from engine_bridge.driver.vllm_api import (
    EngineCoreRequest,
    LoRARequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
    SamplingParams,
)
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import seen_pictures, unpack_token_ids


class AdapterVersions:
    """Every version that was ever served, by its id: requests under way keep the weights that they began with."""

    def __init__(self, thread: EngineThread[VllmDriver], catalog: Catalog, block_hasher: Any) -> None:
        self._thread = thread
        self.catalog = catalog
        self._block_hasher = block_hasher
        self._versions: dict[int, AdapterVersion] = {}
        self._served: dict[str, AdapterVersion] = {}
        self._gone: set[int] = set()  # ids that the engine was told to forget
        # Events by the names of adapters whose next version or removal a request waits for.
        self._news: dict[str, asyncio.Event] = {}

    def of(self, lora_request: LoRARequest | None) -> AdapterVersion | None:
        """Return the version that a LoRA request names; None for the base model."""
        return self._versions[lora_request.lora_int_id] if lora_request is not None else None

    def used_by(self, lora_request: LoRARequest | None) -> AdapterVersion | None:
        """Return the version to compute with, and note its use. Raises InvalidRequest where the adapter was removed a moment ago."""
        version = self.of(lora_request)
        if version is None:
            return None
        version = self.served(version)
        self.catalog.note_use(version.lora_int_id)
        return version

    def served(self, version: AdapterVersion) -> AdapterVersion:
        """Return the version that a request for this version is to be computed with, if that begins now.

        Where the version was replaced while the request was on its way to the engine, this is its replacement.

        Raises:
            InvalidRequest: where the adapter was removed.
        """
        if version.lora_int_id not in self._gone:
            return version
        if version.lora_name not in self._served:
            message = f"The adapter {version.lora_name!r} was removed while the request was on its way."
            raise InvalidRequest(message, param="model", code="unknown_model")
        return self._served[version.lora_name]

    async def until_news_of(self, version: LoRARequest | None, timeout_s: float) -> None:
        """Wait until this version is no longer served, or was loaded again; at most `timeout_s` seconds."""
        if version is None or version.lora_int_id in self._gone:
            return
        event = self._news.setdefault(version.lora_name, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()

    def _tell(self, name: str) -> None:
        event = self._news.pop(name, None)
        if event is not None:
            event.set()

    def tie(self, request: EngineCoreRequest, adapter: AdapterVersion | None) -> None:
        """Make a request be computed with this adapter, and its KV and what is read of its pictures be kept for exactly these weights.

        The KV is kept for the request's tenant, too.
        """
        facts = facts_of(request)
        request.lora_request = adapter
        content_hash = adapter.content_hash if adapter else ""
        request.cache_salt = cache_salt(facts.tenant, content_hash, facts.client_salt)
        for picture in request.mm_features or ():
            # Where adapters change how pictures are read, vLLM puts the adapter's name in front, which a later version has as well.
            if picture.identifier != picture.mm_hash:
                picture.identifier = f"{content_hash}:{picture.mm_hash}"
        tell(request, msgspec.structs.replace(facts, rank=self.rank_of(adapter)))

    def tie_to_served(self, request: EngineCoreRequest) -> None:
        """Tie a request that was on its way for a while to the version that is served now: see `served`. Raises InvalidRequest."""
        adapter = request.lora_request
        if isinstance(adapter, AdapterVersion) and self.served(adapter) is not adapter:
            self.tie(request, self.served(adapter))

    def rank_of(self, version: AdapterVersion | None) -> int:
        """Return the adapter's rank, 0 for the base model."""
        record = self.catalog.current(version.lora_name) if version is not None else None
        return record.rank if record is not None else 0

    def salt_of(self, tenant: str, lora_request: LoRARequest | None) -> str | None:
        """Return the salt that keeps the KV of this tenant and adapter apart; None if there is nothing to keep apart."""
        version = self.of(lora_request)
        return cache_salt(tenant, version.content_hash if version else "", None)

    def hashes_of(self, token_ids: bytes, salt: str | None, lora_request: LoRARequest | None) -> Hashes:
        """Return the hashes of a packed prompt's whole blocks. Takes microseconds per block: not for the event loop."""
        request = Request(
            "prefix",
            list(unpack_token_ids(token_ids)),
            SamplingParams(max_tokens=1),
            None,
            mm_features=[
                MultiModalFeatureSpec(
                    None, "image", each.identifier, PlaceholderRange(each.offset, each.num_tokens)
                )
                for each in seen_pictures(token_ids)
            ],
            lora_request=self.of(lora_request),
            cache_salt=salt,
            block_hasher=self._block_hasher,
        )
        return list(request.block_hashes)

    async def add(self, lora_request: LoRARequest) -> None:
        """Check an adapter and serve it under the id of its version, which is written into `lora_request`. Nothing is loaded yet.

        So requests under way keep the weights that they began with, also where an adapter is loaded "in place" of another.

        Raises:
            AdapterRejected, RegistryFailed, NotSupported: the adapter cannot be served.
        """
        name = lora_request.lora_name
        old = self.catalog.current(name)
        record = await asyncio.to_thread(_enter, self.catalog, lora_request)
        # vLLM would read an adapter marked as in place from disk again in every step that uses it.
        lora_request.lora_int_id, lora_request.load_inplace = record.version_id, False
        version = version_of(lora_request, record.content_hash)
        self._versions[record.version_id] = self._served[name] = version
        self._gone.discard(record.version_id)
        self.know(record)
        if old is not None and old.version_id != record.version_id:
            self._forget(old)
        self._tell(name)

    async def remove(self, name: str, *, is_missing: bool = False) -> None:
        """Stop serving an adapter: no new request will name it. is_missing: its files were removed outside of this server."""
        record = await asyncio.to_thread(self.catalog.remove, name, is_missing=is_missing)
        if record is not None:
            self._forget(record)

    def _forget(self, record: AdapterRecord) -> None:
        """Make the engine forget a version when its last request there ends; no other request gets there."""
        self._gone.add(record.version_id)
        served = self._served.get(record.name)
        if served is not None and served.lora_int_id == record.version_id:
            del self._served[record.name]
            self._tell(record.name)
        self._thread.submit(lambda driver: driver.adapters.remove(record.version_id))

    def know(self, record: AdapterRecord) -> None:
        """Tell the engine of a version, or that it was pinned or unpinned."""
        self._thread.submit(lambda driver: driver.adapters.add(record))


def _enter(catalog: Catalog, lora_request: LoRARequest) -> AdapterRecord:
    """Register the adapter in a folder of this machine.

    In the path "~" is the home of the server's user, and relative paths count from where the server was started.

    Departs from vLLM, which takes any other path for the name of a model on a hub and fetches it: a client's word must not make this server download
    anything. Raises AdapterRejected, RegistryFailed, NotSupported.
    """
    path = os.path.abspath(os.path.expanduser(lora_request.lora_path))
    return catalog.add(lora_request.lora_name, path)
