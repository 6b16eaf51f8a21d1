"""How an adapter's layers lie in the memory that the workers read."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch

from engine_bridge.driver.assist.allocator import align
from engine_bridge.driver.assist.layout import FLOAT_BYTES, WORD_BYTES, head_bytes, matrix
from engine_bridge.driver.lora.lora_weights import SlotWeights


@dataclass(frozen=True, slots=True)
class Module:
    """The place of one layer's head in the weights region, and the widths that the layer takes.

    `num_in` is None without A: then x needs `least_in` columns.
    """

    head: int
    num_in: int | None
    least_in: int
    least_out: int


class WeightsRegion:
    """The weights region, in which adapters are written. region: shared with the workers."""

    def __init__(self, region: mmap.mmap) -> None:
        self._words = memoryview(region).cast("q")
        self._floats = torch.frombuffer(region, dtype=torch.float32)

    def write(self, offset: int, layer: SlotWeights) -> Module:
        """Write one layer's head and matrices at `offset`, `layer_bytes` in all, and return where they are."""
        at = offset + align(head_bytes(len(layer.expands)))
        total_rank = layer.a.size(1) if layer.a is not None else 0
        module = described(offset, layer)
        head = [module.num_in or 0, total_rank, at, len(layer.expands)]
        if layer.a is not None:
            at = self._write_matrix(at, layer.a)
        for part in layer.expands:
            head += [part.low, part.high, part.left, part.right, at]
            at = self._write_matrix(at, part.b)
        for i, word in enumerate(head, start=offset // WORD_BYTES):
            self._words[i] = word
        return module

    def _write_matrix(self, offset: int, values: torch.Tensor) -> int:
        """Copy a matrix to `offset` as row-major fp32 and return where the next one may begin."""
        matrix(self._floats, offset, *values.shape).copy_(values)
        return offset + _matrix_bytes(values)


def described(offset: int, layer: SlotWeights) -> Module:
    """Return a layer's place and widths."""
    num_in = layer.a.size(0) if layer.a is not None else None
    least_in = num_in or max(part.high for part in layer.expands)
    return Module(offset, num_in, least_in, max(part.right for part in layer.expands))


def _matrix_bytes(values: torch.Tensor) -> int:
    return align(values.numel() * FLOAT_BYTES)


def layer_bytes(layer: SlotWeights) -> int:
    """Return the bytes that a layer takes in the region."""
    matrices = [part.b for part in layer.expands] + ([layer.a] if layer.a is not None else [])
    return align(head_bytes(len(layer.expands))) + sum(map(_matrix_bytes, matrices))
