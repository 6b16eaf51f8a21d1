"""The keys of KV blocks, and the shape of their bytes.

A block's key is vLLM's block hash: SHA-256 over the parent's hash, the block's token ids, the adapter's content and the cache salt. Weights,
dtype and layout are not in it: they are the store's `Namespace`, so that no key means two things. No path is in either: another folder, or
another machine, makes the same keys.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NewType

import msgspec
from msgspec import Struct

BlockKey = NewType("BlockKey", bytes)
KEY_BYTES = 32
FORMAT_VERSION = 4


class BlockShape(Struct, frozen=True):
    """The shape of a KV block: `num_layers` parts of `layer_bytes` each."""

    num_layers: int
    layer_bytes: int

    @property
    def block_bytes(self) -> int:
        """The size of a block in bytes."""
        return self.num_layers * self.layer_bytes


class Namespace(Struct, frozen=True, kw_only=True):
    """The properties that must be equal for two processes to share KV blocks, and a name for people.

    Attributes:
        model: the name for people; the same weights in another folder are the same model.
        revision: tells weights apart.
        computation: tells configurations of the model, and settings that change its results, apart.
        hash_seed: the beginning of the chain of block hashes.
    """

    model: str
    revision: str
    computation: str
    dtype: str
    block_size_tokens: int
    layout: str
    hash_algorithm: str
    hash_seed: str
    shape: BlockShape
    format_version: int = FORMAT_VERSION

    @property
    def fingerprint(self) -> str:
        """A digest that is equal for all processes that may share blocks, wherever they keep the model and whatever they call it."""
        nameless = msgspec.structs.replace(self, model="")
        return hashlib.sha256(msgspec.json.encode(nameless, order="sorted")).hexdigest()[:32]

    def folder_in(self, root: Path) -> Path:
        """Return the folder of this namespace's store: an existing one under any name of the model, else a new one with a readable name."""
        end = f"-{self.fingerprint[:16]}"
        found = next(iter(sorted(root.glob(f"*{end}"))), None)
        readable = "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(self.model).name)
        return found or root / (readable[:40] + end)
