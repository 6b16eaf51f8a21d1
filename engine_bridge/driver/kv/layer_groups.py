"""How a built engine's layers keep their KV (`engine_bridge/policy/kv/kv_layout.py`), and blocks of them in vLLM's prefix cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from engine_bridge.policy.kv.kv_layout import GROUP_BYTES, Entry, KvLayout, LayerGroup, one_group
from engine_bridge.policy.limits.model_support import CannotHave
from engine_bridge.protocol.errors import SeamMoved

if TYPE_CHECKING:
    import torch


def layout_of(kv_cache_config: Any, vllm_config: Any) -> KvLayout:
    """Return the layout of an engine with these configurations of vLLM's.

    Raises:
        CannotHave: layers keep something that is no KV of a token, or vLLM knows a kind of attention that this does not.
    """
    from engine_bridge.driver.vllm_api import resolve_kv_cache_block_sizes

    groups = tuple(_group_of(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)
    if not groups:
        raise CannotHave({"KV tiers": "layers of this model keep no KV"})
    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return KvLayout(groups, hash_tokens)


def known_layout_of(kv_cache_config: Any, vllm_config: Any) -> KvLayout:
    """Return the layout of an engine. Layers of an unknown kind are taken for full attention, which is enough for figures."""
    try:
        return layout_of(kv_cache_config, vllm_config)
    except CannotHave:
        return one_group(vllm_config.cache_config.block_size)


def _group_of(spec: Any) -> LayerGroup:
    kinds = list(getattr(spec, "kv_cache_specs", {"": spec}).values())
    groups = {_group_of_layer(each) for each in kinds}
    if len(groups) != 1:
        raise CannotHave({"KV tiers": "layers that share their blocks look at different tokens"})
    return groups.pop()


def _group_of_layer(spec: Any) -> LayerGroup:
    from engine_bridge.driver.vllm_api import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
    )

    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return LayerGroup("all", spec.block_size)
    if type(spec) in (SlidingWindowSpec, SlidingWindowMLASpec):
        return LayerGroup("window", spec.block_size, spec.sliding_window + spec.extra_retained_tokens)
    if type(spec) is ChunkedLocalAttentionSpec:
        return LayerGroup("chunk", spec.block_size, spec.attention_chunk_size)
    # Of drafted tokens, the accepted ones go into the state only after the step's KV has been saved.
    if type(spec) is MambaSpec and spec.mamba_cache_mode == "align" and spec.num_speculative_blocks == 0:
        return LayerGroup("state", spec.block_size)
    raise CannotHave(
        {"KV tiers": f"the tiers do not hold what some layers of this model keep ({type(spec).__name__})"}
    )


class LayerFacts(Struct, frozen=True):
    """How a process keeps the KV of an engine's layers, in plain data.

    Attributes:
        num_regions: the stretches of memory, each of which has a part of every block.
        region_bytes: bytes of a block in one region.
        shape, strides: of a block in the first region, in elements.
        dtype: torch's name of the elements' type.
        device_type: "cpu" or "cuda".
        plan: which layers keep their KV where, and in what form.
    """

    num_regions: int
    region_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device_type: str
    plan: list[Any]


class Layers:
    """The memory of an engine's KV cache: layers of different groups may share theirs, as a block belongs to one group at a time.

    Attributes:
        regions: a tensor for each stretch of memory, in the order of the layers.
        group_of, region_of: by a layer's name, the numbers of its group and of its memory. A layer that only reads another's KV may have no group.
        places_of: by group, the pairs of its number and each of its regions.
        plan: which layers keep their KV where, and in what form.

    Args:
        kv_caches: by a layer's name, its part of the cache, in blocks of the pool's or of its kernel's.
        num_blocks: how many blocks the pool has.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], groups: Sequence[Any], num_blocks: int) -> None:
        from engine_bridge.driver.memory.block_copy import distinct, in_blocks, whole_pages

        self._num_blocks = num_blocks
        states = _states_of(groups)
        kv_caches = {
            name: whole_pages(tensor, states[name].page_size_bytes)
            if name in states
            else in_blocks(tensor, num_blocks)
            for name, tensor in kv_caches.items()
        }
        self.regions = distinct(kv_caches.values())
        numbers = {tensor.data_ptr(): number for number, tensor in enumerate(self.regions)}
        self.region_of = {name: numbers[tensor.data_ptr()] for name, tensor in kv_caches.items()}
        self.group_of = {name: group for group, each in enumerate(groups) for name in each.layer_names}
        self.places_of: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for name, group in self.group_of.items():
            if name in self.region_of:
                self.places_of[group].add((group, self.region_of[name]))
        self.plan = [
            (
                name,
                self.group_of.get(name),
                self.region_of[name],
                str(tensor.shape[1:]),
                tensor.stride()[1:],
                *([str((states[name].shapes, states[name].dtypes))] if name in states else []),
            )
            for name, tensor in kv_caches.items()
        ]

    def facts(self) -> LayerFacts:
        """Return how these layers keep their KV. Raises CannotHave for blocks that cannot be copied: of different sizes, or not contiguous."""
        from engine_bridge.driver.memory.block_copy import layer_bytes

        try:
            sizes = {layer_bytes(region) for region in self.regions}
        except SeamMoved as error:
            raise CannotHave({"KV tiers": str(error)}) from error
        if len(sizes) != 1:
            raise CannotHave({"KV tiers": f"layers have KV blocks of different sizes: {sorted(sizes)}"})
        if any(region.shape[0] != self._num_blocks for region in self.regions):
            raise CannotHave(
                {"KV tiers": "layers do not keep their KV in the blocks that the engine hands out"}
            )
        first = self.regions[0]
        shape, strides = tuple(first.shape[1:]), tuple(first.stride()[1:])
        return LayerFacts(
            len(self.regions), sizes.pop(), shape, strides, str(first.dtype), first.device.type, self.plan
        )


def _states_of(groups: Sequence[Any]) -> dict[str, Any]:
    """Return, by the names of recurrent layers, what vLLM knows of the memory of each."""
    from engine_bridge.driver.vllm_api import MambaSpec

    found = {
        name: getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        for group in groups
        for name in group.layer_names
    }
    return {name: spec for name, spec in found.items() if isinstance(spec, MambaSpec)}


def cached_block(pool: Any, entry: Entry) -> Any:
    """Return the block of vLLM's pool that holds an entry; None if none does."""
    group = int.from_bytes(entry[-GROUP_BYTES:], "big")
    found = pool.get_cached_block(entry[:-GROUP_BYTES], [group])
    return found[0] if found is not None else None


def register(pool: Any, entries: Sequence[Entry], blocks: Sequence[Any], start: int = 0) -> None:
    """Tell vLLM's pool that blocks hold these entries from now on. start: the number of blocks before the first, of one group."""
    by_group: dict[bytes, tuple[list[bytes], list[Any]]] = defaultdict(lambda: ([], []))
    for entry, block in zip(entries, blocks, strict=True):
        hashes, of_group = by_group[entry[-GROUP_BYTES:]]
        hashes.append(entry[:-GROUP_BYTES])
        of_group.append(block)
    for group, (hashes, of_group) in by_group.items():
        pool.cache_full_blocks(
            request=SimpleNamespace(block_hashes=[b""] * start + hashes),
            blocks=[None] * start + of_group,
            num_cached_blocks=start,
            num_full_blocks=start + len(of_group),
            block_size=pool.hash_block_size,
            kv_cache_group_id=int.from_bytes(group, "big"),
        )
