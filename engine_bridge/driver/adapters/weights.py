"""One adapter's weights in host memory, packed and scaled as vLLM's layers take them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy as shallow_copy
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import asdict

from engine_bridge.adapters.errors import AdapterRejected, quoted
from engine_bridge.adapters.files import (
    AdapterFiles,
    ModelContract,
    TensorInfo,
    content_hash,
    inspect,
    read,
    signature_of,
)
from engine_bridge.adapters.registry import AdapterRecord
from engine_bridge.driver.vllm_api import (
    BaseLinearLayerWithLoRA,
    LoRAModel,
    MLAAttention,
    PEFTHelper,
    VocabParallelEmbedding,
    parse_fine_tuned_lora_name,
)

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


# How many adapters' checked headers are kept: 0.1 MB for an adapter of 200 tensors. Chosen.
NUM_KEPT = 256


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """A and B of one of vLLM's layers: per slice (q, k, v) `a` [rank, in] and `b` [out, rank], None where the adapter leaves it alone.

    `is_list`: whether the layer's `set_lora` takes lists of them, or the single pair.
    """

    a: tuple[torch.Tensor | None, ...]
    b: tuple[torch.Tensor | None, ...]
    is_list: bool

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the module's matrices that the adapter has, all of A before all of B."""
        yield from (tensor for tensor in (*self.a, *self.b) if tensor is not None)

    def as_arguments(self) -> tuple[Any, Any]:
        """Return the `lora_a` and `lora_b` of vLLM's `set_lora`."""
        return (list(self.a), list(self.b)) if self.is_list else (self.a[0], self.b[0])


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """One adapter's weights, by the name of vLLM's layer ("model.layers.0.self_attn.qkv_proj"). `buffer` is the memory that most of them lie in.

    Weights that are in other processes have no modules here: `load_number` names them there, and `release`, called on the engine's thread, has them
    let go of.
    """

    modules: dict[str, ModuleWeights]
    num_bytes: int
    buffer: torch.Tensor | None
    load_number: int = 0
    release: Callable[[], None] | None = None


class Memories:
    """Memory that its last users gave back, for the next ones. From any thread.

    Fresh pages cost more to touch than an adapter to read (measured on a virtual machine).

    Args:
        make: returns new memory for a number of values, with arbitrary contents.
        max_idle_bytes: beyond this the oldest memory is freed.
        small: memory of at most this many values also serves any smaller request.
    """

    def __init__(self, make: Callable[[int], torch.Tensor], max_idle_bytes: float, small: int = 0) -> None:
        self._make, self._max_idle_bytes, self._small = make, max_idle_bytes, small
        self._idle: list[torch.Tensor] = []
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """The bytes of all memory that is not used now."""
        return sum(memory.nbytes for memory in self._idle)

    def take(self, num: int) -> torch.Tensor:
        """Return memory of at least `num` values, or new memory of exactly that length. Its contents are arbitrary."""
        with self._lock:
            most = max(2 * num, self._small)
            fitting = [each for each in self._idle if num <= each.numel() <= most]
            if fitting:
                best = min(fitting, key=lambda memory: memory.numel())
                self._idle = [each for each in self._idle if each is not best]
                return best
        return self._make(num)

    def give_back(self, memory: torch.Tensor) -> None:
        """Take memory back that is neither read nor written any more."""
        with self._lock:
            self._idle.append(memory)
            while self.idle_bytes > self._max_idle_bytes:
                self._idle.pop(0)


def host_buffers(is_pinned: bool, max_idle_bytes: int) -> Memories:
    """Return host memory for adapters' bytes, pinned where the engine copies from it by DMA."""
    return Memories(
        lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned),
        max_idle_bytes,
        small=1 << 20,
    )


