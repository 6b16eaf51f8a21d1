"""Environments of the clients: made on first use from pinned lists, kept in a cache folder outside the repository."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench.clients.catalog import Client

STAMP = ".overture-made-from"
# Measured: the environments of all clients take 5 GB together, half of it Open WebUI's.
MIN_FREE_GIB = 6
INSTALL_TIMEOUT_S = 1800.0
# Classes of all empty modules have one metaclass, since some are derived from several of them.
EMPTY_CLASSES = """class Empty(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return empty(name)


def empty(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Empty(name, (Exception,), {})
"""
EMPTY_MODULE = '"""Stands for a package that these calls do not use."""\nfrom overture_empty import empty as __getattr__\n'


class NotInstalled(RuntimeError):
    """A client's environment could not be made; the text says why."""


def cache_folder() -> Path:
    """Where the environments lie: $XDG_CACHE_HOME/overture/clients, or the same under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "overture" / "clients"


def fingerprint(client: Client) -> str:
    """What an environment is made from, in short: it is made again when this changes."""
    made_from = (
        client.requirements.read_bytes() + repr((client.no_deps, client.empty_modules, sys.version)).encode()
    )
    return hashlib.sha256(made_from).hexdigest()


def environment_of(client: Client, folder: Path, say: Callable[[str], None]) -> Path:
    """The Python of the client's environment under `folder`, which is made where it is missing or was made from another list.

    Raises NotInstalled.
    """
    place = folder / client.environment
    python, stamp = place / "bin" / "python", place / STAMP
    wanted = fingerprint(client)
    if stamp.is_file() and stamp.read_text() == wanted and python.exists():
        return python
    folder.mkdir(parents=True, exist_ok=True)
    free_gib = shutil.disk_usage(folder).free / (1 << 30)
    if free_gib < MIN_FREE_GIB:
        raise NotInstalled(
            f"{free_gib:.1f} GiB are free in {folder}; {MIN_FREE_GIB} GiB are needed. Free some, or set XDG_CACHE_HOME."
        )
    say(f"{client.environment}: installing {client.requirements.name}")
    shutil.rmtree(place, ignore_errors=True)
    _run([_system_python(), "-m", "venv", str(place)], client)
    no_deps = ["--no-deps"] if client.no_deps else []
    _run(
        [
            str(python),
            "-m",
            "pip",
            "install",
            "-q",
            "--no-compile",
            "--no-input",
            *no_deps,
            "-r",
            str(client.requirements),
        ],
        client,
    )
    packages = next(place.glob("lib/python*/site-packages"))
    if client.empty_modules:
        (packages / "overture_empty.py").write_text(EMPTY_CLASSES)
    for name in client.empty_modules:
        add_empty_module(packages, name)
    stamp.write_text(wanted)
    return python


def remove_others(folder: Path, names: set[str]) -> None:
    """Remove the environments under `folder` that have none of these names, so that clients which have left the list take no room."""
    for place in folder.iterdir() if folder.is_dir() else ():
        if (place / STAMP).is_file() and place.name not in names:
            shutil.rmtree(place, ignore_errors=True)


def add_empty_module(packages: Path, name: str) -> None:
    """Make `name`, which may have dots, importable from the folder `packages`. Packages that are there are left alone."""
    folder = packages
    for part in name.split("."):
        folder /= part
        folder.mkdir(exist_ok=True)
        if not any(folder.glob("*.py")):
            (folder / "__init__.py").write_text(EMPTY_MODULE)


def version_of(python: Path, package: str) -> str:
    """The version of `package` in the environment of `python`."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def _system_python() -> str:
    """The interpreter that .venv was made with: an environment made from another one would find that one's packages."""
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")


def _run(command: list[str], client: Client) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    if done.returncode:
        raise NotInstalled(f"{client.environment} cannot be installed: {done.stderr.strip()[-800:]}")
