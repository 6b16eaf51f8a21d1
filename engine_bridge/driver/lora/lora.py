"""LoRA on the CPU: one small GEMM per adapter at the adapter's true rank.

vLLM 0.32's own CPU path (`PunicaWrapperCPU`) has two faults that this module mends:

- rows of the base model carry the index -1, which a tensor lookup reads as *the last slot*: in a mixed batch the base
  model answers with another user's adapter (vllm-project/vllm#48421, #49656);
- each token gathers its own copy of the weights at the *configured* maximum rank, so a rank-8 adapter costs as much as a
  rank-128 one and a 64-token prefill reads the adapter 64 times.

Here `update_metadata` sorts the rows of a step by adapter, once; each layer then runs, per adapter, `x @ A` and `y += (x @ A) @ B` over that
adapter's rows, on weights that were laid out when they entered the slot.

Use: `install()` before the engine is built, `check_runner(runner)` after. On CUDA `install()` does nothing: vLLM's Triton kernels skip -1 and do not
gather.

Source: Punica (arXiv:2310.18547) for computing by segments of equal adapter. bench/live/adapters/lora.py measures both paths.

**Why fp32.** A row's answer should not depend on its companions in the batch, or greedy tokens of a mixed batch drift from those of the same request
alone. Measured with torch 2.13 on an AVX-512 Xeon without bf16 instructions (2 cores):

- fp32 `torch.mm` with both operands row-major beats the best bf16 form (vLLM's prepacked oneDNN) 1.5 to 6 times there
  (3 rows, hidden 1024: rank 8 5 µs against 31, rank 64 16 against 39, rank 128 29 against 43), although it reads twice the
  bytes. On a CPU with AMX bf16 may win for long prefills; not measured;
- its rows are bit-identical for every number of rows from two up: expands in all shapes tried, shrinks up to an inner
  dimension of 768 (1 and 2 threads). One row alone goes to a GEMV with another order of summation; on an AMD EPYC with AVX-512
  MKL takes another kernel below four rows; with two threads it also deals rows out in fours, so that of 5 to 7 and of 9 to 11 rows the
  last one to three come out of that other kernel (4 to 48 rows tried). So few rows are computed by loops of our own where these have the same
  bits (`few_rows`), else they are filled up with repetitions (`SlotWeights.add_to`). From inner dimensions of 896 on, MKL cuts the sums of many
  rows in two, on one processor from 192 rows on, on another from 33; `shrink` finds that out and prevents it where one thread computes. On
  several, MKL splits the sums over the threads, depending on the row count; then the last fp32 bits differ, of which a bf16 step holds 65,536. We
  leave that: shrinking in pieces of 512 is exact (1, 2, 8, 16 threads) but takes 47 µs instead of 8 at rank 8 and 3 rows; `bmm` over the pieces
  takes 27 and is not exact;
- without AVX-512 MKL takes rows in sixes, and the remaining rows by other kernels (seen with MKL_ENABLE_INSTRUCTIONS=AVX2): there the last bits
  may depend on companions. We leave that, too: base weights' products do the same there;
- the delta is added to the base output in fp32 and rounded to the model's type once.

vLLM's own bf16 GEMMs for the base weights do change with the row count (0.04 to 0.4 % of the elements by one bf16 step, at 2 threads), with or
without adapters; no LoRA code can mend that.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import torch

from engine_bridge.driver.lora.gemm import OneThread
from engine_bridge.driver.lora.lora_rows import NO_ADAPTER, RowBlock, plan_rows
from engine_bridge.driver.lora.lora_weights import FEW_ROWS, Pending, SlotWeights, pack_slot
from engine_bridge.driver.vllm_api import (
    BaseLayerWithLoRA,
    PunicaWrapperCPU,
    base_linear,
    current_platform,
    model_manager,
)
from engine_bridge.policy.limits.model_support import CannotHave
from engine_bridge.protocol.errors import SeamMoved

# Up to this many rows one core computes an adapter's GEMMs: waking the others takes longer than they save. Measured on two cores, 768 columns, ranks
# 16, 64 and 128: 4 rows 14, 52 and 144 µs against 46, 84 and 217; 16 rows 26, 96 and 304 against 57, 151 and 393. The bits are the same.
ONE_THREAD_ROWS = 16


_ONE_THREAD, _ALL_THREADS = OneThread(), contextlib.nullcontext()


# --- the wrapper and its handshake with the layers ---------------------------------------------------------------------------


class SegmentPunicaWrapper(PunicaWrapperCPU):
    """vLLM's per-step LoRA state, with our arithmetic.

    Layers announce themselves through `watch`; from then on their `set_lora` and `reset_lora` keep the laid-out weights. vLLM's stacks are written
    only where weights must be split first: the stacks of all slots at the largest rank took 1.5 GB beside a model of 75 M parameters (measured). Code
    that would write into the stacks directly must go through `set_lora` instead.
    """

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ):
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        from engine_bridge.driver.lora.few_rows import few_rows  # numba and 120 MB, on a CPU only

        self.make_few = few_rows
        self._token_blocks: tuple[RowBlock, ...] = ()
        self._sampler_blocks: tuple[RowBlock, ...] = ()
        self._num_logits = 0
        self._packs: dict[int, list[SlotWeights | Pending | None]] = {}

    def watch(self, layer: Any) -> None:
        """Follow one LoRA layer: wraps its `set_lora` and `reset_lora`. Layers without A and B stacks (MoE) are not ours."""
        b_stacked = vars(layer).get("lora_b_stacked")
        if b_stacked is None:
            return
        if _has_pairs(layer):
            layer.lora_a_stacked = tuple(map(_untouched, layer.lora_a_stacked))
            layer.lora_b_stacked = b_stacked = tuple(map(_untouched, b_stacked))
        b_slices = b_stacked if isinstance(b_stacked, tuple) else (b_stacked,)
        packs: list[SlotWeights | Pending | None] = [None] * b_slices[0].size(0)
        set_lora, reset_lora = layer.set_lora, layer.reset_lora

        written: set[int] = set()

        def reset_and_forget(index: int) -> None:
            """Empty a slot, and vLLM's stacks where they were written."""
            packs[index] = None
            if index in written:  # else the stacks are zeros, which need no memory until they are written
                written.discard(index)
                reset_lora(index)

        def set_and_pack(index: int, lora_a: Any, lora_b: Any) -> None:
            """Lay out a slot's weights, through vLLM's stacks only where it must split them."""
            old = packs[index]
            packs[index] = None
            parts: Any = whole_slices(layer, lora_a, lora_b)
            if parts is None:
                set_lora(index, lora_a, lora_b)
                written.add(index)
                b_views = [b[index, 0] for b in b_slices]
                parts = _a_slices(layer, index), b_views, _ranks(lora_a, b_views)
            storage = old.storage if isinstance(old, SlotWeights) else None
            packs[index] = pack_slot(*parts, storage, self.make_few)

        layer.set_lora, layer.reset_lora = set_and_pack, reset_and_forget
        self._packs[b_slices[0].data_ptr()] = packs

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """Plan the rows of a step, by adapter, for its tokens and for its logits."""
        # super() prepares the data that layers read themselves: the embedding's offsets and the classifier's row indices.
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        slot_of = {adapter: slot for slot, adapter in enumerate(lora_index_to_id) if adapter is not None}
        slot_of[0] = NO_ADAPTER
        self._token_blocks = plan_rows([slot_of[adapter] for adapter in mapping.index_mapping])
        self._sampler_blocks = plan_rows([slot_of[adapter] for adapter in mapping.prompt_mapping])
        self._num_logits = len(mapping.prompt_mapping)

    def packs_of(self, b_stacked: torch.Tensor) -> list[SlotWeights | Pending | None]:
        """Return a layer's weights by slot, given its first B stack; the code that fills slots writes them.

        Raises:
            SeamMoved: for a layer that `watch` has not seen.
        """
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
        packs = self.packs_of(b_stacked)
        y, x = y.view(-1, y.size(-1)), x.view(-1, x.size(-1))
        for block in blocks:
            weights = [packs[slot] if slot != NO_ADAPTER else None for slot in block.slots]
            if not any(weights):
                continue
            y_rows, x_rows = block.read(y).contiguous(), block.read(x).contiguous()
            y_array, x_array = y_rows.numpy(), x_rows.numpy()
            stop = 0
            for weight, size in zip(weights, block.sizes, strict=True):
                first, stop = stop, stop + size
                if weight is None:
                    continue
                if size <= FEW_ROWS and isinstance(weight, SlotWeights) and weight.few is not None:
                    weight.few.add(y_array, x_array, first, stop, scale)
                    continue
                with _ONE_THREAD if size <= ONE_THREAD_ROWS else _ALL_THREADS:
                    weight.add_to(y_rows[first:stop], x_rows[first:stop], scale)
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
        """Add the deltas of a linear layer to `y`, in place. `x` and `y` have one row per token of the step."""
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
        """Add the deltas of the output layer to `y`, in place. Raises IndexError for rows that were not planned."""
        if self._sampler_blocks and x.view(-1, x.size(-1)).size(0) != self._num_logits:
            # Every call for logits has a plan of its rows (`logits_rows`); with another call's plan, deltas would go to the wrong rows.
            raise IndexError(f"logits of {x.size(0)} rows are computed with a plan of {self._num_logits}")
        self._add(y, x, lora_b_stacked, self._sampler_blocks, scale)

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Add the deltas of an embedding to `y`, in place. `x` are A's rows for the step's tokens."""
        self._add(y, x, lora_b_stacked, self._token_blocks, 1.0)


def _has_pairs(layer: Any) -> bool:
    """Return whether this is a linear layer of vLLM's, with a pair of stacks for each slice."""
    stacks = layer.lora_a_stacked, layer.lora_b_stacked
    return hasattr(layer, "tp_size") and all(
        isinstance(each, tuple) and all(stack.dim() == 4 for stack in each) for each in stacks
    )


