"""What an adapter's folder holds, told without a model: for whoever passes adapters on, or keeps them for others to load."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final

from engine_bridge.adapters.checksum import Checksum
from engine_bridge.adapters.config import CONFIG_FILE, check_config, parse_config
from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.files import (
    CHUNK_BYTES,
    check_folder,
    check_format,
    digest_of,
    opened,
    read_config,
    signature_from,
)
from engine_bridge.adapters.header import WEIGHTS_FILE, Header, corrupt, read_header

# The two files that make an adapter; whatever else lies beside them is neither read nor passed on.
FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)
# Chosen: of a hundred thousand tensors. A node has a tighter bound, for it knows its model.
MAX_HEADER_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class AdapterContents:
    """An adapter whose files are sound in themselves; whether it fits a model is that model's to say.

    content_hash: as `files.content_hash`. checksum, num_bytes: of the weights. sizes: of its files, by name. signature: as `files.signature_of`.
    """

    path: Path
    content_hash: str
    checksum: int
    sizes: dict[str, int]
    signature: str
    rank: int
    num_bytes: int
    target_modules: tuple[str, ...]
    base_model: str | None


# What is known of files by their path and signature: their hash, and the checksum of their weights.
Known = Callable[[str, str], tuple[str, int] | None]


def contents_of(folder: Path, known: Known = lambda path, signature: None) -> AdapterContents:
    """Read all of an adapter, or its headers alone where the rest is known. For a worker thread: it waits for the disk. Raises AdapterRejected."""
    check_folder(folder)
    raw, config_stat = read_config(folder)
    config, canonical = parse_config(raw)
    check_config(config, sys.maxsize, lambda config: ())
    check_format(folder)
    with opened(folder, WEIGHTS_FILE) as file:
        weights_stat = os.fstat(file.fileno())
        header = read_header(file, weights_stat.st_size, MAX_HEADER_BYTES)
        signature = signature_from(config_stat, weights_stat)
        num_bytes = weights_stat.st_size - header.data_offset
        hashes = known(str(folder), signature) or _hashes(file, digest_of((canonical, header.raw)), num_bytes)
        if signature != signature_from(os.stat(folder / CONFIG_FILE), os.fstat(file.fileno())):
            raise AdapterRejected(
                "The adapter's files changed while they were read. Load it again.", code="changed"
            )
    return AdapterContents(
        path=folder,
        content_hash=hashes[0],
        checksum=hashes[1],
        sizes={CONFIG_FILE: len(raw), WEIGHTS_FILE: weights_stat.st_size},
        signature=signature,
        rank=_rank(config),
        num_bytes=num_bytes,
        target_modules=_modules(header),
        base_model=_base_model(config),
    )


def _hashes(file: FileIO, head: bytes, num_bytes: int) -> tuple[str, int]:
    """The content's hash and the weights' checksum. file: at the start of the weights."""
    digest, checksum, left = hashlib.sha256(head), Checksum(), num_bytes
    while left and (chunk := file.read(min(CHUNK_BYTES, left))):
        digest.update(chunk)
        checksum.update(chunk)
        left -= len(chunk)
    if left:
        raise corrupt(f"it ends {left} bytes too early. Was it copied whole?")
    return digest.hexdigest(), checksum.value


def read_piece(folder: Path, name: str, offset: int, num_bytes: int) -> bytes:
    """So many bytes of one of FILES, fewer at its end. Raises AdapterRejected."""
    with opened(folder, name) as file:
        file.seek(offset)
        return file.read(num_bytes) or b""


def _rank(config: dict[str, Any]) -> int:
    rank: int = max(config["r"], *(config.get("rank_pattern") or {}).values(), 0)
    return rank


def _modules(header: Header) -> tuple[str, ...]:
    """The last parts of the modules' names."""
    modules = {entry.name.partition(".lora_")[0] for entry in header.entries}
    return tuple(sorted({module.rpartition(".")[2] for module in modules}))


def _base_model(config: dict[str, Any]) -> str | None:
    name = config.get("base_model_name_or_path")
    return name.encode("utf-8", "replace").decode() if isinstance(name, str) and name else None
