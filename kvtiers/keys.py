"""What a KV block is called, and what shape its bytes have.

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
    """One KV block: `num_layers` parts of `layer_bytes` each, the same for every layer."""

    num_layers: int
    layer_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


class Namespace(Struct, frozen=True, kw_only=True):
    """Everything that must be equal for two processes to share KV blocks, and a name to read.

    model: for readers; the same weights in another folder are the same. revision: tells the weights apart. computation: tells apart what is
    computed with them: the model's configuration, and settings that change it. hash_seed: what the chain of block hashes begins with.
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
        """The same for all that may share blocks, wherever they keep the model and however they call it."""
        nameless = msgspec.structs.replace(self, model="")
        return hashlib.sha256(msgspec.json.encode(nameless, order="sorted")).hexdigest()[:32]

    def folder_in(self, root: Path) -> Path:
        """Where a store of this namespace lies: in a folder that is there, under whatever name of the model, or in one with a name to read."""
        end = f"-{self.fingerprint[:16]}"
        found = next(iter(sorted(root.glob(f"*{end}"))), None)
        readable = "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(self.model).name)
        return found or root / (readable[:40] + end)
