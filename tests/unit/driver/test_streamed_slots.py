"""Slots of a GPU, with stand-ins for torch.cuda: tests/gpu has the real ones."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engine_bridge.driver.adapters import slots as slot_kinds  # noqa: E402  (after the skip)
from engine_bridge.driver.adapters.weights import AdapterWeights  # noqa: E402


class Stream:
    def wait_stream(self, other: Any) -> None: ...


class Memory:
    """Of an adapter: a tensor as far as streams are concerned."""

    def __init__(self, is_cuda: bool) -> None:
        self.is_cuda = is_cuda
        self.used_by: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        assert self.is_cuda, "torch refuses it for host memory"
        self.used_by.append(stream)


@pytest.mark.parametrize("is_cuda", [True, False])
def test_memory_of_the_device_that_a_slot_is_filled_from_is_kept_for_the_stream_that_copies(
    is_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = Stream()
    cuda = SimpleNamespace(
        Stream=lambda: side,
        current_stream=Stream,
        stream=lambda stream: nullcontext(),
        Event=lambda: SimpleNamespace(record=lambda stream: None),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    slots = slot_kinds.StreamedSlots(SimpleNamespace(modules={}))
    memory: Any = Memory(is_cuda)
    slots.fill(1, AdapterWeights({}, 0, memory))
    assert memory.used_by == ([side] if is_cuda else [])
