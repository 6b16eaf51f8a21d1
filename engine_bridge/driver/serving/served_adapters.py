"""The adapters that one node's serving classes offer: loaded and unloaded by clients, and found in a folder."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeAlias

from engine_bridge.adapters.errors import AdapterRejected, RegistryFailed, status_of
from engine_bridge.adapters.names import check_name, problem_of
from engine_bridge.adapters.retries import AdapterRefusal
from engine_bridge.driver.apis.bodies import Rejected, as_error_response, openai_error, parse
from engine_bridge.driver.serving.adapter_versions import AdapterVersions
from engine_bridge.driver.serving.engine_client import ADAPTER_FAILURES
from engine_bridge.driver.vllm_api import (
    ErrorResponse,
    LoadLoRAAdapterRequest,
    OpenAIServingModels,
    UnloadLoRAAdapterRequest,
    create_error_response,
)
from engine_bridge.protocol.errors import BridgeError, NotSupported
from engine_bridge.protocol.node import JsonReply

Result: TypeAlias = ErrorResponse | str


class ServedAdapters:
    """The adapters on offer, all on one event loop. Changes take turns, so that each one begins with the result of the change before it.

    Args:
        models: vLLM's list of the models that requests may name.
    """

    def __init__(self, models: OpenAIServingModels, versions: AdapterVersions) -> None:
        self._models, self._versions, self._catalog = models, versions, versions.catalog
        self._changing = asyncio.Lock()

    # -- by clients ----------------------------------------------------------------------------------------------------

    async def load(self, body: Any) -> JsonReply:
        """Load an adapter, as vLLM's `/v1/load_lora_adapter` does."""
        return await self._reply(LoadLoRAAdapterRequest, self._load, body)

    async def unload(self, body: Any) -> JsonReply:
        """Unload an adapter, as vLLM's `/v1/unload_lora_adapter` does."""
        return await self._reply(UnloadLoRAAdapterRequest, self._unload, body)

    async def _reply(self, request_class: Any, call: Any, body: Any) -> JsonReply:
        try:
            request = parse(request_class, body)
            async with self._changing:
                result, failure = await self._told(call, request)
        except Rejected as rejected:
            result, failure = rejected.response, None
        if not isinstance(result, ErrorResponse):
            return JsonReply(200, json.dumps({"status": result}).encode())
        code = ""
        if isinstance(failure, AdapterRejected | RegistryFailed | NotSupported):
            # vLLM reports a server error for an adapter that it cannot have; the engine is well.
            result.error.code, code = status_of(failure)
            result.error.message = str(failure)
        return openai_error(result, code)

    @staticmethod
    async def _told(call: Any, request: Any) -> tuple[Result, Exception | None]:
        """Return a call's result, and the error that was raised under it: vLLM's classes make a text of that error."""
        failures: list[Exception] = []
        ADAPTER_FAILURES.set(failures)
        try:
            result = await call(request)
        except Exception as error:
            failures.append(error)
            result = (
                create_error_response(str(error))
                if isinstance(error, BridgeError)
                else as_error_response(error)
            )
        return result, next(iter(failures), None)

    async def _load(self, request: LoadLoRAAdapterRequest) -> Result:
        if request.lora_name:  # vLLM itself refuses an empty name
            check_name(request.lora_name)
        if self._models.is_base_model(request.lora_name):
            raise AdapterRejected(
                "The model itself has this name: choose another for the adapter.", code="bad_name"
            )
        return await self._models.load_lora_adapter(request)

    async def _unload(self, request: UnloadLoRAAdapterRequest) -> Result:
        """Remove the adapter from the registry, then from vLLM's list: if the registry fails, nothing has changed."""
        if request.lora_name and problem_of(request.lora_name):
            raise AdapterRejected("No adapter has this name.", code="adapter_not_found")
        if request.lora_name in self._models.lora_requests:
            await self._versions.remove(request.lora_name)
        return await self._models.unload_lora_adapter(request)

    # -- found in a folder, see `adapters.follower.Server` -------------------------------------------------------------

    def served_paths(self) -> dict[str, str]:
        """Return the folder of each adapter that is served, by name."""
        return {record.name: record.path for record in self._catalog.served()}

    def unloaded_paths(self) -> dict[str, str]:
        """Return the folder of each adapter that a client has unloaded, by name."""
        return self._catalog.unloaded

    async def serve_found(self, name: str, path: str) -> AdapterRefusal | None:
        """Serve an adapter found in a folder, or its new version. Returns why it cannot be served; None if it is."""
        async with self._changing:
            served = self._catalog.current(name)
            if served is not None and served.path != path:
                return AdapterRefusal("An adapter of this name was loaded from elsewhere.", "name_taken")
            request = LoadLoRAAdapterRequest(
                lora_name=name, lora_path=path, load_inplace=name in self._models.lora_requests
            )
            result, failure = await self._told(self._load, request)
        if not isinstance(result, ErrorResponse):
            return None
        return AdapterRefusal(result.error.message, getattr(failure, "code", ""))

    async def drop_found(self, name: str, path: str) -> None:
        """Stop serving an adapter whose folder was removed; adapters of this name from elsewhere stay."""
        async with self._changing:
            served = self._catalog.current(name)
            if served is not None and served.path == path:
                self._models.lora_requests.pop(name, None)
                await self._versions.remove(name, is_missing=True)