def _untouched(zeros: torch.Tensor) -> torch.Tensor:
    """Return zeros of the same shape that take memory only where they are written: torch.zeros writes all of them."""
    num_bytes = zeros.numel() * zeros.element_size()
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=zeros.dtype).view(zeros.shape)


def whole_slices(
    layer: Any, lora_a: Any, lora_b: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]] | None:
    """Return A, B and true rank per slice, if vLLM's layer would copy the weights into its stacks unchanged; None if it splits or indexes them."""
    if not _has_pairs(layer) or layer.tp_size != 1:
        return None
    stacks = layer.lora_a_stacked, layer.lora_b_stacked
    a, b = ([each] if isinstance(each, torch.Tensor) else each for each in (lora_a, lora_b))
    is_each_whole = len(a) == len(b) == len(stacks[0]) and all(
        (x is None) == (y is None) and (x is None or (x.size(1), y.size(0)) == (to.size(-1), of.size(-2)))
        for x, y, to, of in zip(a, b, *stacks, strict=True)
    )
    if not is_each_whole:
        return None
    # A slice without weights still has a width.
    return (
        [to[0, 0] if x is None else x for x, to in zip(a, stacks[0], strict=True)],
        [of[0, 0] if y is None else y for y, of in zip(b, stacks[1], strict=True)],
        [0 if x is None else x.size(0) for x in a],
    )


