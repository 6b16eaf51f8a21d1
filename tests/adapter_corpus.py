"""LoRA adapters made to order: good ones, and one of every kind that must be turned away.

Tensors are made and written by hand, so neither torch nor PEFT is needed and any damage can be done on the way. A model is given as its
modules: full name -> (in features, out features). The bad ones need a first module that is no embedding, a layer 0, and room for rank 8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Shapes = Mapping[str, tuple[int, int]]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
SPREAD = (
    0.05  # Standard deviation of the weights: answers differ from the base model's, and nothing overflows.
)
BASE_MODEL = "demo/base"
RANK = 8


class Tensor(NamedTuple):
    """dtype: as safetensors spells it. data: the bytes, row by row."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = dict[str, Tensor]


def encode(values: np.ndarray, dtype: str) -> Tensor:
    """float32 `values` as a tensor of `dtype`: F32, F16, BF16 (cut, not rounded), F64 or I8."""
    if dtype == "BF16":
        data = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    else:
        data = values.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1"}[dtype]).tobytes()
    return Tensor(dtype, values.shape, data)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Source: the format's description, github.com/huggingface/safetensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [position, end]}
        position = end
    write_raw(path, header, b"".join(tensor.data for tensor in tensors.values()))


def write_raw(path: Path, header: Mapping[str, Any] | bytes, data: bytes) -> None:
    """A file with this header, whether or not it fits the data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def names_of(module: str, *, is_embedding: bool = False) -> tuple[str, str]:
    """What PEFT calls the two halves of a module."""
    stem = f"base_model.model.{module}"
    if is_embedding:
        return f"{stem}.lora_embedding_A", f"{stem}.lora_embedding_B"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def make_tensors(
    modules: Shapes,
    *,
    rank: int = RANK,
    dtype: str = "BF16",
    seed: int = 0,
    ranks: Mapping[str, int] | None = None,
    embeddings: frozenset[str] = frozenset(),
) -> Tensors:
    """Random weights for every module. ranks: modules of another rank than `rank`. embeddings: those of `modules` that are embeddings."""
    random = np.random.default_rng(seed)
    tensors: Tensors = {}
    for module, (num_in, num_out) in modules.items():
        name_a, name_b = names_of(module, is_embedding=module in embeddings)
        own_rank = (ranks or {}).get(module, rank)
        for name, shape in ((name_a, (own_rank, num_in)), (name_b, (num_out, own_rank))):
            tensors[name] = encode(random.normal(0, SPREAD, shape).astype(np.float32), dtype)
    return tensors


def make_adapter(
    folder: Path,
    *,
    modules: Shapes,
    rank: int = RANK,
    dtype: str = "BF16",
    seed: int = 0,
    config_overrides: Mapping[str, Any] | None = None,
    ranks: Mapping[str, int] | None = None,
    embeddings: frozenset[str] = frozenset(),
    edit: Callable[[Tensors], object] | None = None,
) -> Path:
    """Write an adapter as PEFT's save_pretrained does, and return its folder.

    config_overrides: fields of the configuration; None takes a field out. edit: changes the tensors before they are written.
    """
    tensors = make_tensors(modules, rank=rank, dtype=dtype, seed=seed, ranks=ranks, embeddings=embeddings)
    if edit is not None:
        edit(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / WEIGHTS_FILE, tensors)
    write_config(folder, modules, rank, config_overrides)
    return folder


def write_config(
    folder: Path, modules: Shapes, rank: int = RANK, overrides: Mapping[str, Any] | None = None
) -> None:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE_MODEL,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
        **(overrides or {}),
    }
    kept = {
        name: value for name, value in config.items() if not (name in (overrides or {}) and value is None)
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(kept, indent=1))


# --- the bad ones ----------------------------------------------------------------------------------------------------------------------

# Writes a bad adapter into a folder that does not exist yet, for a model of these modules and this largest rank. Returns the code of the
# refusal that must follow.
Builder = Callable[[Path, Shapes, int], str]

BAD: dict[str, Builder] = {}


def bad(name: str) -> Callable[[Builder], Builder]:
    def note(builder: Builder) -> Builder:
        BAD[name] = builder
        return builder

    return note


def edited(name: str, code: str, edit: Callable[[Tensors, Shapes], object]) -> None:
    """A bad adapter that is a good one but for `edit`."""

    def build(folder: Path, modules: Shapes, max_rank: int) -> str:
        make_adapter(folder, modules=modules, edit=lambda tensors: edit(tensors, modules))
        return code

    BAD[name] = build


def configured(name: str, code: str, **overrides: Any) -> None:
    """A bad adapter that is a good one but for fields of its configuration."""

    def build(folder: Path, modules: Shapes, max_rank: int) -> str:
        make_adapter(folder, modules=modules, config_overrides=overrides)
        return code

    BAD[name] = build


def first_names(modules: Shapes) -> tuple[str, str]:
    return names_of(next(iter(modules)))


def reshape(tensors: Tensors, name: str, shape: tuple[int, int]) -> None:
    """Put a good tensor of another shape in the place of `name`."""
    values = np.random.default_rng(7).normal(0, SPREAD, shape).astype(np.float32)
    tensors[name] = encode(values, "BF16")


def rename(tensors: Tensors, change: Callable[[str], str]) -> None:
    renamed = {change(name): tensor for name, tensor in tensors.items()}
    tensors.clear()
    tensors.update(renamed)


def poison(tensors: Tensors, name: str, value: float) -> None:
    """Make the last number of a BF16 tensor NaN or infinite: nothing but a look at every number finds it."""
    old = tensors[name]
    tensors[name] = old._replace(data=old.data[:-2] + encode(np.float32([value]), "BF16").data)


def _zeros(tensor: Tensor) -> Tensor:
    return tensor._replace(data=bytes(len(tensor.data)))


@bad("missing_path")
def _missing_path(folder: Path, modules: Shapes, max_rank: int) -> str:
    return "adapter_not_found"


@bad("file_not_folder")
def _file_not_folder(folder: Path, modules: Shapes, max_rank: int) -> str:
    folder.write_text("an adapter")
    return "adapter_not_found"


@bad("empty_folder")
def _empty_folder(folder: Path, modules: Shapes, max_rank: int) -> str:
    folder.mkdir()
    return "adapter_not_found"


@bad("no_config")
def _no_config(folder: Path, modules: Shapes, max_rank: int) -> str:
    (make_adapter(folder, modules=modules) / CONFIG_FILE).unlink()
    return "adapter_not_found"


@bad("bad_json")
def _bad_json(folder: Path, modules: Shapes, max_rank: int) -> str:
    (make_adapter(folder, modules=modules) / CONFIG_FILE).write_text('{"r": 8,')
    return "bad_config"


@bad("no_weights")
def _no_weights(folder: Path, modules: Shapes, max_rank: int) -> str:
    write_config(folder, modules)
    return "no_weights"


@bad("pickle_only")
def _pickle_only(folder: Path, modules: Shapes, max_rank: int) -> str:
    write_config(folder, modules)
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    return "unsupported_format"


@bad("rank_above_limit")
def _rank_above_limit(folder: Path, modules: Shapes, max_rank: int) -> str:
    make_adapter(folder, modules=modules, rank=max_rank + 1)
    return "rank_too_large"


@bad("truncated")
def _truncated(folder: Path, modules: Shapes, max_rank: int) -> str:
    weights = make_adapter(folder, modules=modules) / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-100])
    return "corrupt_file"


@bad("corrupt_header")
def _corrupt_header(folder: Path, modules: Shapes, max_rank: int) -> str:
    weights = make_adapter(folder, modules=modules) / WEIGHTS_FILE
    raw = bytearray(weights.read_bytes())
    raw[8] ^= 0xFF
    weights.write_bytes(raw)
    return "corrupt_file"


def _wider(tensors: Tensors, modules: Shapes, *, a: int = 0, b: int = 0) -> None:
    """The first module's lora_A with `a` more inputs, its lora_B with `b` more outputs."""
    name_a, name_b = first_names(modules)
    num_in, num_out = next(iter(modules.values()))
    reshape(tensors, name_a, (RANK, num_in + a))
    reshape(tensors, name_b, (num_out + b, RANK))


