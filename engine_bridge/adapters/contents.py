"""The content of an adapter's folder, read without a model: for a gateway that passes adapters on, and for stores."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Final

from xxhash import xxh3_64

from engine_bridge.adapters.config import CONFIG_FILE
from engine_bridge.adapters.errors import AdapterRejected, quoted
from engine_bridge.adapters.files import (
    CHUNK_BYTES,
    base_model_of,
    checksum_of,
    opened,
    opened_adapter,
    own_tensors,
    signature_from,
)
from engine_bridge.adapters.header import WEIGHTS_FILE, Header, corrupt
from engine_bridge.adapters.registry import AdapterFacts

# The two files that make an adapter; other files beside them are neither read nor passed on.
FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)
# Chosen: of a hundred thousand tensors. A node has a tighter bound, for it knows its model.
MAX_HEADER_BYTES: Final = 32 << 20


class AdapterContents(AdapterFacts, frozen=True, kw_only=True):
    """An adapter whose files are sound in themselves; each model checks for itself whether it fits. sizes: in bytes, by file."""

    path: Path
    sizes: dict[str, int]


# Looks up files by path and signature: their hash, and the checksum of their weights; None for unknown ones.
Known = Callable[[str, str], tuple[str, int] | None]


def contents_of(folder: Path, known: Known = lambda path, signature: None) -> AdapterContents:
    """Read all of an adapter, or its headers alone where the rest is known. For a worker thread: it waits for the disk. Raises AdapterRejected."""
    with opened_adapter(folder, sys.maxsize, lambda config: (), MAX_HEADER_BYTES) as (found, file):
        hashes = known(str(folder), found.signature) or _hashes(file, found.head_digest, found.header)
        if found.signature != signature_from(os.stat(folder / CONFIG_FILE), os.fstat(file.fileno())):
            raise AdapterRejected(
                "The adapter's files changed while they were read. Load it again.", code="changed"
            )
    config = found.config
    return AdapterContents(
        path=folder,
        content_hash=hashes[0],
        checksum=hashes[1],
        sizes=found.sizes,
        signature=found.signature,
        rank=max(config["r"], *(config.get("rank_pattern") or {}).values(), 0),
        num_bytes=sum(entry.end - entry.begin for entry in own_tensors(found.header)),
        target_modules=_modules(found.header),
        base_model=base_model_of(config),
    )


def _hashes(file: FileIO, head: bytes, header: Header) -> tuple[str, int]:
    """Return the content's hash and the weights' checksum, as a node with the model does: what the base model has is passed over."""
    digest, checksum = hashlib.sha256(head), xxh3_64()
    for entry in own_tensors(header):
        file.seek(header.data_offset + entry.begin)
        left = entry.end - entry.begin
        while left and (chunk := file.read(min(CHUNK_BYTES, left))):
            digest.update(chunk)
            checksum.update(chunk)
            left -= len(chunk)
        if left:
            raise corrupt(f"it ends within {quoted(entry.name)}. Was it copied whole?")
    return digest.hexdigest(), checksum_of(checksum)


def read_piece(folder: Path, name: str, offset: int, num_bytes: int) -> bytes:
    """Read `num_bytes` of one of FILES from `offset` on, fewer at its end. Raises AdapterRejected."""
    with opened(folder, name) as file:
        file.seek(offset)
        return file.read(num_bytes) or b""


def _modules(header: Header) -> tuple[str, ...]:
    modules = {entry.name.partition(".lora_")[0] for entry in own_tensors(header)}
    return tuple(sorted({module.rpartition(".")[2] for module in modules}))
