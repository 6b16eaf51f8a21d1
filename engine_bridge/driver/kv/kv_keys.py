"""The salts and hashes that decide which requests may share KV, mixed into vLLM's block hashes beside the tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from engine_bridge.driver.vllm_api import LoRARequest

BlockHasher = Callable[[Any], list[Any]]
"""A function that returns the hashes of a request's new whole blocks."""


class AdapterVersion(LoRARequest):
    """One version of an adapter, compared by its id.

    vLLM compares adapters by name and keeps a step's adapters in a set. While requests of a replaced version still ran, one of the two versions would
    be missing from that set, and another adapter might take its slot.
    """

    content_hash: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AdapterVersion) and self.lora_int_id == other.lora_int_id

    def __hash__(self) -> int:
        return hash(self.lora_int_id)


def version_of(lora_request: LoRARequest, content_hash: str) -> AdapterVersion:
    """Return a copy of a LoRA request that is compared by its id and carries its content's hash."""
    fields = {name: getattr(lora_request, name) for name in LoRARequest.__struct_fields__}
    return AdapterVersion(**fields, content_hash=content_hash)


def hash_by_content(hasher: BlockHasher) -> BlockHasher:
    """Wrap vLLM's hasher so that it hashes an adapter's content instead of the adapter's name and path, which differ between machines.

    Without that no other machine would find KV that was computed with an adapter, and neither would this machine once its data folder has moved.
    """

    def hashes_of(request: Any) -> list[Any]:
        """Return the hashes of a request's new whole blocks. The request is as before afterwards."""
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
    """Return the salt of a request's first block, which the chain of hashes carries into all its blocks; None if nothing is to be kept apart.

    Each part is preceded by its length, so that no client's own salt can be made to read like another tenant's.
    """
    parts = [part.encode("utf-8", "surrogatepass") for part in (tenant, adapter_hash, client_salt or "")]
    if not any(parts):
        return None
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()
