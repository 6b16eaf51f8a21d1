"""Environments of the clients: made on first use from exact versions, kept in a cache folder outside the repository."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from tests.clients.catalog import Client

STAMP = ".overture-made-from"
# Asked for before each environment is made. Measured: the largest, Open WebUI's, takes 2.5 GiB, and what is downloaded lies beside it meanwhile;
# all take 10 GiB together.
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


class Environment(ABC):
    """The folder in which one client is installed.

    python: what runs its scripts in Python. programs: the folders of its commands, which come first in a script's PATH.
    """

    python: Path
    programs: tuple[Path, ...]

    def __init__(self, client: Client, place: Path) -> None:
        self.client, self.place = client, place

    @abstractmethod
    def install(self) -> None:
        """Install the client into its folder, which is empty. Raises NotInstalled."""

    @abstractmethod
    def is_whole(self) -> bool:
        """Whether what runs the client's scripts is there."""

    @abstractmethod
    def version_of(self, package: str) -> str:
        """The installed version of `package`."""

    @abstractmethod
    def command(self, script: Path) -> list[str]:
        """What runs `script` with the client's packages."""


class Venv(Environment):
    """A virtual environment, from a list for pip."""

    def __init__(self, client: Client, place: Path) -> None:
        super().__init__(client, place)
        self.programs = (place / "bin",)
        self.python = place / "bin" / "python"

    def install(self) -> None:
        _run([_system_python(), "-m", "venv", str(self.place)], self.client)
        flags = ["-q", "--no-compile", "--no-input", *(["--no-deps"] if self.client.no_deps else [])]
        command = [str(self.python), "-m", "pip", "install", *flags, "-r", str(self.client.requirements)]
        _run(command, self.client)
        packages = next(self.place.glob("lib/python*/site-packages"))
        if self.client.empty_modules:
            (packages / "overture_empty.py").write_text(EMPTY_CLASSES)
        for name in self.client.empty_modules:
            add_empty_module(packages, name)

    def is_whole(self) -> bool:
        return self.python.exists()

    def version_of(self, package: str) -> str:
        code = f"from importlib.metadata import version; print(version({package!r}))"
        return subprocess.run(
            [str(self.python), "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()

    def command(self, script: Path) -> list[str]:
        return [str(self.python), str(script)]


class NodeFolder(Environment):
    """A folder of Node packages, from a package.json. One of them is Node itself, so that this machine's may be of any age.

    Scripts in Python run the client's command and need the standard library alone, so our own interpreter runs them.
    """

    def __init__(self, client: Client, place: Path) -> None:
        super().__init__(client, place)
        self.modules = place / "node_modules"
        self.programs = (self.modules / "node" / "bin", self.modules / ".bin")
        self.python = Path(sys.executable)

    def install(self) -> None:
        self.place.mkdir()
        shutil.copy(self.client.requirements, self.place / "package.json")
        flags = ["--no-package-lock", "--no-audit", "--no-fund", "--no-update-notifier"]
        _run(["npm", "install", f"--prefix={self.place}", *flags], self.client)

    def is_whole(self) -> bool:
        return (self.programs[0] / "node").exists()

    def version_of(self, package: str) -> str:
        return str(json.loads((self.modules / package / "package.json").read_text())["version"])

    def command(self, script: Path) -> list[str]:
        if script.suffix == ".py":
            return [str(self.python), str(script)]
        # A module finds packages beside itself, not beside the folder in which it is run.
        return [str(self.programs[0] / "node"), shutil.copy(script, self.place)]


def environment_of(client: Client, folder: Path, say: Callable[[str], None]) -> Environment:
    """The client's environment under `folder`, which is made where it is missing or was made from another list.

    Raises NotInstalled.
    """
    kind = NodeFolder if client.requirements.suffix == ".json" else Venv
    made = kind(client, folder / client.environment)
    stamp, wanted = made.place / STAMP, fingerprint(client)
    if stamp.is_file() and stamp.read_text() == wanted and made.is_whole():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    free_gib = shutil.disk_usage(folder).free / (1 << 30)
    if free_gib < MIN_FREE_GIB:
        raise NotInstalled(
            f"{free_gib:.1f} GiB are free in {folder}; {MIN_FREE_GIB} GiB are needed. Free some, or set XDG_CACHE_HOME."
        )
    say(f"{client.environment}: installing {client.requirements.name}")
    shutil.rmtree(made.place, ignore_errors=True)
    made.install()
    stamp.write_text(wanted)
    return made


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


def _system_python() -> str:
    """The interpreter that .venv was made with: an environment made from another one would find that one's packages."""
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")


def _run(command: list[str], client: Client) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except OSError as error:
        raise NotInstalled(
            f"{client.environment} cannot be installed without {command[0]}: {error}"
        ) from error
    if done.returncode:
        raise NotInstalled(f"{client.environment} cannot be installed: {done.stderr.strip()[-800:]}")
