"""Checks the versions of vLLM for GPUs that we name as supported, on a machine without one.

    python -m tests.vllm_versions                                 # are all names of the inventory in each of them?
    python -m tests.vllm_versions 0.33.0 tests/integration/...    # run these tests with that version's Python code

The first form writes `requirements/vllm-names.txt`: what was looked for, as a checksum for each owner of names. A lint test compares it with the
inventory, so what has changed since is known without the wheels, which are 330 MB each. The second form puts the wheel's Python code over the
libraries of the installed build for CPUs, which has no such version yet: what the tests compute is right as long as the operators they use have not
changed between the two.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine_bridge.driver.vllm_api.inventory import ALL

ROOT = Path(__file__).resolve().parents[1]
NAMES = ROOT / "requirements/vllm-names.txt"
VERSIONS = ("0.32.0", "0.33.0")
WHEELS = Path.home() / ".cache/overture/wheels"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(17, 36)]
HEADER = f"# Found in vLLM {' and '.join(VERSIONS)} by `make vllm-names`: a checksum of what is used of each owner of names.\n"


def checksums() -> dict[str, str]:
    """Return a checksum of what the inventory has of each owner."""
    found: dict[str, str] = {}
    for owner in ALL:
        uses = [f"{use.how} {use.by} {use.name}({use.parameters})" for use in owner.uses]
        found[owner.path] = found.get(owner.path, "") + "\n".join(uses)
    return {path: hashlib.sha256(text.encode()).hexdigest()[:16] for path, text in sorted(found.items())}


def written() -> dict[str, str]:
    """Return the checksums of `NAMES`."""
    lines = NAMES.read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines if not line.startswith("#"))


def wheel(version: str) -> Path:
    """Return vLLM's wheel for GPUs, from a folder of the user's, or by pip. Raises CalledProcessError."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    if not (found := list(WHEELS.glob(f"vllm-{version}-*.whl"))):
        platforms = [part for name in PLATFORMS for part in ("--platform", name)]
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *platforms]
        subprocess.run([*command, "-d", str(WHEELS), f"vllm=={version}"], check=True)
        found = list(WHEELS.glob(f"vllm-{version}-*.whl"))
    return found[0]


def check() -> int:
    """Look for all names in each version; write `NAMES` where none has moved. Returns the exit status."""
    for version in VERSIONS:
        command = [sys.executable, "-m", "engine_bridge.driver.vllm_api", "--source", str(wheel(version))]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
        if done.returncode != 0:
            print(done.stdout.decode(), f"names have moved in vLLM {version}", sep="\n", file=sys.stderr)
            return 1
    NAMES.write_text(HEADER + "".join(f"{path} {text}\n" for path, text in checksums().items()))
    print(f"all names are in vLLM {' and '.join(VERSIONS)}")
    return 0


def run(version: str, tests: list[str]) -> int:
    """Run tests with this version's Python code over the libraries of the installed build. Returns pytest's exit status."""
    from importlib.util import find_spec

    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None, "vLLM is not installed"
    with tempfile.TemporaryDirectory(prefix="overture-vllm-") as folder:
        with zipfile.ZipFile(wheel(version)) as archive:
            archive.extractall(
                folder, [name for name in archive.namelist() if name.endswith((".py", ".json"))]
            )
        for library in Path(spec.origin).parent.glob("*.so"):
            (Path(folder) / "vllm" / library.name).symlink_to(library)
        # By this vLLM knows that it computes on a CPU.
        metadata = Path(folder) / f"vllm-{version}+cpu.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *tests]
        return subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": folder}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]) if sys.argv[1:] else check())
