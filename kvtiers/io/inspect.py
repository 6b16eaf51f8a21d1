"""Inspecting stores on disk, and pruning and erasing what they hold, without opening them: for the command line."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct

from kvtiers.errors import StoreBusy
from kvtiers.io.files import DESCRIPTION_NAME, LOCK_NAME, Files, claim, read_regular
from kvtiers.io.overwrite import overwrite
from kvtiers.io.records import owner_tag
from kvtiers.io.scan import live_blocks, scan_segment, segment_paths

# Of the stores below a folder: each model has a folder, and where there are several nodes each node has one with its models'.
DEPTH = 2


class StoreInfo(Struct, frozen=True, kw_only=True):
    """The facts of one namespace's folder.

    Attributes:
        description: the content of `namespace.json`.
        num_blocks: different blocks whose records look whole; their bodies were not read.
        bytes: size of its segment files.
        oldest_s, newest_s: the times of the least and the most recent write of a segment, in seconds since the epoch; None without segments.
    """

    directory: Path
    description: bytes | None
    num_segments: int
    num_blocks: int
    bytes: int
    oldest_s: float | None
    newest_s: float | None


class Pruned(Struct, frozen=True, kw_only=True):
    """The segments and bytes that `prune` removed, and the bytes that are left."""

    num_segments: int
    bytes: int
    bytes_left: int


def inspect(directory: Path) -> list[StoreInfo]:
    """Return the stores under `directory`, or the store that it is, by name. It takes no lock, so a live store may be inspected.

    Raises OSError when `directory` cannot be listed; files that vanish meanwhile are left out.
    """
    return [_store_info(folder) for folder in _stores(directory)]


def bytes_beside(store: Path) -> int:
    """Return the bytes of segments in the stores beside one: those of other models, and of this one as it was served before.

    Raises OSError when the folder of both cannot be listed.
    """
    return sum(
        stat.st_size for folder in _stores(store.parent, {store.name}) for _, stat in _segments(folder)
    )


def prune(
    directory: Path, *, max_bytes: int | None = None, older_than_s: float | None = None, now: float
) -> Pruned:
    """Delete whole segments of the stores under `directory`, or of the store that it is, the least recently written first.

    Args:
        directory: a store, or a folder of stores.
        max_bytes: delete until all stores together take no more.
        older_than_s: before that, delete segments that were last written longer ago than this.
        now: seconds since the epoch.

    Raises:
        StoreBusy: a live process holds one of the stores; then no segment is deleted.
        OSError: a segment cannot be deleted.
    """
    with ExitStack() as held:
        folders = list(_stores(directory))
        for folder in folders:
            held.callback(claim(folder).release)
        segments = sorted(
            ((stat.st_mtime, path, stat.st_size) for folder in folders for path, stat in _segments(folder)),
        )
        left = sum(size for _, _, size in segments)
        num_removed = removed_bytes = 0
        for written_s, path, size in segments:
            is_old = older_than_s is not None and now - written_s > older_than_s
            if is_old or (max_bytes is not None and left > max_bytes):
                path.unlink()
                num_removed += 1
                removed_bytes += size
                left -= size
    return Pruned(num_segments=num_removed, bytes=removed_bytes, bytes_left=left)


def erase(directory: Path, tenant: str, *, skips_held: bool = False, but: Collection[str] = ()) -> int:
    """Overwrite the blocks of one tenant in the stores under `directory`, or in the store that it is, and return how many there were.

    Blocks of another tenant with the same tag go as well; those are computed again.

    Args:
        directory: a store, or a folder of stores.
        tenant: whose blocks are to go; not "", which is everybody's.
        skips_held: leave out stores that a live process holds, which erases there by itself.
        but: names of folders in `directory` that are left out.

    Raises:
        StoreBusy: a live process holds one of the stores; then nothing is erased.
        OSError: a segment cannot be written.
    """
    if not tenant:
        raise ValueError("the tenant without a name is everybody")
    num_blocks = 0
    with ExitStack() as held:
        folders = []
        for folder in _stores(directory, but):
            try:
                held.callback(claim(folder).release)
            except StoreBusy:
                if not skips_held:
                    raise
            else:
                folders.append(folder)
        for folder in folders:
            for number, path in segment_paths(folder):
                places = [place for place, _ in scan_segment(Files(), number, path).records]
                own = [place for place in places if place.owner == owner_tag(tenant)]
                if own:
                    overwrite(path, [place.offset for place in own])
                num_blocks += sum(place.num_blocks for place in own)
    return num_blocks


def _stores(directory: Path, but: Collection[str] = (), depth: int = DEPTH) -> Iterator[Path]:
    """Yield the folders that a `DiskLog` has held. but: names of folders in `directory` that are left out."""
    if (directory / LOCK_NAME).is_file():
        yield directory
    elif depth:
        for folder in sorted(directory.iterdir()):
            if folder.is_dir() and not folder.is_symlink() and folder.name not in but:
                yield from _stores(folder, depth=depth - 1)


def _segments(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for _, path in segment_paths(folder):
        try:
            yield path, path.stat()
        except FileNotFoundError:
            continue  # A live store has just evicted it.


def _store_info(folder: Path) -> StoreInfo:
    found = list(_segments(folder))
    scans = [scan_segment(Files(), number, path) for number, (path, _) in enumerate(found)]
    times_s = [stat.st_mtime for _, stat in found]
    try:
        description = read_regular(folder / DESCRIPTION_NAME)
    except OSError:
        description = None
    return StoreInfo(
        directory=folder,
        description=description,
        num_segments=len(found),
        num_blocks=len({key for key, _, _ in live_blocks(scans)}),
        bytes=sum(stat.st_size for _, stat in found),
        oldest_s=min(times_s, default=None),
        newest_s=max(times_s, default=None),
    )


__all__ = ["Pruned", "StoreBusy", "StoreInfo", "bytes_beside", "erase", "inspect", "prune"]
