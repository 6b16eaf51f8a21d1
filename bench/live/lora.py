"""CPU LoRA: our wrapper against vLLM's own, on the same layers, and whether a mixed batch keeps its tokens.

    python -m bench.live.lora [--quick]

The time is that of all `add_lora_linear` calls of a step (q k v, o, gate up, down in each layer), without the base model.
Both wrappers run in one process on stacks of the same content, in turns. Five adapters of ranks 8 to 128 in slots of maximum
rank 128; decode: 16 rows, adapters and base interleaved; prefill: 64 rows of the rank-64 adapter. Warm-up: one call each.
One thread, both: with two, on cores shared with other jobs, each small operation may wait a whole 3 ms time slice for its other
thread, and the same code took 7 to 220 ms per step from one run to the next.

The last line is JSON. `lora_decode_ratio` and `lora_prefill_ratio` are our time over vLLM's (minimum over minimum; smaller is
better). `*_floor_ratio` is our time over the time in which this machine could read the weights of the step's adapters once, as
we hold them (fp32, true rank). `mixed_batch_identical`: a real engine (tiny fp32 Llama) answers five adapters and the base
in one batch, token for token, as one by one.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.live.report import options

RANKS = (8, 16, 32, 64, 128)
MAX_RANK = 128
HIDDEN, KV_WIDTH, INTERMEDIATE = 1024, 512, 2816
# (inner width, output widths) of vLLM's four LoRA layers in one Llama block
SHAPES = (
    (HIDDEN, (HIDDEN, KV_WIDTH, KV_WIDTH)),
    (HIDDEN, (HIDDEN,)),
    (HIDDEN, (INTERMEDIATE, INTERMEDIATE)),
    (INTERMEDIATE, (HIDDEN,)),
)
DECODE_IDS = [1, 0, 2, 3, 4, 5, 1, 2, 0, 3, 4, 5, 1, 2, 3, 4]  # adapter id per row; 0 is the base model
PREFILL_IDS = [4] * 64


def make_layer(num_in: int, outs: tuple[int, ...], generator: Any) -> SimpleNamespace:
    """What a wrapper sees of a vLLM LoRA layer: the stacks, and the two functions that fill them."""
    import torch

    a = tuple(torch.zeros(len(RANKS), 1, MAX_RANK, num_in, dtype=torch.bfloat16) for _ in outs)
    b = tuple(torch.zeros(len(RANKS), 1, out, MAX_RANK, dtype=torch.bfloat16) for out in outs)

    def set_lora(index: int, lora_a: list[Any], lora_b: list[Any]) -> None:
        for stack, weight in zip(a, lora_a, strict=True):
            stack[index, 0, : weight.size(0)] = weight
        for stack, weight in zip(b, lora_b, strict=True):
            stack[index, 0, :, : weight.size(1)] = weight

    def random(*shape: int) -> Any:
        return (torch.randn(shape, generator=generator) * 0.05).bfloat16()

    layer = SimpleNamespace(
        lora_a_stacked=a, lora_b_stacked=b, set_lora=set_lora, reset_lora=lambda index: None, outs=outs
    )
    layer.adapters = [
        ([random(rank, num_in) for _ in outs], [random(out, rank) for out in outs]) for rank in RANKS
    ]
    return layer


def make_step(
    wrapper: Any, layers: list[SimpleNamespace], ids: list[int], generator: Any
) -> Callable[[], list[Any]]:
    """Prepare `wrapper` for a step with these rows; the returned function runs its LoRA part and returns the outputs."""
    import torch

    mapping = SimpleNamespace(
        index_mapping=ids, prompt_mapping=ids, is_prefill=True
    )  # vLLM says is_prefill always
    wrapper.update_metadata(mapping, list(range(1, len(RANKS) + 1)), len(RANKS) + 1, 1000)
    inputs = {n: torch.randn(len(ids), n, generator=generator).bfloat16() for n in (HIDDEN, INTERMEDIATE)}
    outputs = [torch.zeros(len(ids), sum(layer.outs), dtype=torch.bfloat16) for layer in layers]

    def step() -> list[Any]:
        for y, layer in zip(outputs, layers, strict=True):
            x = inputs[layer.lora_a_stacked[0].size(-1)]
            wrapper.add_lora_linear(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, layer.outs)
        return outputs

    return step


def measure_wrappers(num_blocks: int, repeats: int, inner: int) -> dict[str, Any]:
    """Time both wrappers in turns on `num_blocks` Llama blocks. Times in ms per step."""
    import torch
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from engine_bridge.driver.lora.lora import SegmentPunicaWrapper

    torch.set_num_threads(1)  # see the module docstring
    generator = torch.Generator().manual_seed(0)
    layers = [make_layer(*shape, generator) for _ in range(num_blocks) for shape in SHAPES]
    wrappers = {"ours": SegmentPunicaWrapper(256, 64, "cpu"), "vllm": PunicaWrapperCPU(256, 64, "cpu")}
    for layer in layers:
        wrappers["ours"].watch(layer)
    start = time.perf_counter()
    for layer in layers:
        for slot, weights in enumerate(layer.adapters):
            layer.set_lora(slot, *weights)
    result: dict[str, Any] = {"fill_slots_ms": 1e3 * (time.perf_counter() - start)}
    with torch.inference_mode():
        for name, ids in (("decode", DECODE_IDS), ("prefill", PREFILL_IDS)):
            steps = {
                who: make_step(wrapper, layers, ids, generator.manual_seed(1))
                for who, wrapper in wrappers.items()
            }
            check_same(steps, ids)
            result[name] = time_in_turns(steps, repeats, {"ours": inner, "vllm": 1})
        result["cached_mb"] = wrappers["ours"].cached_bytes / 1e6
        result["bandwidth_gb_s"] = read_bandwidth() / 1e9
    return result


def check_same(steps: dict[str, Callable[[], list[Any]]], ids: list[int]) -> None:
    """Warm up, and make sure that both compute the same for rows with an adapter (vLLM's base rows are wrong)."""
    import torch

    rows = [row for row, adapter in enumerate(ids) if adapter]
    for ours, theirs in zip(steps["ours"](), steps["vllm"](), strict=True):
        torch.testing.assert_close(ours[rows], theirs[rows], rtol=0.05, atol=0.05)


def time_in_turns(
    steps: dict[str, Callable[[], Any]], repeats: int, inner: dict[str, int]
) -> dict[str, list[float]]:
    """Return ms per step and repeat. Each repeat takes the best of `inner` steps: other jobs share the machine's cores."""
    times: dict[str, list[float]] = {who: [] for who in steps}
    for _ in range(repeats):
        for who, step in steps.items():
            best = float("inf")
            for _ in range(inner[who]):
                start = time.perf_counter()
                step()
                best = min(best, time.perf_counter() - start)
            times[who].append(1e3 * best)
    return times


def read_bandwidth() -> float:
    """Bytes per second at which torch reads memory that is in no cache (best of 8 sums over 256 MB)."""
    import torch

    block = torch.ones(64_000_000)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        block.sum()
        best = min(best, time.perf_counter() - start)
    return block.numel() * 4 / best


def weight_bytes(ids: list[int], num_blocks: int) -> int:
    """Bytes of the weights of a step's adapters at their true rank in fp32."""
    ranks = sum(RANKS[adapter - 1] for adapter in set(ids) if adapter)
    return 4 * num_blocks * ranks * sum(num_in * len(outs) + sum(outs) for num_in, outs in SHAPES)


def mixed_batch_identical() -> bool:
    """Does a real engine answer five adapters and the base in one batch as it answers them one by one?"""
    from vllm.lora.request import LoRARequest

    from bench.live.mixed_batch import PROMPT, SHAPE, Engine
    from bench.live.models import model_folder, write_adapter
    from engine_bridge.driver.lora import lora

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        requests: list[tuple[list[int], Any]] = [(PROMPT, None)]
        for number, rank in enumerate(RANKS, start=1):
            write_adapter(root / f"rank{rank}", SHAPE, rank, seed=rank, modules=list(SHAPE.linears))
            requests.append((PROMPT, LoRARequest(f"rank{rank}", number, str(root / f"rank{rank}"))))
        lora.install()
        engine = Engine(model_folder(SHAPE), enable_lora=True, max_loras=len(RANKS), max_lora_rank=MAX_RANK)
        lora.check_engine(engine.engine)
        alone = [engine.run(request)[0] for request in requests]
        mixed = engine.run(*requests)
        engine.close()
    return mixed == alone and len({tuple(answer) for answer in alone}) == len(alone)


def report(times: dict[str, Any], num_blocks: int) -> dict[str, Any]:
    """Print the table and return what goes into the JSON line."""
    out: dict[str, Any] = {}
    print(f"\n{'step':8} {'wrapper':8} {'min ms':>9} {'median':>9} {'max':>9}")
    for name, ids in (("decode", DECODE_IDS), ("prefill", PREFILL_IDS)):
        for who, ms in times[name].items():
            print(f"{name:8} {who:8} {min(ms):9.2f} {statistics.median(ms):9.2f} {max(ms):9.2f}")
        ours, theirs = min(times[name]["ours"]), min(times[name]["vllm"])
        floor = weight_bytes(ids, num_blocks) / times["bandwidth_gb_s"] / 1e6
        print(
            f"{name:8} {'floor':8} {floor:9.2f}   ours/vllm {ours / theirs:.4f}   ours/floor {ours / floor:.2f}"
        )
        out |= {
            f"lora_{name}_ratio": round(ours / theirs, 5),
            f"lora_{name}_ms": round(ours, 3),
            f"lora_{name}_vllm_ms": round(theirs, 3),
            f"lora_{name}_spread_ms": [round(x, 3) for x in (ours, max(times[name]["ours"]))],
            f"lora_{name}_floor_ms": round(floor, 3),
            f"lora_{name}_floor_ratio": round(ours / floor, 2),
        }
    print(f"fill 5 slots {times['fill_slots_ms']:.0f} ms, laid-out weights {times['cached_mb']:.0f} MB")
    return out | {
        "bandwidth_gb_s": round(times["bandwidth_gb_s"], 2),
        "lora_fill_slots_ms": round(times["fill_slots_ms"], 1),
        "lora_cached_mb": round(times["cached_mb"], 1),
    }


def main() -> None:
    quick = options(__doc__, quick="fewer layers and repeats, under a minute").parse_args().quick
    num_blocks = 2 if quick else 4
    print(
        f"{num_blocks} Llama blocks of hidden {HIDDEN}, adapters of ranks {RANKS} in slots of rank {MAX_RANK}"
    )
    # Before the engine, which pins torch's threads and from then on ignores set_num_threads.
    times = measure_wrappers(num_blocks, repeats=3 if quick else 5, inner=8 if quick else 12)
    identical = mixed_batch_identical()
    print(f"mixed batch identical to single runs: {identical}")
    result = report(times, num_blocks) | {
        "mixed_batch_identical": identical,
        "num_blocks": num_blocks,
        "quick": quick,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
