"""Faults of a model's folder that show without loading the weights: what is missing, cut off or no model at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# What the weights of a model come in. Source: vLLM 0.32, `model_executor/model_loader`.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.tensors")
_TOKENIZERS = (
    "tokenizer.json tokenizer.model* *.model vocab.* tekken.json *.tiktoken tokenization*.py".split()
)
_INDEX = "model.safetensors.index.json"
# What describes a model: in Hugging Face's format, and in Mistral's own.
_DESCRIPTIONS = ("config.json", "params.json")
_POINTER = b"version https://git-lfs"
# The header of a file of 100 GB with ten thousand tensors takes about one MB. Chosen far above.
_MAX_HEADER_BYTES = 100_000_000


def description_of(folder: Path) -> Path | None:
    """Return the file of a folder that describes a model; None where there is none."""
    return next((folder / name for name in _DESCRIPTIONS if os.path.isfile(folder / name)), None)


def weight_bytes_of(folder: Path) -> int:
    """Return the bytes of the weights that are loaded; 0 where none are here. Where a folder has them in several forms, one is loaded."""
    files = [{path: path.stat().st_size for path in folder.glob(form)} for form in _WEIGHTS]
    # Mistral's own form, which has the ending of Hugging Face's.
    own = sum(size for path, size in files[0].items() if path.name.startswith("consolidated"))
    return max(own, sum(files[0].values()) - own, *(sum(each.values()) for each in files[1:]))


def fault_of(folder: Path, *, has_weights: bool = True, has_tokenizer: bool = True) -> str:
    """Return the first fault of a model's folder, as a sentence without its full stop; "" where none shows.

    Args:
        folder: it has one of the files that describe a model.
        has_weights: whether the weights are to come from it.
        has_tokenizer: whether the tokenizer is to come from it.
    """
    try:
        return next(_faults(folder, has_weights=has_weights, has_tokenizer=has_tokenizer), "")
    except OSError as error:
        return f"{error.filename or folder} cannot be read: {error.strerror}"


def _faults(folder: Path, *, has_weights: bool, has_tokenizer: bool) -> Iterator[str]:
    description = description_of(folder)
    if description is not None and not isinstance(_json_of(description), dict):
        yield f"{description} is not JSON that describes a model"
    if has_weights:
        yield from _faults_of_weights(folder)
    if has_tokenizer:
        yield from _faults_of_tokenizer(folder)


def _faults_of_tokenizer(folder: Path) -> Iterator[str]:
    if not _has_any(folder, _TOKENIZERS):
        yield f"{folder} has no tokenizer (tokenizer.json, tokenizer.model or the like)"
    path = folder / "tokenizer.json"
    if path.is_file():
        text = path.read_bytes()  # of tens of MB, which take a second to parse
        if b'"model"' not in text or not text.rstrip().endswith(b"}"):
            yield f"{path} holds no tokenizer, or is cut off: it has {len(text):,} bytes"


def _has_any(folder: Path, patterns: Iterable[str]) -> bool:
    return any(path.is_file() for pattern in patterns for path in folder.glob(pattern))


def _faults_of_weights(folder: Path) -> Iterator[str]:
    if not _has_any(folder, _WEIGHTS):
        unread = ": GGUF files are not read" * _has_any(folder, ("*.gguf",))
        yield f"{folder} has no weights (*.safetensors){unread}"
    if (folder / _INDEX).is_file():
        index = _json_of(folder / _INDEX)
        named = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            yield f"{folder / _INDEX} does not name the files of weights"
            return
        missing = sorted({name for name in named.values() if not (folder / name).is_file()})
        if missing:
            yield f"{folder} lacks {len(missing)} of the files that {_INDEX} names, such as {missing[0]}"
    for path in sorted(folder.glob("*.safetensors")):
        if path.is_file():
            yield from _faults_of_tensors(path)


def _faults_of_tensors(path: Path) -> Iterator[str]:
    """Yield what is wrong with a safetensors file, whose header says how long it is."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
        if start == _POINTER:
            yield f"{path} is only Git LFS's pointer to the weights (git lfs pull fetches them)"
            return
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= min(size_bytes, _MAX_HEADER_BYTES) else b""
    end_bytes = _end_of(_parsed(header))
    if end_bytes is None:
        yield f"{path} is no safetensors file, or it is cut off: it has {size_bytes:,} bytes"
        return
    wanted_bytes = 8 + length + end_bytes
    if size_bytes < wanted_bytes:
        yield f"{path} is cut off: it has {size_bytes:,} of {wanted_bytes:,} bytes"


def _end_of(header: Any) -> int | None:
    """Return where the last tensor ends behind a safetensors file's header; None for what is no such header."""
    try:
        tensors = [each for name, each in header.items() if name != "__metadata__"]
        return max((int(each["data_offsets"][1]) for each in tensors), default=0)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def _json_of(path: Path) -> Any:
    """Return what a file of JSON says; None where it is none."""
    return _parsed(path.read_bytes())


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