class Loader:
    """Reads adapters from disk. Every method runs on the loader's thread.

    Args:
        manager: vLLM's LoRAModelManager, of which only unchanging parts are read.
        contract: the shapes, types and names that an adapter must have to run here.
        max_idle_bytes: bound of the memory kept for later loads.
        copy_of: returns the path of an adapter's copy by its content's hash, "" if there is none: the user who registered an adapter may replace its
            files at any time.
    """

    def __init__(
        self,
        manager: Any,
        contract: ModelContract,
        vocab_size: int,
        max_idle_bytes: int,
        copy_of: Callable[[str], str] = lambda content_hash: "",
    ) -> None:
        self._manager = manager
        self._copy_of = copy_of
        self._contract = contract
        self._vocab_size = vocab_size
        self._dtype = manager.lora_config.lora_dtype
        self.buffers = host_buffers(torch.device(manager.device).type == "cuda", max_idle_bytes)
        self._permutations = list(_permutations_of(manager.model))
        self._copies = copies_of(manager)
        self._kept: OrderedDict[int, AdapterFiles] = OrderedDict()
        """Checked files of adapters that were loaded and found sound, by version; the one loaded longest ago first."""

    def load(self, record: AdapterRecord) -> AdapterWeights:
        """Read an adapter as it was registered, from its path at that time or from its copy.

        Raises:
            AdapterRejected: code `changed` if the files have changed.
        """
        kept = self._take_kept(record.version_id)
        try:
            return self._load(
                record, kept or inspect(Path(record.path), self._contract), is_known=kept is not None
            )
        except AdapterRejected:
            copy = self._copy_of(record.content_hash)
            if not copy or (kept is not None and str(kept.path) == copy):
                raise
            return self._load(record, inspect(Path(copy), self._contract), is_known=False)

    def _load(self, record: AdapterRecord, files: AdapterFiles, *, is_known: bool) -> AdapterWeights:
        buffer = self.buffers.take(files.num_bytes)
        data = buffer[: files.num_bytes]
        view = memoryview(data.numpy())
        is_same = read(files, view) == record.checksum
        # Weights alone do not make an adapter: with another configuration they are scaled differently.
        if is_same and not is_known and files.signature != record.signature:
            is_same = content_hash(files, view) == record.content_hash
        if not is_same:
            raise AdapterRejected(
                f"The files of adapter {quoted(record.name)} are not those that were registered. Load it again.",
                code="changed",
            )
        tensors, buffer = self._applied(files, buffer)
        model = self._model(record.version_id, files, tensors, buffer)
        modules = {name: _module(lora) for name, lora in model.loras.items()}
        if not is_known:  # the same files and checksum make the same weights
            _check_scaled(record.name, modules)
        self._keep(record.version_id, files)
        return _weights(modules, buffer)

    def _take_kept(self, version_id: int) -> AdapterFiles | None:
        """Return a version's checked files; None if it was not loaded of late, or its files have changed since."""
        kept = self._kept.pop(version_id, None)
        with suppress(OSError):
            if kept is not None and kept.signature == signature_of(kept.path):
                return kept
        return None

    def _keep(self, version_id: int, files: AdapterFiles) -> None:
        self._kept[version_id] = files
        if len(self._kept) > NUM_KEPT:
            self._kept.popitem(last=False)

    def _applied(
        self, files: AdapterFiles, buffer: torch.Tensor
    ) -> tuple[Sequence[TensorInfo], torch.Tensor]:
        """Return the tensors that the engine applies, and memory with these alone: weights that it does not apply are counted nowhere, nor held."""
        applied = [info for info in files.tensors if info.module in self._contract.modules]
        if len(applied) == len(files.tensors):
            return applied, buffer
        begins = (0, *accumulate(info.num_bytes for info in applied))
        held = self.buffers.take(begins[-1])
        moved = [replace(info, begin=begin) for info, begin in zip(applied, begins, strict=False)]
        for info, to in zip(applied, moved, strict=True):
            held[to.begin : to.begin + to.num_bytes] = buffer[info.begin : info.begin + info.num_bytes]
        self.buffers.give_back(buffer)
        return moved, held

    def _model(
        self, adapter_id: int, files: AdapterFiles, tensors: Sequence[TensorInfo], data: torch.Tensor
    ) -> LoRAModel:
        """Build vLLM's model of the adapter, with vLLM's own reading of names, scales and fused layers."""
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        model = LoRAModel.from_lora_tensors(
            adapter_id,
            {info.name: _view(data, info) for info in tensors},
            PEFTHelper.from_dict(dict(files.config)),
            device="cpu",
            dtype=self._dtype,
            model_vocab_size=self._vocab_size,
            weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
            skip_prefixes=getattr(self._manager.model, "lora_skip_prefixes", None),
        )
        with torch.inference_mode():
            for prefix, permute in self._permutations:
                _permute_heads(prefix, permute, model.loras)
            _copy_parts(self._copies, model.loras)
            self._manager._create_merged_loras_inplace(model)
        return model


