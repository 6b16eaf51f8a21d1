import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as vllm_kv
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from engine_bridge.core.kv.restoring import LoadBlocks
from engine_bridge.core.kv.step_moves import SaveJob, StepMoves
from engine_bridge.driver.engine.engine import VllmDriver
from engine_bridge.driver.kv.kv_connector import _OwnStep
from engine_bridge.driver.kv.layer_groups import Layers, layout_of
from engine_bridge.driver.memory.block_copy import CpuCopier, kv_rows
from engine_bridge.policy.kv.kv_layout import KvLayout, LayerGroup
from engine_bridge.policy.limits.model_support import CannotHave
from kvtiers.blocks import Stage
from kvtiers.keys import BlockKey

from .test_promoter import NUM_DEVICE_BLOCKS, SHAPE, Bench, keys_of


def group_of_names(*names: str, spec: Any = None) -> Any:
    return SimpleNamespace(layer_names=names, kv_cache_spec=spec)


READ = [BlockKey(key) for key in keys_of("read", 2)]
SAVED = [BlockKey(key) for key in keys_of("saved", 2)]


class Stepped(Bench):
    """A step that is to load two blocks from disk and to save two."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        names = [str(number) for number in range(len(self.device))]
        caches = dict(zip(names, self.device, strict=True))
        self.layers = Layers(caches, [group_of_names(*names)], NUM_DEVICE_BLOCKS)
        self.folder, self.step = folder, _OwnStep(self.tiers, self.layers, ())
        self.save("read", READ)
        self.store.flush()
        self.store.drop_host()

    def begin(self) -> Stage:
        stage = self.store.stage("read", READ)
        self.store.wait_for_reads(10)
        save = self.store.begin_save("saved", SAVED)
        self.moves = StepMoves(
            [LoadBlocks(stage, [0, 1], [1, 2], is_whole=False)], [SaveJob(save, [3, 4], [0, 0])]
        )
        self.tiers.begin_moves(self.moves)
        self.step.begin(self.moves)
        return stage

    def run(self, num_layers: int = SHAPE.num_layers, *, ends: bool = True) -> None:
        for layer in range(num_layers):
            self.step.layer_begins(layer)
            self.step.layer_ends(0, layer)
        if ends:
            self.step.end()

    def damage(self) -> None:
        for path in self.folder.glob("segment-*.kv"):
            path.write_bytes(bytes(path.stat().st_size))

    @property
    def num_saved(self) -> int:
        """Once the device has done what it was told. Nothing is in use any more then."""
        self.arrive()
        assert self.pool.get_num_free_blocks() == NUM_DEVICE_BLOCKS - 1
        assert self.store.check_invariants() == 0
        return self.store.num_held(SAVED)


@pytest.fixture
def stepped(tmp_path: Path) -> Iterator[Stepped]:
    with closing(Stepped(tmp_path)) as stepped:
        yield stepped


def test_what_a_step_saves_is_kept_only_if_all_went_well(stepped: Stepped) -> None:
    for fault in ("spoiled", "lacks a layer", "the device failed", ""):
        stepped.begin()
        # Where an adapter could not be laid out, rows are not what their keys say.
        stepped.tiers.is_step_spoiled = fault == "spoiled"
        stepped.copier.has_failed = fault == "the device failed"
        stepped.run(SHAPE.num_layers - (fault == "lacks a layer"))
        assert not stepped.step.take_failed()
        assert stepped.num_saved == (0 if fault else 2)


@pytest.mark.parametrize("is_asked_first", [False, True], ids=["without speculative decoding", "with it"])
def test_what_is_computed_on_kv_that_did_not_come_is_not_kept(stepped: Stepped, is_asked_first: bool) -> None:
    stepped.damage()
    stepped.begin()
    stepped.run(ends=False)
    failed = stepped.step.take_failed() if is_asked_first else set()
    stepped.step.end()
    assert failed | stepped.step.take_failed() == {1, 2}
    assert stepped.num_saved == 0


def test_blocks_that_a_step_saves_are_held_until_the_device_has_copied_them(stepped: Stepped) -> None:
    stepped.begin()
    stepped.run()
    assert stepped.store.num_held(SAVED) == 2
    stage = stepped.store.stage("asked again", SAVED)
    assert stepped.store.progress(stage).num_ready_blocks == 0, "its slots are still being written"
    assert stepped.store.lend(SAVED).num_blocks == 0 and stepped.store.stats().disk.num_unwritten == 0
    assert stepped.pool.get_num_free_blocks() == NUM_DEVICE_BLOCKS - 1 - 2
    stepped.copier.catch_up()
    assert stepped.store.progress(stage).num_ready_blocks == 2
    assert stepped.held.has_work(), "the engine gives them back before its next step"
    stepped.store.release(stage)
    assert stepped.num_saved == 2


def test_a_cpu_s_saves_hold_no_blocks(stepped: Stepped) -> None:
    stepped.tiers.copier = CpuCopier(stepped.device, stepped.store.pool.region)
    stepped.begin()
    assert not stepped.held.num_open
    stepped.run()
    assert stepped.num_saved == 2


def test_blocks_of_a_stage_that_have_no_place_on_the_device_are_not_missed(stepped: Stepped) -> None:
    stage = stepped.begin()
    stepped.moves.loads[0] = LoadBlocks(stage, [1], [2], is_whole=False)
    stepped.run()
    assert not stepped.step.take_failed()
    assert stepped.num_saved == 2
    for number, layer in enumerate(stepped.device):
        assert bytes(layer[2].tolist()) == stepped.content(READ[1], number)
        assert not layer[1].any()


def group_of(*specs: Any) -> vllm_kv.KVCacheGroupSpec:
    several = vllm_kv.UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs={str(number): spec for number, spec in enumerate(specs)}
    )
    return vllm_kv.KVCacheGroupSpec([str(number) for number in range(len(specs))], several)


def layout_of_groups(*groups: vllm_kv.KVCacheGroupSpec) -> KvLayout:
    cache = SimpleNamespace(block_size=32, prefix_match_unit=None, enable_prefix_caching=True)
    parallel = SimpleNamespace(decode_context_parallel_size=1)
    config: Any = SimpleNamespace(cache_config=cache, parallel_config=parallel, kv_transfer_config=None)
    return layout_of(vllm_kv.KVCacheConfig(8, [], list(groups)), config)


def test_what_each_kind_of_attention_looks_at_is_known_and_of_others_it_is_said_that_they_are_not() -> None:
    common: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    full = vllm_kv.FullAttentionSpec(block_size=32, **common)
    window = vllm_kv.SlidingWindowSpec(block_size=64, **common, sliding_window=100)
    chunk = vllm_kv.ChunkedLocalAttentionSpec(block_size=32, **common, attention_chunk_size=64)
    assert layout_of_groups(group_of(full, full)) == KvLayout((LayerGroup("all", 32),), 32)
    groups = (LayerGroup("window", 64, 100), LayerGroup("all", 32), LayerGroup("chunk", 32, 64))
    assert layout_of_groups(group_of(window), group_of(full), group_of(chunk)) == KvLayout(groups, 32)
    state = vllm_kv.MambaSpec(
        block_size=32, shapes=((2, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )
    found = layout_of_groups(group_of(state), group_of(full))
    assert found.groups[0] == LayerGroup("state", 32) and found.state_groups == {0}
    drafting = dataclasses.replace(state, num_speculative_blocks=2)
    uncached = dataclasses.replace(state, mamba_cache_mode="none")
    for unknown in (group_of(full, chunk), group_of(drafting), group_of(uncached)):
        with pytest.raises(CannotHave, match="KV tiers"):
            layout_of_groups(unknown)


def test_layers_of_several_groups_share_memory_and_one_that_only_reads_has_no_group() -> None:
    first, second = torch.zeros(2, 8, 64, dtype=torch.uint8)
    caches = {"full 0": first, "full 1": second, "window 0": first, "window 1": second, "reader": second}
    groups = [group_of_names("window 0", "window 1"), group_of_names("full 0", "full 1")]
    layers = Layers(caches, groups, num_blocks=8)
    assert [region.data_ptr() for region in layers.regions] == [first.data_ptr(), second.data_ptr()]
    assert layers.region_of == {"full 0": 0, "full 1": 1, "window 0": 0, "window 1": 1, "reader": 1}
    assert layers.places_of == {0: {(0, 0), (0, 1)}, 1: {(1, 0), (1, 1)}} and "reader" not in layers.group_of


def test_a_recurrent_layers_memory_is_whole_blocks() -> None:
    """Its state is smaller than the block of attention's in the same memory."""
    raw = torch.zeros(8 * 64, dtype=torch.int8)
    state = raw.as_strided((8, 1, 1, 40), (64, 40, 40, 1))
    spec = vllm_kv.MambaSpec(
        block_size=32, shapes=((10,),), dtypes=(torch.float32,), mamba_cache_mode="align", page_size_padded=64
    )
    layers = Layers({"state": state}, [group_of_names("state", spec=spec)], num_blocks=8)
    assert layers.regions[0].shape == (8, 64) and layers.regions[0].data_ptr() == raw.data_ptr()
    assert str(spec.shapes) in str(layers.plan)


