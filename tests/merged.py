"""The truth about an adapter: transformers in fp32, with the adapter's product added to the weights of the model."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

_HALF = re.compile(r"base_model\.model\.(.+)\.lora_(?:embedding_)?A(?:\.weight)?$")


def merged_model(model: Path, adapter: Path | None = None) -> Any:
    """The model with this adapter of PEFT's in its weights; None: as it is. Raises KeyError for an adapter that is not all used."""
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is not None:
        # Where embedding and output layer are one tensor, an adapter changes the one that it names.
        merged.lm_head.weight = torch.nn.Parameter(merged.lm_head.weight.detach().clone())
        for name, delta in deltas_of(adapter).items():
            merged.get_submodule(name).weight.data += delta
    return merged


def deltas_of(adapter: Path) -> dict[str, torch.Tensor]:
    """What an adapter adds to the weight of each module, by its name."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = {name: each.float() for name, each in load_file(adapter / "adapter_model.safetensors").items()}
    deltas = {}
    for name in tensors:
        found = _HALF.match(name)
        if found is None:
            continue
        module, a = found[1], tensors[name]
        b = tensors[name.replace("lora_A.", "lora_B.").replace("lora_embedding_A", "lora_embedding_B")]
        rank = _of_pattern(config.get("rank_pattern"), module, config["r"])
        alpha = _of_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        delta = scale * (b @ a)
        deltas[module] = delta.T if "embedding" in name else delta
    return deltas


def logprobs_of(merged: Any, token_ids: list[int]) -> torch.Tensor:
    """[positions, vocabulary]: of the token behind each of these."""
    with torch.no_grad():
        logits: torch.Tensor = merged(torch.tensor([token_ids])).logits[0]
    return logits.log_softmax(-1)


def _of_pattern(pattern: dict[str, Any] | None, module: str, usual: Any) -> Any:
    """As PEFT looks a module up: the first key that the end of its name matches."""
    return next(
        (value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", module)), usual
    )
