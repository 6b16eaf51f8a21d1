"""`overture kv`: what a KV store on disk holds, and making it smaller."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from gateway.errors import StartupError
from gateway.settings.sources import load_config
from kvtiers.errors import StoreBusy
from kvtiers.io.inspect import StoreInfo, inspect, prune
from overture_client.command_line import Group

GIB = 1 << 30
DAY_S = 86_400.0

folder_option = click.option(
    "--kv-dir", "folder", metavar="PATH", help="Folder of the store; unset: that of `overture config`."
)


@click.group(cls=Group)
def kv() -> None:
    """Look at the KV store on disk, or make it smaller."""


@kv.command()
@folder_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object a store, for scripts.")
def show(folder: str | None, as_json: bool) -> None:
    """Show each model's store: size, blocks, age. A server may be running."""
    root = _root(folder)
    stores = inspect(root) if root.is_dir() else []
    if as_json:
        for store in stores:
            click.echo(json.dumps(_as_json(store)))
        return
    if not stores:
        click.echo(f"No KV is stored in {root}.")
    for store in stores:
        _describe(store)


@kv.command("prune")
@folder_option
@click.option("--max-gib", type=click.FloatRange(min=0), metavar="GIB", help="Keep at most this much in all.")
@click.option(
    "--older-than-days",
    type=click.FloatRange(min=0),
    metavar="DAYS",
    help="Delete what was last written longer ago.",
)
@click.option("--all", "everything", is_flag=True, help="Delete all of it.")
def prune_command(
    folder: str | None, max_gib: float | None, older_than_days: float | None, everything: bool
) -> None:
    """Delete stored KV, the oldest first. Conversations stay: their KV is computed again when they continue.

    The server must be stopped; while it runs, `--kv-disk-gib` bounds the store.
    """
    if max_gib is None and older_than_days is None and not everything:
        raise click.UsageError("say what may go: --max-gib, --older-than-days or --all")
    root = _root(folder)
    if not root.is_dir():
        click.echo(f"No KV is stored in {root}.")
        return
    try:
        pruned = prune(
            root,
            max_bytes=0 if everything else int(max_gib * GIB) if max_gib is not None else None,
            older_than_s=older_than_days * DAY_S if older_than_days is not None else None,
            now=time.time(),
        )
    except StoreBusy as error:
        raise StartupError(f"{error}; stop the server first") from error
    except OSError as error:
        raise StartupError(f"cannot prune {root}: {error}") from error
    click.echo(
        f"Deleted {_size(pruned.bytes)} ({pruned.num_segments} files); {_size(pruned.bytes_left)} left."
    )


def _root(folder: str | None) -> Path:
    root = Path(folder).expanduser() if folder is not None else load_config({}).kv_dir
    assert root is not None  # filled in by Config
    return root


def _describe(store: StoreInfo) -> None:
    about = _description(store)
    click.echo(about.get("model", store.directory.name))
    age = "" if store.newest_s is None else f", last written {_age(time.time() - store.newest_s)} ago"
    click.echo(
        f"  {_size(store.bytes)} in {store.num_segments} files, {store.num_blocks} blocks"
        + (f" of {about['block_size_tokens']} tokens" if "block_size_tokens" in about else "")
        + age
    )
    click.echo(f"  {store.directory}")


def _as_json(store: StoreInfo) -> dict[str, Any]:
    fields = {
        name: getattr(store, name) for name in ("num_segments", "num_blocks", "bytes", "oldest_s", "newest_s")
    }
    return {"directory": str(store.directory), **fields, "namespace": _description(store)}


def _description(store: StoreInfo) -> dict[str, Any]:
    try:
        value = json.loads(store.description or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _age(seconds: float) -> str:
    for unit, length_s in (("days", DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
