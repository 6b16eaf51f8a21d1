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
# Standard deviation of the weights: answers differ from the base model's, and nothing overflows.
SPREAD = 0.05
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
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    data = b"".join(tensor.data for tensor in tensors.values())
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
    overrides = overrides or {}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": BASE_MODEL}
    config |= {
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
    }
    config |= {"inference_mode": True, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}}
    config |= {"use_rslora": False, "use_dora": False, **overrides}
    config.setdefault("target_modules", sorted({name.rpartition(".")[2] for name in modules}))
    kept = {name: value for name, value in config.items() if value is not None or name not in overrides}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(kept, indent=1))


# Writes a bad adapter into a folder that does not exist yet, for a model of these modules and this largest rank. Returns the code of the
# refusal that must follow.
Builder = Callable[[Path, Shapes, int], str]


def made(code: str, **options: Any) -> Builder:
    """A bad adapter that is a good one but for these arguments of `make_adapter`."""

    def build(folder: Path, modules: Shapes, max_rank: int) -> str:
        make_adapter(folder, modules=modules, **options)
        return code

    return build


def configured(code: str, **overrides: Any) -> Builder:
    """A bad adapter that is a good one but for fields of its configuration."""
    return made(code, config_overrides=overrides)


def edited(code: str, edit: Callable[..., object], **overrides: Any) -> Builder:
    """One that is good but for `edit`: it gets the tensors, the names of the first module's two, and its sizes in and out."""

    def build(folder: Path, modules: Shapes, max_rank: int) -> str:
        module, sizes = next(iter(modules.items()))
        options = {"modules": modules, "config_overrides": overrides}
        make_adapter(folder, **options, edit=lambda tensors: edit(tensors, *names_of(module), *sizes))
        return code

    return build


def spoiled(code: str, name: str, spoil: Callable[[Path], object]) -> Builder:
    """A bad adapter that was good until one of its files was spoiled."""

    def build(folder: Path, modules: Shapes, max_rank: int) -> str:
        spoil(make_adapter(folder, modules=modules) / name)
        return code

    return build


def left(code: str, leave: Callable[[Path, Shapes], object]) -> Builder:
    """What was left at the adapter's place instead of one."""

    def build(folder: Path, modules: Shapes, max_rank: int) -> str:
        leave(folder, modules)
        return code

    return build


def reshape(tensors: Tensors, name: str, shape: tuple[int, int]) -> None:
    """Put a good tensor of another shape in the place of `name`."""
    values = np.random.default_rng(7).normal(0, SPREAD, shape).astype(np.float32)
    tensors[name] = encode(values, "BF16")


def rename(tensors: Tensors, change: Callable[[str], str]) -> None:
    renamed = {change(name): tensor for name, tensor in tensors.items()}
    tensors.clear()
    tensors.update(renamed)


def poisoned(which: int, value: float) -> Callable[..., None]:
    """Make the last number of the first module's lora_A (0) or lora_B (1) NaN or infinite: nothing but a look at every number finds it."""

    def edit(tensors: Tensors, *names_and_sizes: Any) -> None:
        old = tensors[names_and_sizes[which]]
        tensors[names_and_sizes[which]] = old._replace(
            data=old.data[:-2] + encode(np.float32([value]), "BF16").data
        )

    return edit


def added(name: str, shape: tuple[int, int]) -> Callable[..., None]:
    """A tensor more; `{}` in its name stands for the first module's."""
    return lambda tensors, a, *_: reshape(
        tensors, f"base_model.model.{name}".format(a.split(".", 2)[2].removesuffix(".lora_A.weight")), shape
    )


def renamed(pattern: str, new: str, count: int = 0) -> Callable[..., None]:
    return lambda tensors, *_: rename(tensors, lambda name: re.sub(pattern, new, name, count=count))


def resized(a: int = 0, b: int = 0, rank_a: int = RANK, rank_b: int = RANK) -> Callable[..., None]:
    """The first module's lora_A with `a` more inputs and another rank, its lora_B with `b` more outputs and another."""

    def edit(tensors: Tensors, name_a: str, name_b: str, num_in: int, num_out: int) -> None:
        reshape(tensors, name_a, (rank_a, num_in + a))
        reshape(tensors, name_b, (num_out + b, rank_b))

    return edit