def _re_rank(tensors: Tensors, modules: Shapes, *, a: int, b: int) -> None:
    """The first module's lora_A with rank `a`, its lora_B with rank `b`."""
    name_a, name_b = first_names(modules)
    num_in, num_out = next(iter(modules.values()))
    reshape(tensors, name_a, (a, num_in))
    reshape(tensors, name_b, (num_out, b))


configured("no_r", "bad_config", r=None)
configured("rank_0", "bad_config", r=0)
configured("no_lora_alpha", "bad_config", lora_alpha=None)
configured("alpha_nan", "bad_config", lora_alpha=float("nan"))
configured("rank_pattern_of_0", "bad_config", rank_pattern={"q_proj": 0})
configured("alpha_pattern_of_nan", "bad_config", alpha_pattern={"q_proj": float("nan")})
configured("no_target_modules", "bad_config", target_modules=None)
configured("dora", "unsupported_option", use_dora=True)
configured("bias", "unsupported_option", bias="all")
configured("lora_bias", "unsupported_option", lora_bias=True)
configured("modules_to_save", "unsupported_option", modules_to_save=["lm_head"])
configured("not_lora", "unsupported_option", peft_type="IA3")
configured("r_lies", "wrong_shape", r=RANK // 2)
configured("rank_pattern_lies", "wrong_shape", rank_pattern={r".*": RANK // 2})
edited("no_tensors", "no_weights", lambda tensors, modules: tensors.clear())
edited(
    "unknown_module",
    "unknown_module",
    lambda tensors, modules: rename(
        tensors, lambda name: re.sub(r"\.\w+(?=\.lora)", ".wrong_proj", name, count=1)
    ),
)
edited(
    "layer_99",
    "unknown_module",
    lambda tensors, modules: rename(tensors, lambda name: re.sub(r"\blayers\.0\.", "layers.99.", name)),
)
edited(
    "not_a_lora_tensor",
    "unexpected_tensor",
    lambda tensors, modules: reshape(tensors, f"base_model.model.{next(iter(modules))}.weight", (4, 4)),
)
edited("no_lora_b", "missing_tensor", lambda tensors, modules: tensors.pop(first_names(modules)[1]))
edited("no_lora_a", "missing_tensor", lambda tensors, modules: tensors.pop(first_names(modules)[0]))
edited("no_numbers", "wrong_shape", lambda tensors, modules: _re_rank(tensors, modules, a=0, b=0))
edited(
    "one_for_each_expert",
    "wrong_shape",
    lambda tensors, modules: tensors.update(
        {
            name: tensor._replace(shape=(2, tensor.shape[0] // 2, tensor.shape[1]))
            for name, tensor in tensors.items()
        }
    ),
)
edited(
    "magnitudes",
    "unexpected_tensor",
    lambda tensors, modules: reshape(
        tensors, f"base_model.model.{next(iter(modules))}.lora_magnitude_vector", (1, 4)
    ),
)
edited(
    "trained_tokens",
    "unexpected_tensor",
    lambda tensors, modules: reshape(
        tensors, "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", (2, 4)
    ),
)
edited("rank_256_as_8", "wrong_shape", lambda tensors, modules: _re_rank(tensors, modules, a=256, b=256))
edited("a_8_b_16", "wrong_shape", lambda tensors, modules: _re_rank(tensors, modules, a=8, b=16))
edited("a_too_wide", "wrong_shape", lambda tensors, modules: _wider(tensors, modules, a=8))
edited("a_too_narrow", "wrong_shape", lambda tensors, modules: _wider(tensors, modules, a=-8))
edited("b_too_tall", "wrong_shape", lambda tensors, modules: _wider(tensors, modules, b=8))
edited("b_too_short", "wrong_shape", lambda tensors, modules: _wider(tensors, modules, b=-8))
edited("nan", "not_finite", lambda tensors, modules: poison(tensors, first_names(modules)[1], float("nan")))
edited("inf", "not_finite", lambda tensors, modules: poison(tensors, first_names(modules)[0], float("-inf")))


@bad("overflows_when_scaled")
def _overflows_when_scaled(folder: Path, modules: Shapes, max_rank: int) -> str:
    """Every number of it is finite, in any type that an engine computes in but F16; no number of its products is."""
    name_b = first_names(modules)[1]
    make_adapter(
        folder,
        modules=modules,
        config_overrides={"lora_alpha": 1e12},
        edit=lambda tensors: poison(tensors, name_b, 1e30),
    )
    return "not_finite"


@bad("scale_beyond_single_precision")
def _scale_beyond_single_precision(folder: Path, modules: Shapes, max_rank: int) -> str:
    """Infinity times zero is no number."""
    make_adapter(
        folder,
        modules=modules,
        config_overrides={"lora_alpha": 1e300},
        edit=lambda tensors: tensors.update({name: _zeros(tensor) for name, tensor in tensors.items()}),
    )
    return "not_finite"


@bad("int8")
def _int8(folder: Path, modules: Shapes, max_rank: int) -> str:
    make_adapter(folder, modules=modules, dtype="I8")
    return "wrong_dtype"


@bad("float64")
def _float64(folder: Path, modules: Shapes, max_rank: int) -> str:
    make_adapter(folder, modules=modules, dtype="F64")
    return "wrong_dtype"
