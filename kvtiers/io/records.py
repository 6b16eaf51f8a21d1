"""The bytes of a segment file: its header, and records of KV blocks. Pure: bytes in, bytes out.

A segment is a file header and then records, back to back. A record holds n >= 1 blocks, as a rule neighbours in one conversation:

    header    32 bytes: magic, version, checksum of the rest of the header and of the keys, n, layers L, bytes per layer B, the owner's tag
    keys      n of 32 bytes
    sums      L*n of 8 bytes: xxh3_64 of each part, layer-major like the body
    body      layer 0 of all n blocks, layer 1 of all n blocks, ...; B bytes each
    zeros     up to a multiple of 4,096 bytes

The file header is padded likewise, so that everything can be written past the page cache (O_DIRECT).

Layer-major, because an engine needs the first layers first: those of a whole conversation are one sequential read. A checksum for each
part, because any subset of blocks must be verifiable alone. Numbers are little-endian. Nothing read back is trusted: each `decode_*`
returns None for bytes that are not exactly what `encode_*` makes.

The checksums detect faults of disks and of power. They are no protection from people who may write the folder.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct
from xxhash import xxh3_64_intdigest as checksum
from xxhash import xxh32_intdigest

from kvtiers.keys import FORMAT_VERSION, KEY_BYTES, BlockKey, BlockShape

__all__ = [
    "ALIGNMENT_BYTES",
    "SEGMENT_HEADER_BYTES",
    "Part",
    "Record",
    "RecordHead",
    "RecordStream",
    "checksum",
    "decode_head",
    "decode_keys",
    "decode_segment_header",
    "decode_sums",
    "encode_prelude",
    "encode_segment_header",
    "owner_tag",
]

SEGMENT_MAGIC = b"OVTKVSEG"
RECORD_MAGIC = b"OVKR"
# magic, version, length of the fingerprint, fingerprint, checksum
_SEGMENT_HEADER = struct.Struct("<8sHH108sQ")
_RECORD_HEADER = struct.Struct("<4sHHQIIII")  # magic, version, 0, checksum, n, L, B, owner
_MAX_FINGERPRINT_BYTES = 108  # Chosen: makes the header 128 bytes; `Namespace.fingerprint` has 32.
_CHECKED_FROM = 16  # The record's checksum covers what follows it: n, L, B, the owner and the keys.
_SUM_BYTES = 8
ALIGNMENT_BYTES = 4096  # of records and of writes: what O_DIRECT asks for on any disk
SEGMENT_HEADER_BYTES = ALIGNMENT_BYTES
BREATH_BYTES = 1 << 20  # Chosen: 0.1 ms of work.

Part = Callable[[int, int], memoryview]
"""Returns the bytes of one layer of block i: `part(i, layer)`."""


class Record(NamedTuple):
    """The content of one record. owner: the tag of its tenant, 32 bits; 0 for none, as in records older than tags."""

    keys: Sequence[BlockKey]
    part: Part
    owner: int = 0


class RecordHead(Struct, frozen=True):
    """The content of a record's first 32 bytes, unchecked until `decode_keys` has checked them."""

    num_blocks: int
    shape: BlockShape
    owner: int = 0

    @property
    def keys_end(self) -> int:
        """Bytes from the record's start to the end of its keys, as `decode_keys` needs them."""
        return _RECORD_HEADER.size + self.num_blocks * KEY_BYTES

    @property
    def prelude_bytes(self) -> int:
        """Bytes before the body."""
        return self.keys_end + self.num_blocks * self.shape.num_layers * _SUM_BYTES

    @property
    def record_bytes(self) -> int:
        """Bytes of the whole record."""
        return _aligned(self.prelude_bytes + self.num_blocks * self.shape.block_bytes)

    def part_offset(self, layer: int, position: int) -> int:
        """Return the offset of the part of block `position` for `layer`, in bytes from the record's start."""
        return self.prelude_bytes + (layer * self.num_blocks + position) * self.shape.layer_bytes


def encode_segment_header(fingerprint: str) -> bytes:
    """Return the first bytes of a segment. Raises ValueError for a fingerprint of more than 108 bytes."""
    name = fingerprint.encode()
    if len(name) > _MAX_FINGERPRINT_BYTES:
        raise ValueError(f"a fingerprint has at most {_MAX_FINGERPRINT_BYTES} bytes, not {len(name)}")
    header = _SEGMENT_HEADER.pack(SEGMENT_MAGIC, FORMAT_VERSION, len(name), name, 0)[:-_SUM_BYTES]
    return (header + checksum(header).to_bytes(_SUM_BYTES, "little")).ljust(SEGMENT_HEADER_BYTES, b"\0")


