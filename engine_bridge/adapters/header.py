"""The header of a safetensors file: which tensors lie where. Nothing in it is believed before it is checked against the file.

Source: the format's description (github.com/huggingface/safetensors): 8 bytes with the header's length (little-endian), the header (one
JSON object), then the tensors one after the other, without holes, to the end of the file.
"""

from __future__ import annotations

import math
from io import RawIOBase
from typing import Any, Final, NamedTuple, TypeGuard

from engine_bridge.adapters.config import parse_object
from engine_bridge.adapters.errors import AdapterRejected, quoted

WEIGHTS_FILE: Final = "adapter_model.safetensors"
MAX_HEADER_BYTES: Final = 100_000_000  # The format's own limit.
ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}  # What an adapter's weights may be.
LENGTH_BYTES: Final = 8
_METADATA = "__metadata__"
_MAX_DIMENSIONS = 8  # Chosen: keeps a hostile shape from being multiplied out; LoRA weights have two.
_MAX_SIZE = 2**63


class TensorSpan(NamedTuple):
    """One tensor: its bytes are those from `begin` to before `end`, counted from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """A header. raw: its bytes. data_offset: start of the tensors in the file. entries: in the order of their bytes."""

    raw: bytes
    data_offset: int
    entries: list[TensorSpan]


def read_header(file: RawIOBase, file_bytes: int, max_bytes: int) -> Header:
    """Read and check the header of an open file of `file_bytes` bytes, from its start. Reads no byte of the tensors.

    max_bytes: a longer header is not parsed (parsing its JSON locks the interpreter). Raises AdapterRejected (`corrupt_file`,
    `wrong_dtype`), OSError.
    """
    prefix = read_exactly(file, LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    if length > file_bytes - LENGTH_BYTES:
        raise corrupt("it ends within its header. Was it copied whole?")
    if length > min(max_bytes, MAX_HEADER_BYTES):
        raise corrupt(f"its header has {length} bytes, more than an adapter for this model can need.")
    raw = read_exactly(file, length)
    try:
        fields = parse_object(raw)
    except ValueError as error:
        raise corrupt(f"its header cannot be read ({str(error)[:200]}).") from error
    _check_metadata(fields.pop(_METADATA, None))
    entries = sorted((_entry(name, entry) for name, entry in fields.items()), key=lambda entry: entry[3:])
    data_offset = LENGTH_BYTES + length
    _check_coverage(entries, file_bytes - data_offset)
    return Header(raw, data_offset, entries)


def read_exactly(file: RawIOBase, num_bytes: int) -> bytes:
    """Read the next `num_bytes` bytes. Raises AdapterRejected (`corrupt_file`) if the file ends before."""
    chunks = bytearray()
    while len(chunks) < num_bytes:
        chunk = file.read(num_bytes - len(chunks))
        if not chunk:
            raise corrupt("it ends too early. Was it copied whole?")
        chunks += chunk
    return bytes(chunks)


def corrupt(text: str) -> AdapterRejected:
    """Make the error for weights whose file contradicts itself; `text` says where."""
    return AdapterRejected(f"The adapter's {WEIGHTS_FILE} is damaged: {text}", code="corrupt_file")


def _check_metadata(metadata: Any) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise corrupt(f"'{_METADATA}' must map names to texts.")


def _entry(name: str, fields: Any) -> TensorSpan:
    if not isinstance(fields, dict):
        raise corrupt(f"the entry of {quoted(name)} is no object.")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or not isinstance(dtype, str):
        raise corrupt(f"the entry of {quoted(name)} is malformed.")
    if dtype not in ITEM_BYTES:
        raise AdapterRejected(
            f"Tensor {quoted(name)} has the type {quoted(dtype)}. Save the adapter as one of {', '.join(ITEM_BYTES)}.",
            code="wrong_dtype",
        )
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise corrupt(f"the length of {quoted(name)} does not fit its shape and type.")
    return TensorSpan(name, dtype, tuple(shape), begin, end)


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(values, list)
        and len(values) <= _MAX_DIMENSIONS
        and all(type(value) is int and 0 <= value < _MAX_SIZE for value in values)
    )


def _check_coverage(entries: list[TensorSpan], data_bytes: int) -> None:
    """Check that the tensors fill the data exactly: no overlap, no hole, nothing after them."""
    position = 0
    for entry in entries:
        if entry.begin != position:
            what = "overlaps another" if entry.begin < position else "leaves a hole before it"
            raise corrupt(f"tensor {quoted(entry.name)} {what}.")
        position = entry.end
    if position != data_bytes:
        raise corrupt(
            f"it should hold {position} bytes of tensors and holds {data_bytes}. Was it copied whole?"
        )
