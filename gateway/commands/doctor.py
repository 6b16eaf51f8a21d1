"""The checks of `overture doctor`, which start no engine."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from engine_bridge.driver.vllm_api.argument_names import parser_names
from engine_bridge.settings.engine_arguments import named
from engine_bridge.settings.engine_config import kv_cache_bytes
from engine_bridge.settings.machine import Machine, look
from engine_bridge.settings.profile import MachineProfile
from gateway.commands import remedies
from gateway.commands.remedies import DoctorFinding, ModelFacts
from gateway.packages import installed, vllm
from gateway.settings.config import PROJECT_ROOT, Config
from gateway.settings.model_files import description_of, fault_of, weight_bytes_of
from kvtiers.weights import folder_revision
from overture_client import __version__

# Importing vLLM takes seconds, on a machine with a slow disk a minute or two the first time. Chosen.
IMPORT_S = 300.0
GIB = 1 << 30
IS_CHECKOUT = (PROJECT_ROOT / "Makefile").is_file()

# What settings turn off, as it is called, and by what.
_SWITCHES: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
    ("KV tiers", lambda config: config.kv_host_gib == 0, "--kv-host-gib 0"),
    ("KV on disk", lambda config: config.kv_disk_gib == 0, "--kv-disk-gib 0"),
    ("scheduling", lambda config: config.scheduling_policy == "vllm", "--scheduling-policy vllm"),
    ("short steps", lambda config: config.max_step_ms == 0, "--max-step-ms 0"),
    ("adapters in KV blocks", lambda config: not config.adapters_in_kv, "--no-adapters-in-kv"),
    (
        "adapters in KV blocks, computing with adapters on their way",
        lambda config: config.tensor_parallel_size > 1,
        "the model is split over several devices (--tensor-parallel-size)",
    ),
    (
        "learned advisories",
        lambda config: not config.learned_advisories,
        "it is off unless --learned-advisories is given",
    ),
    ("embeddings", lambda config: config.embedding_model is None, "no --embedding-model is given"),
    (
        "scores of texts",
        lambda config: config.rerank_model is None and config.embedding_model is None,
        "no --rerank-model is given",
    ),
    ("drafts", lambda config: not config.draft_prefill, "it is off unless --draft-prefill is given"),
)


class FolderHealth(Struct, frozen=True, kw_only=True):
    """A folder that the server writes to.

    flag: the setting that names it. problem: why it cannot be written; "" if it can. free_bytes: on its disk.
    """

    what: str
    flag: str
    path: str
    is_there: bool
    problem: str
    free_bytes: int


class FoundProfile(Struct, frozen=True, kw_only=True):
    """A measurement of this model.

    mismatch: why the server will not use it, as far as that is known without an engine; "" if it will.
    """

    file: str
    summary: str
    device: str
    num_threads: int
    dtype: str
    vllm_version: str
    mismatch: str


class Off(Struct, frozen=True):
    """A feature that the server will do without, and why."""

    what: str
    why: str


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The result of all checks.

    problems: why the server cannot serve; advice: what to know before the start; each with its remedy. features: of `vllm_api`, as JSON;
    vllm: the version of vLLM that has them.
    """

    device: str
    model: str
    machine: Machine
    versions: dict[str, str]
    vllm: str
    features: list[dict[str, Any]]
    profiles: list[FoundProfile]
    off: list[Off]
    folders: list[FolderHealth]
    problems: list[DoctorFinding]
    advice: list[DoctorFinding]

    @property
    def can_serve(self) -> bool:
        """Whether nothing keeps the server from serving."""
        return not self.problems