def gpu_caches(layout: KVCacheLayout, spec: Any, kernel_tokens: int) -> tuple[dict[str, torch.Tensor], Any]:
    """The caches of two layers as vLLM lays them out for a GPU whose kernel takes blocks of `kernel_tokens`, and the group of these layers."""
    names, num_blocks = ["0", "1"], 8
    size = len(names) * num_blocks * spec.page_size_bytes
    strides = vllm_kv.compute_layout_strides(spec, num_blocks, len(names), layout)
    tensor = vllm_kv.KVCacheTensor(size=size, layers=names, layer_stride=strides[0], block_stride=strides[1])
    group = vllm_kv.KVCacheGroupSpec(names, spec)
    config = vllm_kv.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=[group])
    return allocate_kv_cache(config, torch.device("cpu"), layout, [kernel_tokens]), group


@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.LBHNC])
@pytest.mark.parametrize("kernel_tokens", [128, 64, 16])
def test_a_block_is_the_pools_however_few_tokens_the_kernels_blocks_have(
    layout: KVCacheLayout, kernel_tokens: int
) -> None:
    """FlashMLA's kernel takes blocks of 64 tokens, FlashInfer's of at most 64 on most GPUs; `--block-size` may be larger."""
    spec = vllm_kv.FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    caches, group = gpu_caches(layout, spec, kernel_tokens)
    assert caches["0"].shape[0] == 8 * 128 // kernel_tokens
    layers = Layers(caches, [group], num_blocks=8)
    assert layers.facts().region_bytes == spec.page_size_bytes
    whole = caches["0"].untyped_storage()
    for region, rows in enumerate(map(kv_rows, layers.regions)):
        rows[3] = 1 + region
        start = (8 * region + 3) * spec.page_size_bytes
        assert (
            bytes(whole[start : start + spec.page_size_bytes]) == bytes([1 + region]) * spec.page_size_bytes
        )
    assert sum(bytes(whole)) == spec.page_size_bytes * (1 + 2), "no other block is written"