Permute = Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]


def _permutations_of(model: Any) -> Iterator[tuple[str, Permute]]:
    """Yield the models within a model of vLLM's that load the rows of queries and keys in another order than a checkpoint has them.

    vLLM leaves adapters in the checkpoint's order there, so that each row gets what another row should have. Source: vLLM 0.32, Llama 4.
    """
    for path, module in model.named_modules():
        if (permute := getattr(module, "permute_qk_weight_for_rotary", None)) is not None:
            yield f"{path}." if path else "", permute


def _permute_heads(prefix: str, permute: Permute, loras: Mapping[str, Any]) -> None:
    """Bring the rows of each lora_B of queries and keys below a model into the order of its weights."""
    for name, lora in loras.items():
        if name.startswith(prefix) and name.rpartition(".")[2] in ("q_proj", "k_proj"):
            _, permuted = permute(f"{name}.weight", lora.lora_b)
            lora.lora_b = permuted.contiguous()


_QKV = ("q", "k", "v")
"""How vLLM calls the parts of a fused attention layer, in their order."""


def copies_of(manager: Any) -> Mapping[str, Sequence[str]]:
    """Return which parts of fused layers a checkpoint has no weights for, as vLLM loads another part's there: by the name of that other part.

    vLLM leaves an adapter of the other part out of them, though it changes what they compute as well. Source: vLLM 0.32, Gemma 4, whose layers with
    `attention_k_eq_v` have their values from `k_proj`.
    """
    found: dict[str, list[str]] = {}
    for path, module in manager.model.named_modules():
        stacked = getattr(getattr(module, "hf_to_vllm_mapper", None), "orig_to_new_stacked", {})
        for name, (_, shards) in stacked.items():
            if not isinstance(shards, list) or not set(shards) <= set(_QKV):
                continue
            for parts in manager.packed_modules.values():
                of_name = [part for part in parts if part.startswith(path) and name in f"{part}."]
                for part in of_name:
                    found[part] = [
                        other
                        for at, other in zip(_QKV, parts, strict=False)
                        if at in shards and other != part
                    ]
    return found


def _copy_parts(copies: Mapping[str, Sequence[str]], loras: dict[str, Any]) -> None:
    """Give the parts that have another part's weights that part's adapter, too. Its lora_B is copied, as vLLM scales each in its place."""
    for name, others in copies.items():
        for other in others if name in loras else ():
            twin = shallow_copy(loras[name])
            twin.lora_b = twin.lora_b.clone()
            loras.setdefault(other, twin)


