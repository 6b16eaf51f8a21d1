import os
import subprocess
import sys
from pathlib import Path

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


def complaint(cache: Path) -> str:
    """What a process that copies by compiled code says of the folder in which that is kept."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "64", done.stderr
    return done.stderr


def test_code_is_kept_and_a_damaged_file_of_it_stops_nothing(tmp_path: Path) -> None:
    assert "not kept" not in complaint(tmp_path)
    kept = list(tmp_path.rglob("*.nbi"))
    assert kept
    for path in kept:
        path.write_bytes(b"no code")
    assert "is not kept" in complaint(tmp_path)
