"""LoRA on the CPU: one small GEMM per adapter at the adapter's true rank.

vLLM 0.32's own CPU path (`PunicaWrapperCPU`) has two faults that this module mends:

* rows of the base model carry the index -1, which a tensor lookup reads as *the last slot*: in a mixed batch the base
  model answers with somebody's adapter (vllm-project/vllm#48421, #49656);
* each token gathers its own copy of the weights at the *configured* maximum rank, so a rank-8 adapter costs as much as a
  rank-128 one and a 64-token prefill reads the adapter 64 times.

Here `update_metadata` sorts the rows of a step by adapter, once; each layer then runs, per adapter, `x @ A` and
`y += (x @ A) @ B` over that adapter's rows, on weights that were laid out when they entered the slot.

Use: `install()` before the engine is built, `check_engine(engine)` after. On CUDA `install()` does nothing: vLLM's Triton
kernels skip -1 and do not gather.

Source: Punica (arXiv:2310.18547) for computing by segments of equal adapter. bench/live/lora.py measures both paths.

**Why fp32.** A row's answer should not depend on its companions in the batch, or greedy tokens of a mixed batch drift from
those of the same request alone. Measured with torch 2.13 on an AVX-512 Xeon without bf16 instructions (2 cores):

* fp32 `torch.mm` with both operands row-major beats the best bf16 form (vLLM's prepacked oneDNN) 1.5 to 6 times there
  (3 rows, hidden 1024: rank 8 5 µs against 31, rank 64 16 against 39, rank 128 29 against 43), although it reads twice the
  bytes. On a CPU with AMX bf16 may win for long prefills; not measured;
* its rows are bit-identical for every number of rows from two up: expands in all shapes tried, shrinks up to an inner
  dimension of 768 (1 and 2 threads). One row alone goes to a GEMV with another order of summation; on an AMD EPYC with AVX-512
  MKL takes another kernel below four rows; with two threads it also deals rows out in fours, so that of 5 to 7 and of 9 to 11 rows the
  last one to three come out of that other kernel (4 to 48 rows tried). So those counts are filled up with repetitions
  (`filled`, `plan_rows`). From inner dimensions of 896 on, MKL on an Intel Xeon cuts the sums of many rows in two; `shrink` keeps it from
  that where one thread computes. On several, MKL splits them over the threads, depending on the row count; then the last
  fp32 bits differ, of which a bf16 step holds 65,536. We leave that: shrinking in pieces of 512 is exact (1, 2, 8, 16
  threads) but takes 47 µs instead of 8 at rank 8 and 3 rows; `bmm` over the pieces takes 27 and is not exact;
* without AVX-512 MKL takes rows in sixes, and what is left of them, by kernels of their own (seen with MKL_ENABLE_INSTRUCTIONS=AVX2): there the
  last bits may hang on companions. We leave that, too: base weights' products do the same there;
* the delta is added to the base output in fp32 and rounded to the model's type once.

vLLM's own bf16 GEMMs for the base weights do change with the row count (0.04 to 0.4 % of the elements by one bf16 step, at
2 threads), with or without adapters; no LoRA code can mend that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import vllm.lora.model_manager as model_manager
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

from engine_bridge.driver.gemm import filled, shrink
from engine_bridge.errors import SeamMoved

NO_ADAPTER = -1

# Runs of one adapter shorter than this are sorted together with their neighbours; longer ones are computed where they lie.
# Measured at hidden 1024: sorting costs about 1.3 µs a row and layer, one group more about 40 µs.
LONG_RUN_ROWS = 32

# Up to this size the B matrices of a fused layer (q, k, v) become one block-diagonal matrix and one GEMM: the zeros cost less
# than two launches. Measured, 2048 columns: rank 16 (384 KiB) 15 µs against 44, rank 32 (768 KiB) 67 against 54.
BLOCK_DIAGONAL_BYTES = 512 * 1024
# Up to so many rows one core computes an adapter's GEMMs: waking the others takes longer than they save. Measured on two cores, 768 columns,
# ranks 16, 64 and 128: 4 rows 14, 52 and 144 µs against 46, 84 and 217; 16 rows 26, 96 and 304 against 57, 151 and 393. The bits are the same.
ONE_THREAD_ROWS = 16


# --- rows: which adapter computes which rows of the step (pure) ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Neighbouring rows `start:stop` of a step and how to cut them into groups of one adapter each.

    `slots[i]` owns the next `sizes[i]` rows; NO_ADAPTER rows are left as they are. With `order` the rows are first sorted:
    row `j` of the sorted block is row `order[j]` of the block, and `inverse` leads back.
    """

    start: int
    stop: int
    slots: tuple[int, ...]
    sizes: tuple[int, ...]
    order: torch.Tensor | None = None
    inverse: torch.Tensor | None = None

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the block's rows in group order, in fp32. Unsorted fp32 input comes back as a view, not a copy."""
        part = rows[self.start : self.stop]
        return (part if self.order is None else part.index_select(0, self.order)).float()

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Put the rows that `read` returned back to where they came from, rounded to the type of `rows`."""
        part = rows[self.start : self.stop]
        if self.inverse is None:
            part.copy_(values)
        else:
            torch.index_select(values.to(rows.dtype), 0, self.inverse, out=part)


def plan_rows(slots: Sequence[int]) -> tuple[RowBlock, ...]:
    """Decide how the rows of a step are grouped.

    `slots[i]` is the adapter slot of row `i`, or NO_ADAPTER. Long runs (prefills) stay in place; the short ones between them
    (decodes) are sorted by adapter so that each adapter needs one GEMM. Rows outside every block need no work.
    """
    blocks: list[RowBlock] = []
    stretch: list[tuple[int, int, int]] = []
    start = 0
    for slot, run in groupby(slots):
        stop = start + sum(1 for _ in run)
        if stop - start < LONG_RUN_ROWS:
            stretch.append((slot, start, stop))
        else:
            blocks += _plan_stretch(stretch)
            stretch = []
            if slot != NO_ADAPTER:
                blocks.append(RowBlock(start, stop, (slot,), (stop - start,)))
        start = stop
    return tuple(blocks + _plan_stretch(stretch))


def _plan_stretch(runs: list[tuple[int, int, int]]) -> list[RowBlock]:
    """Turn neighbouring short runs `(slot, start, stop)` into at most one block."""
    with_adapter = [i for i, run in enumerate(runs) if run[0] != NO_ADAPTER]
    if not with_adapter:
        return []
    runs = runs[with_adapter[0] : with_adapter[-1] + 1]
    used = [slot for slot, _, _ in runs if slot != NO_ADAPTER]
    sizes = [stop - start for slot, start, stop in runs if slot != NO_ADAPTER]
    if len(set(used)) == len(used) and all(filled(size) == size for size in sizes):
        return [
            RowBlock(
                runs[0][1],
                runs[-1][2],
                *zip(*((slot, stop - start) for slot, start, stop in runs), strict=True),
            )
        ]
    return [_sorted_block(runs)]


def _sorted_block(runs: list[tuple[int, int, int]]) -> RowBlock:
    """Gather the rows of each adapter; where they are few the last one is listed again (`filled`)."""
    first = runs[0][1]
    rows_of: dict[int, list[int]] = {}
    for slot, start, stop in runs:
        rows_of.setdefault(slot, []).extend(range(start - first, stop - first))
    for slot, rows in rows_of.items():
        if slot != NO_ADAPTER:
            rows_of[slot] = rows + rows[-1:] * (filled(len(rows)) - len(rows))
    order = [row for rows in rows_of.values() for row in rows]
    inverse = [order.index(row) for row in range(runs[-1][2] - first)]
    sizes = tuple(len(rows) for rows in rows_of.values())
    return RowBlock(first, runs[-1][2], tuple(rows_of), sizes, torch.tensor(order), torch.tensor(inverse))


class _OneThread:
    """Have this thread's operations run on it alone, inside of `with`."""

    def __enter__(self) -> None:
        self._num_threads = torch.get_num_threads()
        torch._C.set_num_threads(1)  # vLLM's CPU worker has replaced torch.set_num_threads by nothing

    def __exit__(self, *exception: object) -> None:
        torch._C.set_num_threads(self._num_threads)