def _split_by_expert(tensors: Tensors, *_: Any) -> None:
    for name, tensor in tensors.items():
        num_rows, num_columns = tensor.shape
        tensors[name] = tensor._replace(shape=(2, num_rows // 2, num_columns))


def _zero(tensors: Tensors, *_: Any) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor._replace(data=bytes(len(tensor.data)))


def _pickle(folder: Path, modules: Shapes) -> None:
    write_config(folder, modules)
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04N.")


def _flip_first_of_header(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[8] ^= 0xFF
    path.write_bytes(raw)


def _rank_above_limit(folder: Path, modules: Shapes, max_rank: int) -> str:
    return made("rank_too_large", rank=max_rank + 1)(folder, modules, max_rank)


BAD: dict[str, Builder] = {
    "missing_path": left("adapter_not_found", lambda folder, modules: None),
    "file_not_folder": left("adapter_not_found", lambda folder, modules: folder.write_text("an adapter")),
    "empty_folder": left("adapter_not_found", lambda folder, modules: folder.mkdir()),
    "no_weights": left("no_weights", write_config),
    "pickle_only": left("unsupported_format", _pickle),
    "no_config": spoiled("adapter_not_found", CONFIG_FILE, Path.unlink),
    "bad_json": spoiled("bad_config", CONFIG_FILE, lambda path: path.write_text('{"r": 8,')),
    "truncated": spoiled("corrupt_file", WEIGHTS_FILE, lambda path: path.write_bytes(path.read_bytes()[:-100])),
    "corrupt_header": spoiled("corrupt_file", WEIGHTS_FILE, _flip_first_of_header),
    "rank_above_limit": _rank_above_limit,
    "int8": made("wrong_dtype", dtype="I8"),
    "float64": made("wrong_dtype", dtype="F64"),
    "no_r": configured("bad_config", r=None),
    "rank_0": configured("bad_config", r=0),
    "no_lora_alpha": configured("bad_config", lora_alpha=None),
    "alpha_nan": configured("bad_config", lora_alpha=float("nan")),
    "rank_pattern_of_0": configured("bad_config", rank_pattern={"q_proj": 0}),
    "alpha_pattern_of_nan": configured("bad_config", alpha_pattern={"q_proj": float("nan")}),
    "no_target_modules": configured("bad_config", target_modules=None),
    "dora": configured("unsupported_option", use_dora=True),
    "bias": configured("unsupported_option", bias="all"),
    "lora_bias": configured("unsupported_option", lora_bias=True),
    "modules_to_save": configured("unsupported_option", modules_to_save=["lm_head"]),
    "not_lora": configured("unsupported_option", peft_type="IA3"),
    "r_lies": configured("wrong_shape", r=RANK // 2),
    "rank_pattern_lies": configured("wrong_shape", rank_pattern={r".*": RANK // 2}),
    "no_tensors": edited("no_weights", lambda tensors, *_: tensors.clear()),
    "unknown_module": edited("unknown_module", renamed(r"\.\w+(?=\.lora)", ".wrong_proj", count=1)),
    "layer_99": edited("unknown_module", renamed(r"\blayers\.0\.", "layers.99.")),
    "not_a_lora_tensor": edited("unexpected_tensor", added("{}.weight", (4, 4))),
    "magnitudes": edited("unexpected_tensor", added("{}.lora_magnitude_vector", (1, 4))),
    "trained_tokens": edited("unexpected_tensor", added("model.embed_tokens.token_adapter.trainable_tokens_delta", (2, 4))),
    "no_lora_b": edited("missing_tensor", lambda tensors, a, b, *_: tensors.pop(b)),
    "no_lora_a": edited("missing_tensor", lambda tensors, a, *_: tensors.pop(a)),
    "no_numbers": edited("wrong_shape", resized(rank_a=0, rank_b=0)),
    "one_for_each_expert": edited("wrong_shape", _split_by_expert),
    "rank_256_as_8": edited("wrong_shape", resized(rank_a=256, rank_b=256)),
    "a_8_b_16": edited("wrong_shape", resized(rank_b=16)),
    "a_too_wide": edited("wrong_shape", resized(a=8)),
    "a_too_narrow": edited("wrong_shape", resized(a=-8)),
    "b_too_tall": edited("wrong_shape", resized(b=8)),
    "b_too_short": edited("wrong_shape", resized(b=-8)),
    "nan": edited("not_finite", poisoned(1, float("nan"))),
    "inf": edited("not_finite", poisoned(0, float("-inf"))),
    # Every number of it is finite, in any type that an engine computes in but F16; no number of its products is.
    "overflows_when_scaled": edited("not_finite", poisoned(1, 1e30), lora_alpha=1e12),
    # Infinity times zero is no number.
    "scale_beyond_single_precision": edited("not_finite", _zero, lora_alpha=1e300),
}  # fmt: skip