def _view(data: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    part = data[info.begin : info.begin + info.num_bytes]
    dtype = TORCH_DTYPES[info.dtype]
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(info.shape)


def _module(lora: Any) -> ModuleWeights:
    if isinstance(lora.lora_a, list):
        return ModuleWeights(tuple(lora.lora_a), tuple(lora.lora_b), is_list=True)
    return ModuleWeights((lora.lora_a,), (lora.lora_b,), is_list=False)


def _check_scaled(name: str, modules: dict[str, ModuleWeights]) -> None:
    """Refuse weights that overflow: finite values in the file may overflow where they are scaled, or in the model's type. Raises AdapterRejected."""
    for module in modules.values():
        for tensor in module.tensors():
            low, high = torch.aminmax(tensor)
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise AdapterRejected(
                    f"The weights of adapter {quoted(name)} overflow when they are scaled: no request can be answered with it.",
                    code="not_finite",
                )


def _weights(modules: dict[str, ModuleWeights], buffer: torch.Tensor) -> AdapterWeights:
    """Put an adapter's weights together. If all tensors were converted to another type, no tensor lies in the buffer, and it is let go."""
    inside = buffer.untyped_storage().data_ptr()
    tensors = [tensor for module in modules.values() for tensor in module.tensors()]
    is_used = any(tensor.untyped_storage().data_ptr() == inside for tensor in tensors)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return AdapterWeights(modules, num_bytes, buffer if is_used else None)


# -- what an adapter must be to run here -----------------------------------------------------------------------------


class ContractFacts(Struct, frozen=True, kw_only=True):
    """The facts of what an engine's layers accept, in plain data; see `ModelContract`. renames: vLLM's mapper of names in checkpoints, or None."""

    modules: dict[str, tuple[int, int]]
    max_rank: int
    embedding_modules: frozenset[str]
    parts_of: dict[str, tuple[str, ...]]
    unused_modules: frozenset[str]
    unadapted: tuple[str, ...]
    dtype: str
    renames: Any


def contract_of(manager: Any, base_models: tuple[str, ...]) -> ModelContract:
    """Return what the engine's layers accept, for `engine_bridge.adapters.files`."""
    return contract_from(contract_facts(manager), base_models)


def contract_from(facts: ContractFacts, base_models: tuple[str, ...]) -> ModelContract:
    """Return the contract with these facts. base_models: names and paths under which adapters may know the model."""
    accepted = asdict(facts)
    renames = accepted.pop("renames")
    return ModelContract(
        base_models=base_models,
        module_of=lambda name: parse_fine_tuned_lora_name(name, renames),
        check_config=_unsupported,
        scales=_scales,
        **accepted,
    )


def contract_facts(manager: Any) -> ContractFacts:
    """Return what the layers of vLLM's LoRAModelManager accept. Shapes are those of the whole model, if it is split over several devices."""
    modules: dict[str, tuple[int, int]] = {}
    embeddings, parts_of = set(), {}
    expected = _expected_names(manager)
    for name, layer in manager.modules.items():
        shapes = _slice_shapes(layer)
        if not shapes:
            continue
        parts = manager.packed_modules.get(name, [name])
        taken = {
            part: shape for part, shape in _part_shapes(parts, shapes).items() if _last(part) in expected
        }
        modules |= taken
        if name not in taken:
            parts_of[name] = tuple(map(_last, taken))
        if not isinstance(layer.lora_a_stacked, tuple) and layer.lora_a_stacked.dim() == 3:
            embeddings.add(name)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    return ContractFacts(
        modules=modules,
        max_rank=manager.lora_config.max_lora_rank,
        embedding_modules=frozenset(embeddings),
        parts_of=parts_of,
        unused_modules=_read_elsewhere(manager),
        unadapted=tuple(_left_as_they_are(manager)),
        dtype=_DTYPE_NAMES[manager.lora_config.lora_dtype],
        renames=mapper.get_rename_mapper() if mapper is not None else None,
    )


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _expected_names(manager: Any) -> set[str]:
    """Return the last parts of the names of all modules for which vLLM takes adapters.

    For a fused module these are the names of its parts, unless the model says that its checkpoints have it fused, too. Source: vLLM 0.32
    `LRUCacheWorkerLoRAManager._load_adapter`.
    """
    packed = manager.packed_modules_mapping
    return {name for module in manager.supported_lora_modules for name in packed.get(module, [module])}


def _read_elsewhere(manager: Any) -> frozenset[str]:
    """Return the layers whose weights attention reads itself, past the layer that would add an adapter's.

    Latent attention does so, in vLLM 0.32 everywhere.
    """
    held = {
        id(getattr(module.kv_b_proj, "base_layer", module.kv_b_proj))
        for module in manager.model.modules()
        if isinstance(module, MLAAttention)
    }
    layers = manager.modules.items()
    return frozenset(name for name, layer in layers if id(getattr(layer, "base_layer", None)) in held)


def _left_as_they_are(manager: Any) -> Iterator[str]:
    """Yield the beginnings of the names of modules of which vLLM takes adapters' weights and does not apply them.

    They read pictures and sounds, or draft tokens. Source: vLLM 0.32, `LoRAModelManager._get_punica_wrapper` and `LoRAModel.from_local_checkpoint`.
    """
    adapted: tuple[str, ...] = ()
    if getattr(manager, "supports_mm", False):
        adapted = tuple(f"{prefix.rstrip('.')}." for prefix in manager.punica_wrapper_mapping)
        yield from _outside(manager.model, "", adapted)
    for skipped in getattr(manager.model, "lora_skip_prefixes", ()):
        yield from (f"{place}{skipped}" for place in ("", *adapted))


def _outside(module: torch.nn.Module, path: str, adapted: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths of the largest modules in a module, each with a dot behind it, that neither lie in one of those adapted nor hold one.

    Embeddings and output layers are the language model's wherever they lie: without their weights an adapter is another.
    """
    for name, child in module.named_children():
        inside = f"{path}{name}."
        if inside.startswith(adapted) or isinstance(child, VocabParallelEmbedding):
            continue
        if any(each.startswith(inside) for each in adapted):
            yield from _outside(child, inside, adapted)
        else:
            yield inside


def _part_shapes(parts: Sequence[str], shapes: Sequence[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return (in, out) of each part of a layer's slices.

    Where there are fewer parts than slices, the first part takes all slices that the others leave. Source: vLLM 0.32
    `MergedColumnParallelLinearWithLoRA.expand_packed_lora`, which splits its weights so.
    """
    num_first = len(shapes) - len(parts) + 1
    if num_first < 1:
        return {}
    first = (shapes[0][0], sum(num_out for _, num_out in shapes[:num_first]))
    return dict(zip(parts, [first, *shapes[num_first:]], strict=True))


def _scales(config: dict[str, Any]) -> Callable[[str], float]:
    """Return a function that returns the factor by which vLLM multiplies a module's lora_B."""
    helper = PEFTHelper.from_dict(dict(config))
    return lambda module: float(helper.get_rank_and_scaling(module)[1])


def _slice_shapes(layer: Any) -> list[tuple[int, int]]:
    """Return (in, out) per slice. Layers that have no A and B stacks (experts) have none: adapters on them are refused."""
    a_stacked, b_stacked = vars(layer).get("lora_a_stacked"), vars(layer).get("lora_b_stacked")
    if a_stacked is None or b_stacked is None:
        return []
    a_parts = a_stacked if isinstance(a_stacked, tuple) else (a_stacked,)
    b_parts = b_stacked if isinstance(b_stacked, tuple) else (b_stacked,)
    if any(part.dim() > 4 or part.dim() < 3 for part in (*a_parts, *b_parts)):
        return []
    # An embedding's A is looked up by token: [slots, vocabulary, rank].
    shapes = [
        (a.shape[-1] if a.dim() == 4 else a.shape[-2], b.shape[-2])
        for a, b in zip(a_parts, b_parts, strict=True)
    ]
    if not is_split(layer):
        return shapes
    base = layer.base_layer
    if hasattr(base, "total_num_kv_heads"):  # `output_sizes` counts heads once for each rank that has them
        kv = base.total_num_kv_heads
        outs = [base.total_num_heads * base.head_size, kv * base.head_size, kv * base.v_head_size]
    else:
        outs = list(getattr(base, "output_sizes", [base.output_size]))
    if len(shapes) == 1:
        outs = [sum(outs)]
    return [(base.input_size, out) for out in outs]


def is_split(layer: Any) -> bool:
    """Return whether a linear LoRA layer has only a part of its weights on each of several devices."""
    return isinstance(layer, BaseLinearLayerWithLoRA) and layer.tp_size > 1


def part_of(layer: Any, module: ModuleWeights) -> ModuleWeights:
    """Return the part of a module's weights that a split layer of vLLM's takes, as views. Source: vLLM 0.32, the layers' `set_lora`."""
    a, b = module.as_arguments()
    if isinstance(b, torch.Tensor) and layer.n_slices > 1:
        a, b = [a] * layer.n_slices, list(b.split(list(layer.base_layer.output_sizes)))
    if isinstance(b, list) and len(b) != layer.n_slices:
        a, b = layer.expand_packed_lora(a, b)
    a, b = layer.slice_lora_a(a), layer.slice_lora_b(b)
    is_list = isinstance(b, list)
    halves = [half if is_list else [half] for half in (a, b)]
    return ModuleWeights(tuple(halves[0]), tuple(halves[1]), is_list)


def _unsupported(config: dict[str, Any]) -> tuple[str, ...]:
    """Return vLLM's objections to a configuration, as phrases."""
    try:
        return tuple(PEFTHelper.from_dict(dict(config))._validate_features())
    except (TypeError, ValueError) as error:
        return (str(error),)
