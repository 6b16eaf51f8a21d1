"""Environments in which our own files come from wheels, and all other packages from the environment of the tests, so that nothing is downloaded."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

PACKAGES = Path(sysconfig.get_path("purelib"))


def make(folder: Path, wheels: list[Path]) -> Path:
    """An environment with these wheels and nothing else; returns its folder of packages."""
    venv.create(folder, symlinks=True)
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    flags = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    done = subprocess.run([*command, *flags, *map(str, wheels)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("lib/python*/site-packages"))


def with_everything(folder: Path, wheels: list[Path]) -> Path:
    """Such an environment that also sees all packages of the tests' one; returns its `overture`.

    Ours are installed there for development, by a file that only takes effect in that environment itself.
    """
    operators = "_torchvision_operators"  # requirements/install.sh puts it there, where torchvision needs it
    imported = f"import {operators}\n" if (PACKAGES / f"{operators}.py").exists() else ""
    (make(folder, wheels) / "others.pth").write_text(f"{PACKAGES}\n{imported}")
    return folder / "bin" / "overture"


def with_dependencies(folder: Path, wheel: Path) -> Path:
    """Such an environment that also sees what the wheel depends on, as its metadata says, and nothing more; returns its `overture`."""
    packages = make(folder, [wheel])
    metadata = next(packages.glob("*.dist-info/METADATA")).read_text().splitlines()
    wanted = [line.removeprefix("Requires-Dist: ") for line in metadata if line.startswith("Requires-Dist: ")]
    linked: set[str] = set()
    while wanted:
        requirement = Requirement(wanted.pop())
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if needed and requirement.name not in linked:
            linked.add(requirement.name)
            found = distribution(requirement.name)
            wanted += found.requires or []
            for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                if not (packages / name).exists():
                    (packages / name).symlink_to(PACKAGES / name)
    return folder / "bin" / "overture"
