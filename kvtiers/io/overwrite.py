"""Overwriting records in a segment file, so that nothing of what they held can be read from the disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvtiers.io.records import ALIGNMENT_BYTES, decode_head, encode_prelude
from kvtiers.keys import KEY_BYTES, BlockKey

_ZEROS_BYTES = 1 << 20  # Chosen: bytes written at once over erased blocks.


def overwrite(path: Path, offsets: Sequence[int]) -> None:
    """Replace the records that begin at these bytes of a segment by records of zeros under keys that no request asks for.

    They stay records, so that the ones behind them are still found. This blocks. Raises OSError.
    """
    with path.open("r+b") as segment:
        for offset in offsets:
            segment.seek(offset)
            head = decode_head(segment.read(ALIGNMENT_BYTES))
            if head is None:
                raise OSError(f"there is no record at byte {offset} of {path.name}")
            keys = [BlockKey(os.urandom(KEY_BYTES)) for _ in range(head.num_blocks)]
            sums = [0] * (head.num_blocks * head.shape.num_layers)
            prelude = encode_prelude(keys, head.shape, sums)
            segment.seek(offset)
            segment.write(prelude)
            left = head.record_bytes - len(prelude)
            while left:
                left -= segment.write(bytes(min(left, _ZEROS_BYTES)))
        segment.flush()
        os.fsync(segment.fileno())