def examine(config: Config, vllm_source: Path | None = None) -> Diagnosis:
    """Run all checks, which takes seconds. `vllm_source`: a folder or wheel to check by its source in place of the installed vLLM."""
    device = config.device if config.device != "auto" else _detected_device()
    machine, versions = look(), _versions()
    model = model_facts(config)
    features, answer, failure = _ask_vllm(vllm_source, config if model.has_config else None)
    left_out: dict[str, str] = answer.get("left_out", {})
    matter = [
        each for each in features if each["at_start"] and each["device"] in (None, device) and each["moved"]
    ]
    build = _vllm_build()
    folders = list(_folders(config))
    problems = [
        *remedies.about_vllm(failure, matter, device, is_checkout=IS_CHECKOUT),
        *remedies.about_device(device, machine, build, config.tensor_parallel_size, is_checkout=IS_CHECKOUT),
        *remedies.about_parsers(_parsers(config), parser_names()),
        *remedies.about_model(model),
        *remedies.about_memory(device, machine, model, kv_cache_bytes(config.kv_cache_gib, device) or 0),
        *remedies.about_refusal(answer.get("why", ""), answer.get("remedy", "")),
        *remedies.about_adapters(
            left_out.get("adapters", ""), is_asked=bool(config.adapters == "on" or config.lora_modules)
        ),
    ]
    for each in folders:
        problems += remedies.about_folder(each.what, each.path, each.problem, each.flag)
    return Diagnosis(
        device=device,
        model=config.model,
        machine=machine,
        versions=versions,
        vllm=str(vllm_source) if vllm_source is not None else versions["vllm"],
        features=features,
        profiles=list(profiles_of(config, versions["vllm"])),
        off=[*_moved_away(matter), *switched_off(config), *(Off(*each) for each in left_out.items())],
        folders=folders,
        problems=problems,
        advice=[
            *remedies.advice(
                device,
                machine,
                build,
                model,
                kv_cache_bytes(config.kv_cache_gib, device) or 0,
                config.kv_host_gib,
                is_checkout=IS_CHECKOUT,
            ),
            *_about_disk(config, folders),
        ],
    )


