"""What tells one state of a file from another, without reading it."""

from __future__ import annotations

import os
from pathlib import Path

Signature = tuple[int, int, int, int] | None


def signature_of(path: Path) -> Signature:
    """Return what tells one state of a file from another; None while there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    # ctime: a file that could not be read may become readable, and nothing else of it changes.
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