def _a_slices(layer: Any, index: int) -> list[torch.Tensor] | None:
    """Return the layer's A stacks for one slot, or None for an embedding: its A is `[slots, vocabulary, rank]` and vLLM indexes it."""
    a_stacked = layer.lora_a_stacked
    stacks = a_stacked if isinstance(a_stacked, tuple) else (a_stacked,)
    return [a[index, 0] for a in stacks] if stacks[0].dim() == 4 else None


def _ranks(lora_a: Any, b_views: list[torch.Tensor]) -> list[int]:
    """Return the true rank per slice of the weights given to `set_lora`; they are zero-padded in the stacks, so too large is only slow."""
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
    # vLLM asks the weights for their device, and kernels for CPUs keep quantised ones in a form of their own.
    base_linear._get_lora_device = lambda base_layer: torch.device("cpu")
    return True


def uninstall() -> None:
    """Give vLLM its own wrapper back for engines built from now on (benchmarks and tests compare the two)."""
    model_manager.get_punica_wrapper = _stock_get_punica_wrapper
    BaseLayerWithLoRA.set_mapping = _stock_set_mapping


def check_runner(runner: Any) -> SegmentPunicaWrapper:
    """Return the wrapper that a model runner with LoRA computes with.

    Raises:
        CannotHave: the model has no layer that takes adapters, or none of those that were asked for (`lora_target_modules`).
        SeamMoved: the wrapper is not ours.
    """
    manager = runner.lora_manager._adapter_manager
    for wrapper in manager.punica_wrapper_mapping.values():
        if not isinstance(wrapper, SegmentPunicaWrapper):
            raise SeamMoved(
                f"the engine computes LoRA with {type(wrapper).__name__}: install() came too late or was bypassed"
            )
        if not manager.modules:
            raise CannotHave({"adapters": "none of its layers takes any"})
        if not wrapper._packs:
            raise SeamMoved("no LoRA layer has announced itself: vLLM's handshake set_mapping() has moved")
    return wrapper
