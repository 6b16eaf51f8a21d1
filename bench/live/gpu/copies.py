"""What the link between host memory and the device gives, and what our copies of KV blocks make of it.

    python -m bench.live.gpu.copies [--device cpu]

Plain copies of one stretch, each way and both ways at once on two streams; then the server's own copier, with blocks that lie anywhere on the device
and side by side in host memory, one layer after the other as in a step. On a GPU also vLLM's call that takes all copies of a step at once
(`swap_blocks_batch`), for rows of 64 and 128 KB. The last line is JSON: GB/s, each the median of several rounds.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from bench.live.shared.report import options
from engine_bridge.driver.memory.block_copy import make_copier
from kvtiers.io.host_pool import HostPool

ROUNDS = 5
ROW_BYTES = (64 << 10, 128 << 10)
NUM_LAYERS = 8


def gb_s(copy: Callable[[], None], num_bytes: int, wait: Callable[[], None]) -> float:
    """Return the median speed of a copy. wait: returns once it is done."""
    times = []
    for number in range(ROUNDS + 1):
        wait()
        began_s = time.perf_counter()
        copy()
        wait()
        if number:  # the first one warms up
            times.append(time.perf_counter() - began_s)
    return round(num_bytes / statistics.median(times) / 1e9, 2)


def plain(num_bytes: int, device: str, wait: Callable[[], None]) -> dict[str, float]:
    """Return the speeds of copies of one stretch; both ways at once count the bytes of both."""
    is_cuda = device == "cuda"
    out, back = (torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2))
    on_device = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    found = {
        "to_device": gb_s(lambda: _copy(on_device[0], back), num_bytes, wait),
        "to_host": gb_s(lambda: _copy(out, on_device[1]), num_bytes, wait),
    }
    if is_cuda:
        streams = [torch.cuda.Stream() for _ in range(2)]

        def both() -> None:
            """Copy both ways at once."""
            for stream, (into, source) in zip(
                streams, ((on_device[0], back), (out, on_device[1])), strict=True
            ):
                with torch.cuda.stream(stream):
                    _copy(into, source)

        found["both_ways"] = gb_s(both, 2 * num_bytes, wait)
    return found


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source, non_blocking=True)


def blocks(num_bytes: int, row_bytes: int, device: str, wait: Callable[[], None]) -> dict[str, float]:
    """Return the speeds of our copier with rows of this size, each way, layer by layer."""
    num_rows = num_bytes // row_bytes // NUM_LAYERS
    layers = [
        torch.zeros((2 * num_rows, row_bytes), dtype=torch.uint8, device=device) for _ in range(NUM_LAYERS)
    ]
    pool = HostPool(row_bytes, num_rows * NUM_LAYERS * row_bytes)
    pool.populate(lambda: True)
    copier = make_copier(layers, pool.region, lambda run: run())
    chosen = random.Random(row_bytes).sample(range(2 * num_rows), num_rows)
    slots = [list(range(layer * num_rows, (layer + 1) * num_rows)) for layer in range(NUM_LAYERS)]

    def way(copy: Callable[[int, Sequence[int], Sequence[int]], None]) -> Callable[[], None]:
        """Return a function that copies all layers, as a step does."""

        def step() -> None:
            """Copy all layers."""
            for layer in range(NUM_LAYERS):
                copy(layer, chosen, slots[layer])
            copier.end_step(lambda: None)

        return step

    moved = num_rows * row_bytes * NUM_LAYERS
    found = {
        "to_device": gb_s(way(copier.to_device), moved, wait),
        "to_host": gb_s(way(copier.to_host), moved, wait),
    }
    if device == "cuda":
        found |= _batched(layers, pool.region, chosen, slots, wait)
    return found


def _batched(
    layers: Sequence[torch.Tensor],
    region: np.ndarray[Any, Any],
    chosen: Sequence[int],
    slots: Sequence[Sequence[int]],
    wait: Callable[[], None],
) -> dict[str, float]:
    """Return the speeds of vLLM's one call for all layers."""
    from vllm._custom_ops import swap_blocks_batch

    row_bytes = region.shape[1]
    on_device = np.concatenate(
        [layer.data_ptr() + np.array(chosen, dtype=np.int64) * row_bytes for layer in layers]
    )
    in_host = (
        region.ctypes.data + np.concatenate([np.array(each, dtype=np.int64) for each in slots]) * row_bytes
    )
    device, host = torch.from_numpy(on_device), torch.from_numpy(in_host)
    sizes = torch.full((len(on_device),), row_bytes, dtype=torch.int64)
    moved = len(on_device) * row_bytes
    return {
        "batched_to_device": gb_s(lambda: swap_blocks_batch(host, device, sizes, True), moved, wait),
        "batched_to_host": gb_s(lambda: swap_blocks_batch(device, host, sizes, False), moved, wait),
    }


def main() -> None:
    """Run the bench from the command line."""
    parser = options(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--mib", type=int, default=1024, help="how much is copied each way")
    args = parser.parse_args()
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    num_bytes = args.mib << 20
    found: dict[str, Any] = {"one_stretch": plain(num_bytes, args.device, wait)}
    for row_bytes in ROW_BYTES:
        found[f"blocks_of_{row_bytes >> 10}_kb"] = blocks(num_bytes, row_bytes, args.device, wait)
    if args.device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
