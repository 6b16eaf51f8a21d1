"""Whose KV a request may meet: what is mixed into vLLM's block hashes beside the tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from engine_bridge.driver.vllm_api import LoRARequest

BlockHasher = Callable[[Any], list[Any]]
"""The hashes of a request's new whole blocks."""


class AdapterVersion(LoRARequest):
    """One version of an adapter.

    vLLM compares adapters by name and keeps those of a step in a set: while requests of a replaced version still ran, one of the two
    would be missing in it, and another adapter might take its slot.
    """

    content_hash: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AdapterVersion) and self.lora_int_id == other.lora_int_id

    def __hash__(self) -> int:
        return hash(self.lora_int_id)


def version_of(lora_request: LoRARequest, content_hash: str) -> AdapterVersion:
    fields = {name: getattr(lora_request, name) for name in LoRARequest.__struct_fields__}
    return AdapterVersion(**fields, content_hash=content_hash)


def hash_by_content(hasher: BlockHasher) -> BlockHasher:
    """vLLM's hasher, with an adapter's content in the place of its name and its path: those are one machine's own.

    Without that no other machine would find KV that was computed with an adapter, and neither would this one once its data folder has moved.
    """

    def hashes_of(request: Any) -> list[Any]:
        adapter = request.lora_request
        if not (isinstance(adapter, AdapterVersion) and adapter.content_hash):
            return hasher(request)
        named = LoRARequest(lora_name=adapter.content_hash, lora_int_id=adapter.lora_int_id, lora_path="-")
        request.lora_request = named
        try:
            return hasher(request)
        finally:
            request.lora_request = adapter

    return hashes_of


def cache_salt(tenant: str, adapter_hash: str, client_salt: str | None) -> str | None:
    """The salt of a request's first block, and through the chain of hashes of all of them. None if there is nothing to keep apart.

    Lengths stand in front of the parts, so that no client's own salt can be made to read like another tenant's.
    """
    parts = [part.encode("utf-8", "surrogatepass") for part in (tenant, adapter_hash, client_salt or "")]
    if not any(parts):
        return None
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()
