"""The learned state of agents on disk: one line of JSON for each owner, behind a line that names the format.

It holds names of keys' owners, agents, adapters and sessions, and numbers, but no text that a person wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from gateway.advisories.followers import SavedOwner
from kvtiers.io.files import read_regular, write_whole

log = logging.getLogger(__name__)

NAME = "agents.jsonl"
HEADER = b'{"agents":1}'
MAX_BYTES = 256 << 20  # four times what 256 owners of full memory take


def line_of(owner: SavedOwner) -> bytes:
    """Return one owner as a line of the file."""
    return msgspec.json.encode(owner)


def read(path: Path) -> list[SavedOwner]:
    """Return what `write` wrote; nothing without a file.

    A file that is damaged or of another format is renamed to `….damaged`, and that is logged.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("it is too large to be one of these files")
        header, *lines = read_regular(path).splitlines()
        if header != HEADER:
            raise ValueError("saved by another version, or something else")
        return [msgspec.json.decode(line, type=SavedOwner) for line in lines]
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("%s cannot be read: %s; learning anew which agent follows which", path, error.strerror)
        return []
    except ValueError as error:  # msgspec's are of this kind, as is unpacking an empty file
        log.warning("%s: %s; it is put aside, learning anew which agent follows which", path, error)
        try:
            path.replace(path.with_name(f"{path.name}.damaged"))
        except OSError as failed:
            log.warning("%s could not be put aside: %s", path, failed.strerror)
        return []


def write(path: Path, lines: Iterable[bytes]) -> None:
    """Replace the file as a whole or not at all, readable by its owner only. Raises OSError."""
    write_whole(path, b"".join(line + b"\n" for line in (HEADER, *lines)))