def decode_segment_header(data: bytes) -> str | None:
    """Return the fingerprint; None for a damaged segment, or a file of another format."""
    if len(data) < SEGMENT_HEADER_BYTES:
        return None
    magic, version, length, name, found = _SEGMENT_HEADER.unpack_from(data)
    if (magic, version) != (SEGMENT_MAGIC, FORMAT_VERSION):
        return None
    if checksum(data[: _SEGMENT_HEADER.size - _SUM_BYTES]) != found:
        return None
    return str(name[:length], "utf-8", "replace")


def owner_tag(tenant: str) -> int:
    """Return the tag of a tenant in a record.

    Among a thousand tenants two share a tag, and then their share of the disk, with a chance of one in ten thousand.
    """
    return (xxh32_intdigest(tenant.encode("utf-8", "surrogatepass")) or 1) if tenant else 0


def encode_prelude(keys: Sequence[BlockKey], shape: BlockShape, sums: Iterable[int], owner: int = 0) -> bytes:
    """Return all bytes of a record before its body. `sums` has L*n checksums, layer-major."""
    fields = struct.pack("<IIII", len(keys), shape.num_layers, shape.layer_bytes, owner)
    checked = b"".join((fields, *keys))
    front = struct.pack("<4sHHQ", RECORD_MAGIC, FORMAT_VERSION, 0, checksum(checked))
    table = struct.pack(f"<{len(keys) * shape.num_layers}Q", *sums)
    return front + checked + table


def decode_head(data: bytes) -> RecordHead | None:
    """Return a record's head, unchecked but for its magic; None when no record begins here. Check `record_bytes` against the file's end."""
    if len(data) < _RECORD_HEADER.size:
        return None
    magic, version, zero, _, num_blocks, num_layers, layer_bytes, owner = _RECORD_HEADER.unpack_from(data)
    if (magic, version, zero) != (RECORD_MAGIC, FORMAT_VERSION, 0):
        return None
    if not (num_blocks and num_layers and layer_bytes):
        return None
    return RecordHead(num_blocks, BlockShape(num_layers, layer_bytes), owner)


def decode_keys(head: RecordHead, data: bytes) -> list[BlockKey] | None:
    """Return the record's keys, in the order of its blocks; None when head or keys are damaged. `data` starts where the record does."""
    if len(data) < head.keys_end:
        return None
    found = int.from_bytes(data[8:_CHECKED_FROM], "little")
    if checksum(data[_CHECKED_FROM : head.keys_end]) != found:
        return None
    starts = range(_RECORD_HEADER.size, head.keys_end, KEY_BYTES)
    return [BlockKey(data[start : start + KEY_BYTES]) for start in starts]


def decode_sums(head: RecordHead, data: bytes) -> tuple[int, ...]:
    """Return the checksums: of block p in layer l at l*n + p. A damaged checksum fails its part, so they need no check."""
    return struct.unpack_from(f"<{head.num_blocks * head.shape.num_layers}Q", data, head.keys_end)


class RecordStream:
    """Records, back to back, as a stream of bytes that is taken piece by piece, so that large records need no buffer of their size."""

    def __init__(self, records: Iterable[Record], shape: BlockShape) -> None:
        """Sum up all parts, which must not change until the last byte was taken. Raises ValueError for a part of a wrong size."""
        self.num_bytes = 0
        sources: list[memoryview] = []
        for keys, part, owner in records:
            parts = [part(block, layer) for layer in range(shape.num_layers) for block in range(len(keys))]
            wrong = next((view for view in parts if len(view) != shape.layer_bytes), None)
            if wrong is not None:
                raise ValueError(f"part() gave {len(wrong)} bytes, a layer has {shape.layer_bytes}")
            prelude = encode_prelude(keys, shape, [checksum(view) for view in _in_breaths(parts)], owner)
            num_bytes = len(prelude) + len(parts) * shape.layer_bytes
            padding = _aligned(num_bytes) - num_bytes
            sources += [memoryview(prelude), *parts, memoryview(bytes(padding))]
            self.num_bytes += num_bytes + padding
        self.num_bytes_left = self.num_bytes
        self._sources = _in_breaths(sources)
        self._rest = memoryview(b"")

    def fill(self, buffer: memoryview) -> int:
        """Copy the next bytes into `buffer`, and return how many; 0 at the end."""
        used = 0
        while used < len(buffer):
            if not self._rest:
                self._rest = next((view for view in self._sources if view), self._rest)
                if not self._rest:
                    break
            size = min(len(self._rest), len(buffer) - used)
            buffer[used : used + size] = self._rest[:size]
            self._rest = self._rest[size:]
            used += size
        self.num_bytes_left -= used
        return used


def _in_breaths(views: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the views, and release the GIL now and then: summing and copying small ones keeps it, and an engine may be waiting."""
    num_bytes = 0
    for view in views:
        num_bytes += len(view)
        if num_bytes > BREATH_BYTES:
            num_bytes = 0
            time.sleep(0)
        yield view


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
