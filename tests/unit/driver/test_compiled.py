"""Compiled code is kept on disk, and does without where that cannot be."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

CODE = """
import logging, numpy as np
logging.basicConfig(level=logging.INFO)
from engine_bridge.driver.memory.row_copies import copy_rows
row = np.zeros(1, dtype=np.uint64)
of, to = np.ones(200, dtype=np.uint8), np.zeros(200, dtype=np.uint8)
start = lambda rows: rows.ctypes.data + -rows.ctypes.data % 64
copy_rows(start(to), 1, row, start(of), 1, row, 64)
print(int(to.sum()))
"""


@pytest.mark.parametrize(
    ("to_rows", "of_rows", "row_bytes", "problem"),
    [
        ([0, 4], [0, 1], 64, IndexError),
        ([0, 1], [0, 4], 64, IndexError),
        ([0, 1], [0], 64, IndexError),
        ([0], [0, 1], 64, IndexError),
        ([1], [1], 96, ValueError),
    ],
)
def test_rows_that_are_not_there_are_never_copied(
    to_rows: list[int], of_rows: list[int], row_bytes: int, problem: type[Exception]
) -> None:
    """Of four rows each; behind them lies what must not change."""
    from engine_bridge.driver.memory.row_copies import copy_rows

    memory = np.zeros(64 * 9, dtype=np.uint8)
    of = np.ones(64 * 9, dtype=np.uint8)
    to_start, of_start = (each.ctypes.data + -each.ctypes.data % 64 for each in (memory, of))
    rows = (np.array(each, dtype=np.uint64) for each in (to_rows, of_rows))
    with pytest.raises(problem):
        copy_rows(to_start, 4, next(rows), of_start, 4, next(rows), row_bytes)
    assert not memory.any()


def copied(cache: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "64", done.stderr
    return done


def test_code_is_kept_and_a_damaged_file_of_it_stops_nothing(tmp_path: Path) -> None:
    copied(tmp_path)
    kept = list(tmp_path.rglob("*.nbi"))
    assert kept and "not kept" not in copied(tmp_path).stderr
    for path in kept:
        path.write_bytes(b"no code")
    assert "is not kept" in copied(tmp_path).stderr