def at_start(config: Config) -> tuple[list[DoctorFinding], list[DoctorFinding]]:
    """Return what keeps a server from starting, and what to know first, as far as it is found within a second: without vLLM.

    Of a cluster only its folders are checked here: other machines have its devices.
    """
    problems = [
        finding
        for each in _folders(config)
        for finding in remedies.about_folder(each.what, each.path, each.problem, each.flag)
    ]
    if config.is_cluster:
        return problems, []
    device = config.device if config.device != "auto" else _detected_device()
    machine, build, model = look(), _vllm_build(), model_facts(config)
    kv_bytes = kv_cache_bytes(config.kv_cache_gib, device) or 0
    is_offline = any(
        os.environ.get(name, "") not in ("", "0") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    problems += [
        *remedies.about_device(device, machine, build, config.tensor_parallel_size, is_checkout=IS_CHECKOUT),
        *remedies.about_parsers(_parsers(config), parser_names()),
        *remedies.about_model(model),
        *remedies.about_hub(model, is_offline=is_offline),
        *remedies.about_memory(device, machine, model, kv_bytes),
    ]
    known = (device, machine, build, model, kv_bytes, config.kv_host_gib)
    return problems, list(remedies.advice(*known, is_checkout=IS_CHECKOUT))


def _parsers(config: Config) -> dict[str, str]:
    """Return the parsers that were set, of which vLLM has each; none with a plugin, which may bring any."""
    return {} if config.parser_plugins else {"tool": config.tool_parser, "reasoning": config.reasoning_parser}


def _detected_device() -> str:
    from gateway.app import detect_device

    return detect_device()


def _vllm_build() -> str:
    """Return the name of the installed package of vLLM; "" if there is none."""
    return found.package if (found := vllm()) is not None else ""


def _versions() -> dict[str, str]:
    packages = {"vllm": vllm(), **{name: installed(name) for name in ("torch", "transformers")}}
    found = {name: str(package or "not installed") for name, package in packages.items()}
    return {"overture": __version__, "python": platform.python_version(), **found}


# -- vLLM --------------------------------------------------------------------------------------------------------------


def _ask_vllm(source: Path | None, config: Config | None) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Ask vLLM, in a separate process, so that an import that crashes ends only that process.

    Args:
        source: where vLLM lies; None for the installed one.
        config: whose model the installed one is asked about; None for no model.

    Returns:
        The inventory's features, what the model cannot have, and why the features could not be checked. Nothing about the model where asking for
        it failed: the server's start would say better why.
    """
    command, settings = [sys.executable, "-m", "engine_bridge.driver.vllm_api"], b""
    if source is not None:
        command += ["--source", str(source)]
    elif config is not None:
        from gateway.app import engine_config

        command += ["--model"]
        settings = msgspec.json.encode(engine_config(config), enc_hook=str)  # paths
    try:
        done = subprocess.run(
            command,
            input=settings,
            capture_output=True,
            timeout=IMPORT_S,
            env=_quiet_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [], {}, f"vLLM could not be imported within {IMPORT_S:.0f} s"
    said = done.stdout.splitlines()
    features: list[dict[str, Any]] = next((json.loads(line) for line in said if line.startswith(b"[{")), [])
    if features:
        return features, next((json.loads(line) for line in said if line.startswith(b"{")), {}), ""
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    reason = lines[-1] if lines else f"exit status {done.returncode}"
    return [], {}, f"vLLM could not be checked: {reason}"


def _quiet_environment() -> Mapping[str, str]:
    return {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"} | dict(os.environ)


def _moved_away(features: list[dict[str, Any]]) -> Iterator[Off]:
    for each in features:
        names = ", ".join(moved["name"] for moved in each["moved"])
        yield Off(each["feature"], f"vLLM has moved ({names}): {each['without']}")


def switched_off(config: Config) -> Iterator[Off]:
    """Return the features that these settings turn off, each with the reason."""
    for what, is_off, why in _SWITCHES:
        if is_off(config):
            yield Off(what, why)


# -- the disk ----------------------------------------------------------------------------------------------------------


def profiles_of(config: Config, vllm: str) -> Iterator[FoundProfile]:
    """Return the measurements of this model, on whatever machine they were made."""
    folder = Path(config.model)
    is_folder = folder.is_dir()
    name, revision = folder.resolve().name if is_folder else config.model, ""
    for path in sorted(config.profile_dir.glob("*.json")) if os.path.isdir(config.profile_dir) else ():
        profile = MachineProfile.load(config.profile_dir, path.stem)
        if profile is None or profile.subject.model != name:
            continue
        subject = profile.subject
        mismatch = ""
        if is_folder:
            revision = revision or folder_revision(folder, config.weights_memory)
        if is_folder and subject.revision != revision:
            mismatch = "it is of other weights"
        elif subject.vllm_version.partition("+")[0] != vllm.partition(" ")[0].partition("+")[0]:
            mismatch = "it is of another release of vLLM"
        yield FoundProfile(
            file=path.name,
            summary=profile.summary,
            device=subject.device,
            num_threads=subject.num_threads,
            dtype=subject.dtype,
            vllm_version=subject.vllm_version,
            mismatch=mismatch,
        )


def _folders(config: Config) -> Iterator[FolderHealth]:
    if config.uds is not None:
        found = folder_health("folder of the socket", config.uds.parent, "--uds")
        yield found if found.is_there else msgspec.structs.replace(found, problem="it is not there")
    yield folder_health("data folder", config.data_dir, "--data-dir")
    if config.kv_dir is not None and _keeps_kv_on_disk(config):
        yield folder_health("folder of KV", config.kv_dir, "--kv-dir")


def _keeps_kv_on_disk(config: Config) -> bool:
    return bool(config.kv_disk_gib and config.kv_host_gib)


def _about_disk(config: Config, folders: list[FolderHealth]) -> Iterator[DoctorFinding]:
    """Check the disk of the data folder, and that of the last folder, which holds the KV: the KV folder or else the data folder."""
    for folder in folders:
        if folder.flag == "--data-dir" and not folder.problem:
            yield from remedies.about_full_disk(folder.path, folder.free_bytes)
    if _keeps_kv_on_disk(config) and not folders[-1].problem:
        yield from remedies.about_disk(folders[-1].path, folders[-1].free_bytes, config.kv_disk_gib)


def model_facts(config: Config) -> ModelFacts:
    """Return the facts about the model that its files tell without reading the weights."""
    folder = Path(config.model).expanduser()
    is_folder = os.path.isdir(folder)
    given = named(config.engine_args)
    has_config = description_of(folder) is not None or "hf_config_path" in given
    has = {"has_weights": "load_format" not in given, "has_tokenizer": "tokenizer" not in given}
    return ModelFacts(
        name=config.model,
        is_path=is_folder or config.model.startswith(("/", ".", "~")),
        is_folder=is_folder,
        has_config=has_config,
        fault=fault_of(folder, **has) if has_config else "",
        weight_bytes=weight_bytes_of(folder) if is_folder else 0,
        is_cached=(_hub_cache() / f"models--{config.model.replace('/', '--')}").is_dir(),
    )


def _hub_cache() -> Path:
    """Return where Hugging Face's library keeps models. Source: its documentation of environment variables."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def folder_health(what: str, folder: Path, flag: str) -> FolderHealth:
    """Check an existing folder, or the one in which it will be made. Leaves nothing behind."""
    is_there = os.path.isdir(folder)
    nearest = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    problem = ""
    try:
        folder.exists()  # raises where there can be no such folder, or one above it may not be searched
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".doctor-"):
            pass
    except OSError as error:
        problem = f"nothing can be written there ({error.strerror})"
    free_bytes = shutil.disk_usage(nearest).free
    return FolderHealth(
        what=what, flag=flag, path=str(folder), is_there=is_there, problem=problem, free_bytes=free_bytes
    )
