"""The adapters whose weights the workers can read."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine_bridge.driver.assist.allocator import FirstFitAllocator, align
from engine_bridge.driver.assist.layout import FLOAT_BYTES, WORD_BYTES, head_bytes
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


@dataclass(slots=True)
class Adapter:
    """One adapter's stretch of the weights region."""

    offset: int
    modules: dict[str, Module]


class WeightStore:
    """Adapters in the weights region, each in one stretch of it.

    `put` and `drop` may be called from one thread while another has workers read: `drop` waits for them.

    Args:
        region: shared with the workers.
        num_bytes: how many of its bytes may be used.
        max_in, max_out: the widest module.
    """

    def __init__(self, region: mmap.mmap, num_bytes: int, max_in: int, max_out: int) -> None:
        self._words = memoryview(region).cast("q")
        self._floats = torch.frombuffer(region, dtype=torch.float32)
        self._room = FirstFitAllocator(num_bytes)
        self._max_in, self._max_out = max_in, max_out
        self._adapters: dict[int, Adapter] = {}
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """The free bytes of the region in all."""
        return self._room.free_bytes

    def find(self, adapter_id: int) -> Adapter | None:
        """Return an adapter's place in the region; None if it is not there."""
        return self._adapters.get(adapter_id)

    def put(self, adapter_id: int, weights: Mapping[str, SlotWeights]) -> bool:
        """Copy an adapter's weights into the region: see `AssistPool.put`."""
        for name, layer in weights.items():
            self._check(name, layer)
        with self._lock:
            if adapter_id in self._adapters:
                raise ValueError(f"adapter {adapter_id} is in the assist pool already")
            offset = self._room.allocate(sum(_layer_bytes(layer) for layer in weights.values()))
        if offset is None:
            return False
        adapter = Adapter(offset, {})
        at = offset
        for name, layer in weights.items():
            adapter.modules[name] = self._write(at, layer)
            at += _layer_bytes(layer)
        with self._lock:
            self._adapters[adapter_id] = adapter
        return True

    def drop(self, adapter_id: int) -> None:
        """Forget an adapter: see `AssistPool.drop`."""
        with self._lock:
            adapter = self._adapters.pop(adapter_id, None)
            if adapter is not None:
                self._room.free(adapter.offset)

    @contextmanager
    def kept(self, adapter_id: int, module: str) -> Iterator[Module]:
        """Yield a module's place, where the weights stay until the block ends. Raises KeyError if they are not here."""
        with self._lock:
            yield self._adapters[adapter_id].modules[module]

    def _check(self, name: str, layer: SlotWeights) -> None:
        module = _describe(0, layer)
        if module.least_in > self._max_in or module.least_out > self._max_out:
            raise ValueError(f"module {name} is wider than the assist pool")
        if layer.a is not None and layer.a.size(1) < max(part.high for part in layer.expands):
            raise ValueError(f"module {name}: B needs more ranks than A has")
        for part in layer.expands:
            if tuple(part.b.shape) != (part.high - part.low, part.right - part.left):
                raise ValueError(f"module {name}: b is {tuple(part.b.shape)}, not what its edges say")

    def _write(self, offset: int, layer: SlotWeights) -> Module:
        """Write one layer's head and matrices at `offset`, `_layer_bytes` in all, and return where they are."""
        at = offset + align(head_bytes(len(layer.expands)))
        total_rank = layer.a.size(1) if layer.a is not None else 0
        module = _describe(offset, layer)
        head = [module.num_in or 0, total_rank, at, len(layer.expands)]
        if layer.a is not None:
            at = self._write_matrix(at, layer.a)
        for part in layer.expands:
            head += [part.low, part.high, part.left, part.right, at]
            at = self._write_matrix(at, part.b)
        for i, word in enumerate(head, start=offset // WORD_BYTES):
            self._words[i] = word
        return module

    def _write_matrix(self, offset: int, matrix: torch.Tensor) -> int:
        """Copy a matrix to `offset` as row-major fp32 and return where the next one may begin."""
        start = offset // FLOAT_BYTES
        self._floats[start : start + matrix.numel()].view(matrix.shape).copy_(matrix)
        return offset + _matrix_bytes(matrix)


def _describe(offset: int, layer: SlotWeights) -> Module:
    num_in = layer.a.size(0) if layer.a is not None else None
    least_in = num_in or max(part.high for part in layer.expands)
    return Module(offset, num_in, least_in, max(part.right for part in layer.expands))


def _matrix_bytes(matrix: torch.Tensor) -> int:
    return align(matrix.numel() * FLOAT_BYTES)


def _layer_bytes(layer: SlotWeights) -> int:
    matrices = [part.b for part in layer.expands] + ([layer.a] if layer.a is not None else [])
    return align(head_bytes(len(layer.expands))) + sum(_matrix_bytes(matrix) for matrix in matrices)