def test_layers_whose_memory_is_not_in_the_pools_blocks_are_told() -> None:
    spec = vllm_kv.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    layer_inside = gpu_caches(KVCacheLayout.BLHNC, spec, 16)
    others = gpu_caches(KVCacheLayout.LBNHC, spec, 16)
    for (caches, group), num_blocks in ((layer_inside, 8), (others, 7)):
        with pytest.raises(CannotHave, match="KV tiers"):
            Layers(caches, [group], num_blocks).facts()


@pytest.mark.parametrize("fails", [False, True])
def test_on_a_gpu_all_layers_are_loaded_before_and_saved_behind_the_forward_pass(
    stepped: Stepped, fails: bool
) -> None:
    stepped.step = _OwnStep(stepped.tiers, stepped.layers, (), by_layer=False)
    stage = stepped.begin()
    stepped.run(ends=False)
    assert not any(layer[1].any() for layer in stepped.device), "the hooks do nothing"
    stepped.step.start()
    stepped.copier.catch_up()
    for layer, device in enumerate(stepped.device):
        for block, block_id in zip(stage.blocks, (1, 2), strict=True):
            assert bytes(device[block_id].tolist()) == stepped.content(block.key, layer)
    try:
        if fails:
            raise RuntimeError("the forward pass fails")
    except RuntimeError:
        stepped.step.end()
    else:
        stepped.step.end()
    assert stepped.num_saved == (0 if fails else 2)


