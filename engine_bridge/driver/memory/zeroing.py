"""Overwriting blocks of a KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvtiers.io.host_pool import runs_of


def zero(kv_caches: Iterable[Any], blocks: Sequence[int]) -> None:
    """Overwrite these blocks in each tensor of a KV cache, whose first dimension is the block."""
    runs = list(runs_of(sorted(blocks)))
    for cache in kv_caches:
        for start, length in runs:
            cache[start : start + length].zero_()
