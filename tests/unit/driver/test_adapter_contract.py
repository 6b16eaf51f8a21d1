import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_bridge.adapters.catalog import Catalog
from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.files import ModelContract, inspect
from engine_bridge.adapters.registry import Registry
from engine_bridge.driver.adapters.weights import Loader, contract_of, copies_of
from engine_bridge.driver.lora.experts import names_outside
from engine_bridge.driver.vllm_api import MoERunner, VocabParallelEmbedding
from tests.adapter_corpus import make_adapter, make_tensors

SLOTS, MAX_RANK, HIDDEN = 2, 16, 24
MLP, ATTENTION = "model.layers.0.mlp", "model.layers.0.self_attn"


def layer(*widths: int) -> Any:
    """A LoRA layer of vLLM's with so many slices."""
    return SimpleNamespace(
        lora_a_stacked=tuple(torch.zeros(SLOTS, 1, MAX_RANK, HIDDEN) for _ in widths),
        lora_b_stacked=tuple(torch.zeros(SLOTS, 1, width, MAX_RANK) for width in widths),
    )


def contract(packed: dict[str, list[str]], **layers: Any) -> ModelContract:
    return contract_of(manager_of(packed, **layers), ())


def manager_of(packed: dict[str, list[str]], **layers: Any) -> Any:
    """Of a model with these layers and this table; vLLM notes in its manager which of its layers have parts."""
    places = {"gate_up_proj": MLP, "in_proj_qkvz": MLP, "qkv_proj": ATTENTION}
    modules = {f"{places[name]}.{name}": each for name, each in layers.items()}

    def parts() -> Iterator[tuple[str, list[str]]]:
        for full_name in modules:
            place, _, name = full_name.rpartition(".")
            if len(packed.get(name, ())) > 1:
                yield full_name, [f"{place}.{part}" for part in packed[name]]

    config = SimpleNamespace(max_lora_rank=MAX_RANK, lora_dtype=torch.bfloat16)
    tables = {"packed_modules": dict(parts()), "packed_modules_mapping": packed, "modules": modules}
    tables["supported_lora_modules"] = list(layers)
    return SimpleNamespace(**tables, model=torch.nn.Module(), lora_config=config)


def table_of(module: str, model: str) -> dict[str, list[str]]:
    """vLLM's for this class of model."""
    found = importlib.import_module(f"vllm.model_executor.models.{module}")
    table: dict[str, list[str]] = getattr(found, model).packed_modules_mapping
    return table


def test_where_a_models_checkpoints_have_the_parts_only_these_take_adapters(tmp_path: Any) -> None:
    """GLM-4's checkpoints have gate and up in one, its class in vLLM does not say so: vLLM refuses such adapters, and so do we."""
    of_glm = contract(
        table_of("glm4", "Glm4ForCausalLM"), qkv_proj=layer(24, 8, 8), gate_up_proj=layer(32, 32)
    )
    widths = {f"{ATTENTION}.q_proj": 24, f"{ATTENTION}.k_proj": 8, f"{ATTENTION}.v_proj": 8}
    widths |= {f"{MLP}.gate_proj": 32, f"{MLP}.up_proj": 32}
    assert of_glm.modules == {name: (HIDDEN, width) for name, width in widths.items()}
    fused = make_adapter(tmp_path / "fused", modules={f"{MLP}.gate_up_proj": (HIDDEN, 64)})
    with pytest.raises(AdapterRejected, match="gate_proj, up_proj") as refused:
        inspect(fused, of_glm)
    assert refused.value.code == "unknown_module"
    in_parts = {name: shape for name, shape in of_glm.modules.items() if name.startswith(MLP)}
    assert inspect(make_adapter(tmp_path / "parts", modules=in_parts), of_glm).rank == 8