_ONE_THREAD, _ALL_THREADS = _OneThread(), contextlib.nullcontext()


def _threads_for(num_rows: int) -> contextlib.AbstractContextManager[None]:
    return _ONE_THREAD if num_rows <= ONE_THREAD_ROWS else _ALL_THREADS


# --- weights: one adapter in one layer, laid out for the GEMMs ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expand:
    """`y[:, left:right] += h[:, low:high] @ b`, with `b` fp32 `[high - low, right - left]`."""

    low: int
    high: int
    left: int
    right: int
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class SlotWeights:
    """One adapter's weights in one layer at their true rank: fp32, row-major, so that no GEMM copies or transposes.

    `a` is `[in, sum of the slices' ranks]`: one GEMM shrinks for q, k and v together. None for embeddings, where vLLM looks A
    up itself. `storage` holds all of it and is used again by the slot's next adapter if that is not much smaller, because fresh pages cost more than
    the copy.
    """

    a: torch.Tensor | None
    expands: tuple[Expand, ...]
    storage: torch.Tensor

    def add_to(self, y: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        """Add the adapter's delta for fp32 rows `x` to fp32 rows `y`. Embeddings pass A's rows, padded to the maximum rank."""
        h = x if self.a is None else shrink(x, self.a, torch.get_num_threads())
        if scale != 1.0:
            h = h * scale
        for part in self.expands:
            y_part = y if part.left == 0 and part.right == y.size(1) else y[:, part.left : part.right]
            h_part = h if part.low == 0 and part.high == h.size(1) else h[:, part.low : part.high]
            y_part.addmm_(h_part, part.b)


# Adds a layer's delta for fp32 rows x, scaled, to fp32 rows y: (y, x, scale). False: it did not.
Compute = Callable[[torch.Tensor, torch.Tensor, float], bool]


class Pending:
    """Weights of one layer that are not laid out yet: whoever needs them first does it.

    Args:
        packs: of the layer, by slot; `pack`'s result takes this object's place there.
        lock: of the slot, so that two threads never work in its memory.
        compute: what adds the delta until then, in place of laying it out now.
    """

    __slots__ = ("_compute", "_lock", "_pack", "_packs", "_slot")

    def __init__(
        self,
        packs: list[Any],
        slot: int,
        pack: Callable[[], SlotWeights | None],
        lock: threading.Lock,
        compute: Compute | None = None,
    ) -> None:
        self._compute = compute
        self._packs = packs
        self._slot = slot
        self._pack = pack
        self._lock = lock

    @property
    def is_waiting(self) -> bool:
        return self._packs[self._slot] is self

    def add_to(self, y: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        """As `SlotWeights.add_to`."""
        if self._compute is not None and self.is_waiting and self._compute(y, x, scale):
            return
        weights = self.take()
        if weights is not None:
            weights.add_to(y, x, scale)

    def take(self) -> SlotWeights | None:
        """The weights, laid out now if nobody has. What lies in the slot by then, if it has another adapter."""
        with self._lock:
            if self.is_waiting:
                self._packs[self._slot] = self._pack()
            weights = self._packs[self._slot]
        return weights.take() if isinstance(weights, Pending) else weights


# Slots are filled inside steps (inference mode) and by add_lora (outside it): a tensor made inside may be rewritten only inside.
@torch.inference_mode()
def pack_slot(
    a_slices: Sequence[torch.Tensor] | None,
    b_slices: Sequence[torch.Tensor],
    ranks: Sequence[int],
    storage: torch.Tensor | None = None,
) -> SlotWeights | None:
    """Lay out one adapter's weights in one layer.

    Args:
        a_slices: per slice `[max rank, in]`; None for an embedding, which needs only B.
        b_slices: per slice `[out, max rank]`, in the order of the layer's output columns.
        ranks: true rank per slice; 0 where the adapter does not touch the slice.
        storage: fp32 memory to use if its size suits; whatever lay there is overwritten.

    Returns None if the adapter does not touch the layer.
    """
    total = sum(ranks)
    if total == 0:
        return None
    width = sum(b.size(0) for b in b_slices)
    is_one_matrix = len(ranks) == 1 or 4 * total * width <= BLOCK_DIAGONAL_BYTES
    num_in = a_slices[0].size(1) if a_slices is not None else 0
    num_b = (
        total * width if is_one_matrix else sum(r * b.size(0) for r, b in zip(ranks, b_slices, strict=True))
    )
    num_all = total * num_in + num_b
    # Twice as much as is needed would be kept for nothing.
    if storage is None or not num_all <= storage.numel() <= 2 * num_all:
        storage = torch.empty(num_all, dtype=torch.float32)
    a = None
    if a_slices is not None:
        a = storage[: total * num_in].view(num_in, total)
        _fill_a(a, a_slices, ranks)
    expands = _fill_b(storage[total * num_in : total * num_in + num_b], b_slices, ranks, is_one_matrix)
    return SlotWeights(a, expands, storage)


def _fill_a(a: torch.Tensor, a_slices: Sequence[torch.Tensor], ranks: Sequence[int]) -> None:
    low = 0
    for part, rank in zip(a_slices, ranks, strict=True):
        a[:, low : low + rank].copy_(part[:rank].t())
        low += rank


def _fill_b(
    memory: torch.Tensor, b_slices: Sequence[torch.Tensor], ranks: Sequence[int], is_one_matrix: bool
) -> tuple[Expand, ...]:
    """Write the B matrices: one block-diagonal matrix, or one after the other."""
    total, width = sum(ranks), sum(b.size(0) for b in b_slices)
    whole = memory.view(total, width).zero_() if is_one_matrix else None
    expands: list[Expand] = []
    low = left = used = 0
    for part, rank in zip(b_slices, ranks, strict=True):
        high, right = low + rank, left + part.size(0)
        if rank:
            size = rank * part.size(0)
            b = (
                whole[low:high, left:right]
                if whole is not None
                else memory[used : used + size].view(rank, -1)
            )
            b.copy_(part[:, :rank].t())
            expands.append(Expand(low, high, left, right, b))
            used += size
        low, left = high, right
    return (Expand(0, total, 0, width, whole),) if whole is not None else tuple(expands)


# --- the wrapper and its handshake with the layers ---------------------------------------------------------------------------


class SegmentPunicaWrapper(PunicaWrapperCPU):
    """vLLM's per-step LoRA state, with our arithmetic.

    Layers announce themselves through `watch`; from then on their `set_lora` and `reset_lora` keep the laid-out weights in
    step with vLLM's stacks. Whoever writes into the stacks directly must go through `set_lora` instead.
    """

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ):
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._token_blocks: tuple[RowBlock, ...] = ()
        self._sampler_blocks: tuple[RowBlock, ...] = ()
        self._packs: dict[int, list[SlotWeights | Pending | None]] = {}

    def watch(self, layer: Any) -> None:
        """Follow one LoRA layer: wraps its `set_lora` and `reset_lora`. Layers without A and B stacks (MoE) are not ours."""
        b_stacked = vars(layer).get("lora_b_stacked")
        if b_stacked is None:
            return
        b_slices = b_stacked if isinstance(b_stacked, tuple) else (b_stacked,)
        packs: list[SlotWeights | Pending | None] = [None] * b_slices[0].size(0)
        set_lora, reset_lora = layer.set_lora, layer.reset_lora

        def reset_and_forget(index: int) -> None:
            packs[index] = None
            reset_lora(index)

        def set_and_pack(index: int, lora_a: Any, lora_b: Any) -> None:
            old = packs[index]
            packs[index] = None
            set_lora(index, lora_a, lora_b)
            a_slices = _a_slices(layer, index)
            b_views = [b[index, 0] for b in b_slices]
            storage = old.storage if isinstance(old, SlotWeights) else None
            packs[index] = pack_slot(a_slices, b_views, _ranks(lora_a, b_views), storage)

        layer.set_lora, layer.reset_lora = set_and_pack, reset_and_forget
        self._packs[b_slices[0].data_ptr()] = packs

    @property
    def cached_bytes(self) -> int:
        """Memory held for laid-out weights, over all layers and slots."""
        return sum(
            4 * pack.storage.numel()
            for packs in self._packs.values()
            for pack in packs
            if isinstance(pack, SlotWeights)
        )

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        # super() feeds what the layers read themselves: the embedding's offsets and the classifier's row indices.
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        slot_of = {adapter: slot for slot, adapter in enumerate(lora_index_to_id) if adapter is not None}
        slot_of[0] = NO_ADAPTER
        self._token_blocks = plan_rows([slot_of[adapter] for adapter in mapping.index_mapping])
        self._sampler_blocks = plan_rows([slot_of[adapter] for adapter in mapping.prompt_mapping])

    def packs_of(self, layer: Any) -> list[SlotWeights | Pending | None] | None:
        """A layer's weights by slot, to be written by whoever fills slots; None for a layer that `watch` has not seen."""
        return self._packs.get(layer.lora_b_stacked[0].data_ptr())

    def _packs_of(self, b_stacked: torch.Tensor) -> list[SlotWeights | Pending | None]:
        try:
            return self._packs[b_stacked.data_ptr()]
        except KeyError:
            raise SeamMoved(
                "a LoRA layer computes that never called set_mapping(): vLLM's handshake has moved"
            ) from None

    def _add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        b_stacked: torch.Tensor,
        blocks: tuple[RowBlock, ...],
        scale: float,
    ) -> None:
        """Add the deltas of all rows to `y`, in place. `x` and `y` have one row per row of the plan."""
        if not blocks:
            return
        packs = self._packs_of(b_stacked)
        y, x = y.view(-1, y.size(-1)), x.view(-1, x.size(-1))
        for block in blocks:
            weights = [packs[slot] if slot != NO_ADAPTER else None for slot in block.slots]
            if not any(weights):
                continue
            y_rows, x_rows = block.read(y), block.read(x)
            for weight, y_part, x_part in zip(
                weights, y_rows.split(block.sizes), x_rows.split(block.sizes), strict=True
            ):
                if weight is not None:
                    with _threads_for(x_part.size(0)):
                        weight.add_to(y_part, x_part, scale)
            block.write(y, y_rows)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        self._add(y, x, lora_b_stacked[0], self._token_blocks, scale)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        self._add(y, x, lora_b_stacked, self._sampler_blocks, scale)

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        self._add(y, x, lora_b_stacked, self._token_blocks, 1.0)

    # add_shrink and add_expand serve only fully sharded LoRA under tensor parallelism, where the halves are separated by a
    # collective. They read the stacks at the maximum rank: correct for -1, not tuned.

    def add_shrink(
        self, y: Any, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...], scale: float, **kwargs: Any
    ) -> None:
        x = x.view(-1, x.size(-1))
        for target, a in zip(y, lora_a_stacked, strict=True):
            self._each_group(
                target, x, lambda t, s, slot, a=a: t.addmm_(s, a[slot, 0].t().float(), alpha=scale)
            )

    def add_expand(
        self,
        y: torch.Tensor,
        x: Any,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        y = y.view(-1, y.size(-1))
        left = offset_start
        for source, b, width in zip(x, lora_b_stacked, output_slices, strict=True):
            self._each_group(
                y[:, left : left + width], source, lambda t, s, slot, b=b: t.addmm_(s, b[slot, 0].t().float())
            )
            left += width

    def _each_group(
        self, y: torch.Tensor, x: torch.Tensor, apply: Callable[[torch.Tensor, torch.Tensor, int], Any]
    ) -> None:
        for block in self._token_blocks:
            y_rows, x_rows = block.read(y), block.read(x)
            for slot, y_part, x_part in zip(
                block.slots, y_rows.split(block.sizes), x_rows.split(block.sizes), strict=True
            ):
                if slot != NO_ADAPTER:
                    apply(y_part, x_part, slot)
            block.write(y, y_rows)


def _a_slices(layer: Any, index: int) -> list[torch.Tensor] | None:
    """The layer's A stacks for one slot, or None for an embedding: its A is `[slots, vocabulary, rank]` and vLLM indexes it."""
    a_stacked = layer.lora_a_stacked
    stacks = a_stacked if isinstance(a_stacked, tuple) else (a_stacked,)
    return [a[index, 0] for a in stacks] if stacks[0].dim() == 4 else None


def _ranks(lora_a: Any, b_views: list[torch.Tensor]) -> list[int]:
    """True rank per slice of the weights given to `set_lora`; they are zero-padded in the stacks, so too large is only slow."""
    num_slices, max_rank = len(b_views), b_views[0].size(1)
    parts = lora_a if isinstance(lora_a, list) else [lora_a] * num_slices
    if len(parts) != num_slices:  # one weight covers several slices; vLLM has split it (expand_packed_lora)
        parts = [max((p for p in parts if p is not None), key=lambda p: p.size(0))] * num_slices
    return [0 if part is None else min(part.size(0), max_rank) for part in parts]


# --- the seam ------------------------------------------------------------------------------------------------------------------

_stock_get_punica_wrapper: Any = model_manager.get_punica_wrapper
_stock_set_mapping: Any = BaseLayerWithLoRA.set_mapping


def _set_mapping_and_watch(self: Any, punica_wrapper: Any) -> None:
    _stock_set_mapping(self, punica_wrapper)
    if isinstance(punica_wrapper, SegmentPunicaWrapper):
        punica_wrapper.watch(self)


def install() -> bool:
    """Make the next engine of this process use our wrapper. Call before the engine is built; calling again does no harm.

    Returns False where there is nothing to do (not a CPU platform).
    """
    if not current_platform.is_cpu():
        return False
    model_manager.get_punica_wrapper = SegmentPunicaWrapper
    BaseLayerWithLoRA.set_mapping = _set_mapping_and_watch
    return True


def uninstall() -> None:
    """Give vLLM its own wrapper back for engines built from now on (benchmarks and tests compare the two)."""
    model_manager.get_punica_wrapper = _stock_get_punica_wrapper
    BaseLayerWithLoRA.set_mapping = _stock_set_mapping


def check_engine(engine: Any) -> SegmentPunicaWrapper:
    """Return the wrapper that `engine` (an in-process LLMEngine with LoRA) computes with; raise SeamMoved if it is not ours."""
    worker = engine.engine_core.engine_core.model_executor.driver_worker
    manager = getattr(worker, "worker", worker).model_runner.lora_manager._adapter_manager
    for wrapper in manager.punica_wrapper_mapping.values():
        if not isinstance(wrapper, SegmentPunicaWrapper):
            raise SeamMoved(
                f"the engine computes LoRA with {type(wrapper).__name__}: install() came too late or was bypassed"
            )
        if not wrapper._packs:
            raise SeamMoved("no LoRA layer has announced itself: vLLM's handshake set_mapping() has moved")
    return wrapper
