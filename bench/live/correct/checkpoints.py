"""The tiny checkpoints of families of models: each is written once per machine, by transformers, with LoRA adapters beside it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.live.correct.families import (
    ADAPTER_ALPHA,
    ADAPTER_RANK,
    DRAFTS_BY_LOOKUP,
    HIDDEN,
    Family,
)
from bench.live.correct.pictures import FIRST_SPECIAL, SIGHTS
from bench.live.correct.quantising import quantise
from bench.live.shared.models import cache_folder, save_adapter, write_once, write_tokenizer


def folder_of(family: Family) -> Path:
    """The folder of a family's model, written at first use."""
    return _written(family, "model", lambda folder: _write_model(family, folder), "config.json")


def flags_of(family: Family) -> list[str]:
    """The flags with which a server of a family's model is started."""
    flags = list(family.flags)
    if family.kv_cache_dtype:
        flags.append(f"--kv-cache-dtype={family.kv_cache_dtype}")
    if family.drafted_by == "ngram":
        flags.append(DRAFTS_BY_LOOKUP)
    elif family.drafted_by:
        drafts: dict[str, Any] = {"method": family.drafted_by, "num_speculative_tokens": 3}
        if family.drafted_by == "eagle":
            head = _written(family, "eagle", lambda folder: _write_eagle_head(family, folder), "config.json")
            drafts["model"] = str(head)
        elif family.drafted_by == "draft_model":
            drafts["model"] = str(folder_of(family))
        flags.append(f"--speculative-config={json.dumps(drafts)}")
    return flags


def adapter_folders_of(family: Family) -> list[Path]:
    """The folders of its adapters, written at first use."""
    return [
        _written(
            family,
            f"adapter-{number}",
            lambda folder, seed=number: write_adapter(family, folder, seed),
            "adapter_config.json",
        )
        for number in range(family.num_adapters)
    ]


def _written(family: Family, what: str, write: Any, last_file: str) -> Path:
    defined = hashlib.sha256(repr(family).encode()).hexdigest()[:8]
    folder = cache_folder() / "families" / f"{family.name}-{defined}-{what}"
    write_once(folder, last_file, write)
    return folder


def _write_model(family: Family, folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, family.config_class)(**family.config)
    model = model_class(config).from_config(config, dtype=torch.float32)
    _spread(model)
    model.save_pretrained(folder)
    if family.drafted_by == "mtp":
        _add_drafting(folder / "model.safetensors", f"model.layers.{family.extra['num_hidden_layers']}.")
    if family.renamed:
        _rename(folder / "model.safetensors", family.renamed)
    write_tokenizer(folder)
    if family.sight:
        SIGHTS[family.sight].write(folder)
    written = json.loads((folder / "config.json").read_text()) | family.extra
    (folder / "config.json").write_text(json.dumps(written, indent=2))
    if family.quantised:
        quantise(folder, family.quantised)


def _add_drafting(path: Path, prefix: str) -> None:
    """Add the weights that a layer has which drafts tokens, beside those of any layer."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(13)
    tensors = load_file(path)
    norms = {f"{prefix}{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    joined = {f"{prefix}eh_proj.weight": torch.randn(HIDDEN, 2 * HIDDEN) / 16}
    shared = {
        f"{prefix}shared_head.head.weight": tensors["lm_head.weight"].clone(),
        f"{prefix}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    save_file(tensors | norms | joined | shared, path, metadata={"format": "pt"})


def _rename(path: Path, renamed: Mapping[str, str]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for old, new in renamed.items():
        tensors = {name.replace(old, new): weights for name, weights in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def model_class(config: Any) -> Any:
    """Return transformers' class that makes models with this configuration: of those that read pictures, or of those that read text alone."""
    import transformers

    reads_pictures = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if reads_pictures else transformers.AutoModelForCausalLM


def _write_eagle_head(family: Family, folder: Path) -> None:
    """Write the one layer, and what joins tokens and hidden states before it, in the form of EAGLE's checkpoints."""
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(11)
    config = getattr(transformers, family.config_class)(**family.config | {"num_hidden_layers": 1})
    config.architectures = ["LlamaForCausalLM"]
    weights = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    layers = {
        name.removeprefix("model."): each
        for name, each in weights.items()
        if ".layers." in name and "input_layernorm" not in name
    }
    folder.mkdir(parents=True)
    save_file(layers | {"fc.weight": torch.randn(HIDDEN, 2 * HIDDEN) / 16}, folder / "model.safetensors")
    config.save_pretrained(folder)


def _spread(model: Any) -> None:
    """Give matrices weights that keep their inputs' size and then some: with transformers' small ones every prompt has nearly the same answer."""
    import torch

    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                continue
            deviation = 0.5 if "embed" in name else 1.2 / math.sqrt(weight.shape[-1])
            weight.normal_(0, 2 * deviation if "lm_head" in name else deviation, generator=generator)
            if "lm_head" in name:
                weight[FIRST_SPECIAL:] = 0


def write_adapter(family: Family, folder: Path, seed: int, *, adapted: Sequence[str] | None = None) -> None:
    """Write a PEFT folder for a family's model. adapted: names of the modules that it changes, in place of the family's."""
    import torch
    import transformers

    names = family.adapted if adapted is None else adapted
    config = transformers.AutoConfig.from_pretrained(folder_of(family))
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    generator = torch.Generator().manual_seed(100 + seed)
    tensors = {}
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        if last not in names or not isinstance(module, torch.nn.Linear) or "visi" in path or "visual" in path:
            continue
        shrink = torch.randn(ADAPTER_RANK, module.in_features, generator=generator)
        expand = torch.randn(module.out_features, ADAPTER_RANK, generator=generator)
        tensors[f"base_model.model.{path}.lora_A.weight"] = shrink / math.sqrt(module.in_features)
        tensors[f"base_model.model.{path}.lora_B.weight"] = expand / math.sqrt(ADAPTER_RANK) / 4
    save_adapter(folder, tensors, ADAPTER_RANK, ADAPTER_ALPHA)
