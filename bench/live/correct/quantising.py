"""Quantised forms of a tiny checkpoint: the weights of its linear layers by plain rounding, in the formats that real checkpoints have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

GROUP_SIZE = 32
# Of eight values in a word, the place of each in AWQ's order.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_INT4_ZERO, _INT4_MAX = 8, 7


def quantise(folder: Path, method: str) -> None:
    """Replace the weights of a model folder's linear layers, all but the head, by quantised ones. method: a name in METHODS."""
    from safetensors.torch import load_file, save_file

    parts, described = METHODS[method]
    path, tensors = folder / "model.safetensors", {}
    for name, weight in load_file(path).items():
        if name.endswith("_proj.weight"):
            tensors |= {name.removesuffix("weight") + part: value for part, value in parts(weight).items()}
        else:
            tensors[name] = weight
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": described}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _int4_of(weight: Any) -> tuple[Any, Any]:
    """Return a weight's values, 0 … 15 around _INT4_ZERO, shape (inputs, outputs), and a scale for each group of inputs, shape (groups, outputs)."""
    num_out, num_in = weight.shape
    groups = weight.T.reshape(num_in // GROUP_SIZE, GROUP_SIZE, num_out)
    scales = groups.abs().amax(1) / _INT4_MAX
    values = (groups / scales.unsqueeze(1)).round().clamp(-_INT4_ZERO, _INT4_MAX) + _INT4_ZERO
    return values.reshape(num_in, num_out), scales


def _packed(values: Any, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """Pack each eight values of the last dimension into one word, each at its place in `order`."""
    import torch

    eights = values.to(torch.int64).unflatten(-1, (-1, 8))
    words = sum(eights[..., at] << (4 * place) for place, at in enumerate(order))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def _gptq(weight: Any) -> dict[str, Any]:
    import torch

    values, scales = _int4_of(weight)
    zeros = torch.full_like(scales, _INT4_ZERO - 1)  # GPTQ stores one less
    return {
        "qweight": _packed(values.T).T.contiguous(),
        "qzeros": _packed(zeros),
        "scales": scales.half(),
        "g_idx": (torch.arange(len(values)) // GROUP_SIZE).to(torch.int32),
    }


def _awq(weight: Any) -> dict[str, Any]:
    import torch

    values, scales = _int4_of(weight)
    zeros = torch.full_like(scales, _INT4_ZERO)
    return {
        "qweight": _packed(values, _AWQ_ORDER),
        "qzeros": _packed(zeros, _AWQ_ORDER),
        "scales": scales.half(),
    }


def _int8(weight: Any) -> dict[str, Any]:
    import torch

    scale = weight.abs().amax(1, keepdim=True) / 127
    return {
        "weight": (weight / scale).round().clamp(-128, 127).to(torch.int8),
        "weight_scale": scale.contiguous(),
    }


def _float8(weight: Any) -> dict[str, Any]:
    import torch

    scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale.contiguous()}


def _eight_bits(kind: str) -> dict[str, Any]:
    """Return what config.json says of weights and inputs of eight bits. kind: "int" or "float"."""
    shared = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": shared | {"strategy": "channel", "dynamic": False},
        "input_activations": shared | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


METHODS: dict[str, tuple[Callable[[Any], dict[str, Any]], dict[str, Any]]] = {
    "gptq": (
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "desc_act": False, "sym": True}
        | {"lm_head": False, "checkpoint_format": "gptq"},
    ),
    "awq": (
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "zero_point": True, "version": "gemm"},
    ),
    "w8a8": (_int8, _eight_bits("int")),
    "fp8": (_float8, _eight_bits("float")),
}
"""By name, what a linear layer's weight becomes, by the names of its parts, and what config.json says of it."""