def test_recurrent_layers_which_have_no_hooks_are_loaded_before_and_saved_behind_the_forward_pass(
    stepped: Stepped,
) -> None:
    stepped.step = _OwnStep(stepped.tiers, stepped.layers, {0})
    with pytest.raises(RuntimeError, match="forward"):
        try:
            stepped.begin()
            raise RuntimeError("the forward pass fails")
        finally:
            stepped.step.end()
    assert stepped.num_saved == 0
    stage = stepped.begin()
    stepped.step.start()
    for layer, device in enumerate(stepped.device):
        for block, block_id in zip(stage.blocks, (1, 2), strict=True):
            stepped.copier.catch_up()
            assert bytes(device[block_id].tolist()) == stepped.content(block.key, layer)
    stepped.step.end()
    assert stepped.num_saved == 2


def test_of_a_group_a_layer_is_saved_once_that_layer_has_run(stepped: Stepped) -> None:
    """The layer of another group in the same memory runs before, and the KV is not there yet."""
    stepped.layers.places_of = {0: {(0, 0), (0, 1)}, 1: {(1, 0), (1, 1)}}
    stepped.begin()
    stepped.moves.saves[0].groups[:] = [0, 1]
    stepped.step.begin(stepped.moves)
    for group, layer in ((0, 0), (1, 0), (0, 1), (1, 1)):
        stepped.step.load(layer)
        stepped.device[layer][3 + group].fill_(10 * layer + group + 1)
        stepped.step.save(group, layer)
    stepped.step.end()
    assert stepped.num_saved == 2
    slots = [stepped.store._host.blocks[key].slots for key in SAVED]
    found = [[int(stepped.store.pool.slot(slot)[0]) for slot in of_block] for of_block in slots]
    assert found == [[1, 11], [2, 12]]


def test_what_a_step_that_never_ends_holds_goes_with_its_engine(stepped: Stepped) -> None:
    stage = stepped.begin()
    stepped.run(ends=False)
    stepped.tiers.detach()
    assert stage.blocks and stepped.tiers.held is None, "the device is copying"
    assert stepped.num_saved == 0 and not stage.blocks
    stepped.tiers.detach()
    assert stepped.num_saved == 0


def test_a_device_that_takes_no_more_work_holds_nothing_once_its_engine_is_closed(stepped: Stepped) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Listener:
        """Of a promoter's; it fails, too."""

        close = fails

    stage = stepped.begin()
    stepped.run(ends=False)
    stepped.copier.end_step = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        stepped.step.end()
    driver = VllmDriver.__new__(VllmDriver)
    stepped.tiers.listener = Listener()  # type: ignore[assignment]
    driver._tiers = stepped.tiers
    driver.scheduling = driver.adapters = Listener()  # type: ignore[assignment]
    driver.engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=fails))
    driver.close()
    assert not stage.blocks and stepped.tiers.copier is None and stepped.tiers.listener is None
    assert stepped.num_saved == 0
    driver.close()
