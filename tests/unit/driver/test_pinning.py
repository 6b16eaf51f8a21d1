"""What CUDA's runtime is asked for, and in which order, while host memory is pinned. The runtime records its calls, and refuses some."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from engine_bridge.driver.memory import pinning
from engine_bridge.driver.memory.pinning import Pinning, Region, pieces
from kvtiers.io.host_pool import HostPool

PAGE = mmap.PAGESIZE
SLOT = 3 * PAGE // 2
ALREADY_REGISTERED = 712


class Runtime:
    """CUDA's runtime as far as it has to do with host memory: an error stays pending until somebody asks for it."""

    def __init__(self, refused: tuple[int, ...] = ()) -> None:
        self.calls: list[str] = []
        self.refused = refused
        self.locked: dict[int, int] = {}
        self.pending = self._num_asked = 0

    def cudaHostRegister(self, ptr: int, size: int, flags: int = 0) -> int:
        self.calls.append("register")
        self._num_asked += 1
        is_taken = any(start < ptr + size and ptr < start + length for start, length in self.locked.items())
        if is_taken or self._num_asked in self.refused:
            self.pending = ALREADY_REGISTERED
            return self.pending
        self.locked[ptr] = size
        return 0

    def cudaHostUnregister(self, ptr: int) -> int:
        self.calls.append("unregister")
        del self.locked[ptr]
        return 0

    def cudaGetLastError(self) -> int:
        self.calls.append("error?")
        last, self.pending = self.pending, 0
        return last


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "MAX_PIECE_BYTES", 8 * PAGE)  # two units of two slots


def test_an_engine_that_is_built_again_finds_its_region_pinned() -> None:
    runtime = Runtime()
    pin = Pinning(lambda: runtime).pin
    pool = HostPool(SLOT, 40 * SLOT)
    pin(pool.region)
    pin(pool.region.view())
    assert runtime.calls == ["register"]
    assert runtime.locked == {pool.region.ctypes.data: pool.region.nbytes}


def test_a_region_is_unpinned_once_no_view_of_it_is_left_and_before_its_memory_goes(
    small_pieces: None,
) -> None:
    runtime = Runtime()
    pin = Pinning(lambda: runtime).pin
    pool = HostPool(SLOT, 10 * SLOT)
    pin(pool.region)
    view = pool.region[2:4]
    del pool
    assert runtime.calls == ["register"] * 3  # a copy may still read the view
    del view
    assert runtime.calls == ["register"] * 3 + ["unregister"] * 3
    assert not runtime.locked


def test_another_region_at_the_same_address_is_pinned_anew() -> None:
    runtime = Runtime()
    pin = Pinning(lambda: runtime).pin
    memory = mmap.mmap(-1, 4 * SLOT)

    def region() -> Region:
        return np.frombuffer(memory, dtype=np.uint8).reshape(4, SLOT)

    for _ in range(2):
        pin(region())
    assert runtime.calls == ["register", "unregister"] * 2


def test_what_cannot_be_pinned_whole_is_not_pinned_and_no_error_stays_pending(
    small_pieces: None, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(refused=(3,))
    pin = Pinning(lambda: runtime).pin
    pool = HostPool(SLOT, 10 * SLOT)
    pin(pool.region)
    assert runtime.calls == [*["register"] * 3, "error?", *["unregister"] * 2]
    assert not runtime.locked and runtime.pending == 0
    assert "712" in caplog.text
    pin(pool.region)  # the next engine tries again
    assert len(runtime.locked) == 3


def test_without_cuda_nothing_is_pinned(caplog: pytest.LogCaptureFixture) -> None:
    def runtime() -> Runtime:
        raise OSError("libcudart.so: not found")

    Pinning(runtime).pin(HostPool(SLOT, 4 * SLOT).region)
    assert "not found" in caplog.text


@pytest.mark.parametrize(
    ("num_bytes", "slot_bytes", "most_bytes"),
    [(40 * SLOT, SLOT, 8 * PAGE), (300 << 30, 131072, 64 << 30), (7 * SLOT, SLOT, PAGE), (5, 5, 64 << 30)],
)
def test_pieces_cover_a_region_and_share_neither_slots_nor_pages(
    num_bytes: int, slot_bytes: int, most_bytes: int
) -> None:
    found = pieces(num_bytes, slot_bytes, most_bytes)
    ends = [offset + size for offset, size in found]
    assert [offset for offset, _ in found] == [0, *ends[:-1]] and ends[-1] == num_bytes
    assert all(end % slot_bytes == 0 and end % PAGE == 0 for end in ends[:-1])
    assert all(size <= most_bytes for _, size in found) or most_bytes < 3 * PAGE
