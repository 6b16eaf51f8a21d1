"""`overture doctor`: whether this machine can serve, and what the server would do without."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

if TYPE_CHECKING:
    from gateway.commands.doctor import Diagnosis
    from gateway.commands.remedies import DoctorFinding
    from gateway.settings.config import Config

EXIT_CANNOT_SERVE = 1
GIB = 1 << 30


def doctor(config: Config, vllm_source: Path | None, as_json: bool, is_long: bool) -> int:
    """Run the checks, print them, and return an exit code that says whether the server can serve."""
    from gateway.commands.doctor import examine

    found = examine(config, vllm_source)
    if as_json:
        click.echo(json.dumps({"can_serve": found.can_serve, **msgspec.to_builtins(found)}))
    else:
        click.echo("\n".join(lines(found, is_long=is_long)))
    return 0 if found.can_serve else EXIT_CANNOT_SERVE


def lines(found: Diagnosis, *, is_long: bool) -> Iterator[str]:
    """Return the lines of the summary. is_long: include the names of vLLM that are as expected."""
    yield from _machine(found)
    yield ""
    yield from _vllm(found, is_long)
    yield ""
    yield from _profiles(found)
    yield ""
    yield "off" if found.off else "off: nothing"
    yield from (f"  {each.what}: {each.why}" for each in found.off)
    yield ""
    yield "folders"
    for folder in found.folders:
        state = folder.problem or ("writable" if folder.is_there else "will be made")
        yield f"  {folder.what} {folder.path}: {state}, {folder.free_bytes / GIB:.1f} GiB free on its disk"
    yield ""
    if found.advice:
        yield "worth knowing"
        yield from findings(found.advice)
        yield ""
    yield "This machine can serve." if found.can_serve else "This machine cannot serve:"
    yield from findings(found.problems)


def findings(found: Sequence[DoctorFinding]) -> Iterator[str]:
    """Return the lines that tell of findings."""
    for each in found:
        yield f"  {each.problem}"
        yield f"    what to do: {each.remedy}"


def _machine(found: Diagnosis) -> Iterator[str]:
    machine = found.machine
    yield "machine"
    yield f"  {machine.processor}, {machine.num_cores} of {machine.num_cores_in_all} cores"
    yield f"  instructions: {' '.join(machine.instructions) or 'none that kernels ask for'}"
    yield f"  memory: {machine.memory_bytes / GIB:.1f} GiB, {machine.available_bytes / GIB:.1f} GiB of it available"
    yield f"  GPU: {'; '.join(machine.gpus) or 'none'}"
    yield f"  device to serve on: {found.device}"
    yield ""
    yield "versions"
    yield from (f"  {name} {number}" for name, number in found.versions.items())


def _vllm(found: Diagnosis, is_long: bool) -> Iterator[str]:
    num_names = sum(each["num_names"] for each in found.features)
    num_moved = sum(len(each["moved"]) for each in found.features)
    yield f"vLLM {found.vllm}: {num_names} names are used, {num_moved or 'none'} of them moved"
    for each in found.features:
        if is_long or each["moved"]:
            yield from _feature(each, found.device)


def _feature(feature: dict[str, Any], device: str) -> Iterator[str]:
    moved = feature["moved"]
    is_elsewhere = feature["device"] not in (None, device)
    where = f" (on {feature['device']} only)" if is_elsewhere else ""
    yield f"  {feature['feature']}{where}: {feature['num_names']} names, {len(moved) or 'none'} moved"
    yield from (f"    {each['name']}: {each['problem']}" for each in moved)
    if moved and not is_elsewhere:
        yield f"    so {feature['without']}"


def _profiles(found: Diagnosis) -> Iterator[str]:
    if not found.profiles:
        yield f"profile: none of {found.model}; `overture profile` measures one, and until then times are learned from real steps"
        return
    yield f"profiles of {found.model}"
    for each in found.profiles:
        threads = f", {each.num_threads} threads" if each.num_threads else ""
        yield f"  {each.summary}: {each.dtype} on {each.device}{threads}, vLLM {each.vllm_version}"
        yield f"    {each.file}" + (f"; not used: {each.mismatch}" if each.mismatch else "")
