"""The machine that this process runs on, as the system describes it; no torch is imported for it."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from msgspec import Struct

# The instructions of a processor that decide which kernels an engine gets; the last three are of ARM.
INSTRUCTIONS = tuple("avx2 avx512f avx512_vnni avx512_bf16 amx_tile amx_bf16 asimd bf16 sve".split())
GPU_QUERY_S = 10.0  # for the answer of a driver. Chosen


class Machine(Struct, frozen=True, kw_only=True):
    """A machine, or the part of it that a container may use. num_cores: usable by this process. gpus: a line each, as their driver names them."""

    processor: str
    instructions: tuple[str, ...]
    num_cores: int
    num_cores_in_all: int
    memory_bytes: int
    available_bytes: int
    gpus: tuple[str, ...]


def look() -> Machine:
    """Ask the system, and the NVIDIA driver if it is installed."""
    processor, flags = processor_of(_read("/proc/cpuinfo"))
    total, available = memory_of(_read("/proc/meminfo"), _read("/sys/fs/cgroup/memory.max"))
    return Machine(
        processor=processor,
        instructions=tuple(name for name in INSTRUCTIONS if name in flags),
        num_cores=len(os.sched_getaffinity(0)),
        num_cores_in_all=os.cpu_count() or 1,
        memory_bytes=total,
        available_bytes=available,
        gpus=_gpus(),
    )


def _read(path: str) -> str:
    """Read a file; "" for a missing one: not every system has all of them."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def processor_name() -> str:
    """Return the processor's name as the kernel gives it."""
    return processor_of(_read("/proc/cpuinfo"))[0]


def processor_of(cpuinfo: str) -> tuple[str, frozenset[str]]:
    """Return a processor's name and its instructions."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, frozenset((fields.get("flags") or fields.get("Features") or "").split())


def memory_of(meminfo: str, limit: str) -> tuple[int, int]:
    """Return the bytes of memory (all, available now), within the control group's limit."""
    fields = {line.partition(":")[0]: line.split() for line in meminfo.splitlines()}
    total, available = (
        int(fields[name][1]) * 1024 if name in fields else 0 for name in ("MemTotal", "MemAvailable")
    )
    bound = int(limit) if limit.strip().isdigit() else total
    return min(total, bound), min(available, bound)


def _gpus() -> tuple[str, ...]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=GPU_QUERY_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return tuple(line.strip() for line in lines if line.strip())