def test_where_a_models_checkpoints_are_fused_the_fused_module_takes_adapters(tmp_path: Any) -> None:
    of_phi = contract(table_of("phi3", "Phi3ForCausalLM"), qkv_proj=layer(40), gate_up_proj=layer(64))
    assert of_phi.modules == {f"{ATTENTION}.qkv_proj": (HIDDEN, 40), f"{MLP}.gate_up_proj": (HIDDEN, 64)}
    assert inspect(make_adapter(tmp_path / "fused", modules=of_phi.modules), of_phi).rank == 8
    assert contract({}, gate_up_proj=layer(16, 16, 32)).modules == {f"{MLP}.gate_up_proj": (HIDDEN, 64)}
    # Gated delta nets: queries, keys and values are one part of several slices, what gates them is another.
    parts = contract({"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]}, in_proj_qkvz=layer(16, 16, 32, 8))
    assert parts.modules == {f"{MLP}.in_proj_qkv": (HIDDEN, 64), f"{MLP}.in_proj_z": (HIDDEN, 8)}


def test_what_reads_pictures_keeps_its_weights_unless_it_is_adapted_too() -> None:
    within = {"language_model": torch.nn.Linear(2, 2), "tower": torch.nn.Linear(2, 2)}
    for adapted, left in (
        (["model.language_model"], ("model.tower.", "projector.")),
        (["model.language_model.", "model.tower."], ("projector.",)),
    ):
        manager = manager_of({}, qkv_proj=layer(24))
        manager.model.model, manager.model.projector = torch.nn.ModuleDict(within), torch.nn.Linear(2, 2)
        assert contract_of(manager, ()).unadapted == ()
        manager.supports_mm, manager.punica_wrapper_mapping = True, dict.fromkeys(adapted)
        assert contract_of(manager, ()).unadapted == left
    manager = manager_of({}, qkv_proj=layer(24))
    manager.model.lora_skip_prefixes = ["mtp."]
    assert contract_of(manager, ()).unadapted == ("mtp.",)
    manager.supports_mm, manager.punica_wrapper_mapping = True, {"language_model": None}
    manager.model.language_model = torch.nn.Linear(2, 2)
    assert contract_of(manager, ()).unadapted == ("mtp.", "language_model.mtp.")


def test_an_output_layer_beside_the_language_model_is_not_taken_for_one_that_reads_pictures() -> None:
    """Idefics 3 has one: without its weights the adapter is another, so it is refused."""
    head = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    torch.nn.Module.__init__(head)
    manager = manager_of({}, qkv_proj=layer(24))
    within = {"text_model": torch.nn.Linear(2, 2), "connector": torch.nn.Linear(2, 2)}
    manager.model.model, manager.model.lm_head = torch.nn.ModuleDict(within), head
    manager.supports_mm, manager.punica_wrapper_mapping = True, {"model.text_model": None}
    assert contract_of(manager, ()).unadapted == ("model.connector.",)


def test_weights_that_are_not_applied_are_not_held_in_memory(tmp_path: Path) -> None:
    manager = manager_of({}, qkv_proj=layer(24))
    manager.model.lora_skip_prefixes = ["mtp."]
    manager.device, manager._create_merged_loras_inplace = "cpu", lambda model: None
    accepted = contract_of(manager, ())
    catalog, loader = Catalog(Registry(None), accepted, 1 << 20), Loader(manager, accepted, 100, 1 << 20)
    drafts, own = {"mtp.layers.0.mixer.up_proj": (500, 500)}, {f"{ATTENTION}.qkv_proj": (HIDDEN, 24)}
    found = []
    for number, modules in enumerate((own, drafts | own, own | drafts)):
        path = tmp_path / f"adapter-{number}"
        make_adapter(path, modules=modules, edit=lambda tensors: tensors.update(make_tensors(own)))
        record = catalog.add(path.name, str(path))
        weights = loader.load(record)
        assert weights.buffer is not None and weights.buffer.nbytes == weights.num_bytes == record.num_bytes
        found.append(list(weights.modules[f"{ATTENTION}.qkv_proj"].tensors()))
    plain, *others = found
    assert [tensor.shape for tensor in plain] == [(8, HIDDEN), (24, 8)]
    for other in others:
        assert all(map(torch.equal, plain, other))


def test_a_part_that_is_loaded_from_anothers_weights_takes_that_ones_adapter() -> None:
    """Gemma 4's full attention has its values from k_proj: an adapter of k_proj changes both."""
    gemma4 = importlib.import_module("vllm.model_executor.models.gemma4")
    kinds = ["sliding_attention", "full_attention"]
    config = SimpleNamespace(num_hidden_layers=2, layer_types=kinds, attention_k_eq_v=True)
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.hf_to_vllm_mapper = gemma4._gemma4_layer_weights_mapper(config)
    places = [f"model.layers.{number}.self_attn" for number in (0, 1)]
    fused = table_of("gemma4", "Gemma4ForCausalLM")["qkv_proj"]
    parts = {f"{place}.qkv_proj": [f"{place}.{part}" for part in fused] for place in places}
    of_gemma = copies_of(SimpleNamespace(model=model, packed_modules=parts))
    assert of_gemma == {f"{places[1]}.k_proj": [f"{places[1]}.v_proj"]}
    config.attention_k_eq_v = False
    model.model.hf_to_vllm_mapper = gemma4._gemma4_layer_weights_mapper(config)
    assert not copies_of(SimpleNamespace(model=model, packed_modules=parts))


class Runner(MoERunner):
    """What runs experts, with what it computes beside them."""

    def __init__(self, beside: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self.beside = beside


def test_what_is_computed_beside_experts_has_the_name_that_checkpoints_give_it() -> None:
    model, shared, own = torch.nn.Module(), torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)
    model.experts, model.shared_experts = Runner(shared), shared
    model.other = Runner(own)
    model.head = model.embedding = own.__class__(2, 2)
    inside, outside = "experts.beside", "shared_experts"
    assert names_outside(model) == {inside: outside, f"{inside}.0": f"{outside}.0"}
