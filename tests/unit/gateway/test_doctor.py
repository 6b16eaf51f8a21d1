"""What `overture doctor` and `overture kv` make of a machine, its folders and its stores."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from engine_bridge.driver.vllm_api.argument_names import parser_names
from engine_bridge.settings.machine import Machine
from gateway import packages
from gateway.app import say_failure
from gateway.cli import cli, main
from gateway.commands import remedies
from gateway.commands.doctor import _folders, at_start, switched_off
from gateway.commands.remedies import GIB, ModelFacts
from gateway.settings.config import Config
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.records import ALIGNMENT_BYTES
from kvtiers.keys import BlockKey, BlockShape

SIZES = {"num_cores": 2, "num_cores_in_all": 2, "memory_bytes": 16 * GIB, "available_bytes": 8 * GIB}
MACHINE = Machine(processor="Some processor", instructions=("avx2",), gpus=(), **SIZES)


def test_what_settings_turn_off_is_told_with_the_setting() -> None:
    off = {each.what: each.why for each in switched_off(Config(scheduling_policy="vllm", kv_host_gib=0))}
    assert off["scheduling"] == "--scheduling-policy vllm" and off["KV tiers"] == "--kv-host-gib 0"
    assert "short steps" not in off


def test_a_socket_needs_a_folder_that_is_there(tmp_path: Path) -> None:
    for folder, problem in ((tmp_path, ""), (tmp_path / "gone", "it is not there")):
        first, *_ = _folders(Config(uds=folder / "x.sock", data_dir=tmp_path))
        assert (first.flag, first.path, first.problem) == ("--uds", str(folder), problem)


WITH_GPU = msgspec.structs.replace(MACHINE, gpus=("Some GPU, 80 GiB",))
MODEL = ModelFacts(name="./model", is_path=True, is_folder=True, has_config=True, weight_bytes=GIB)


def moved(*, is_vital: bool) -> dict[str, Any]:
    return {"is_vital": is_vital, "moved": [{"name": "vllm.LLMEngine", "problem": "it is gone"}]}


def advice(device: str = "cpu", machine: Machine = MACHINE, model: ModelFacts = MODEL, **gib: float) -> str:
    build = packages.CPU_BUILD
    found = remedies.advice(device, machine, build, model, GIB, gib.get("kv_host_gib", 2.0), is_checkout=True)
    return "\n".join(f"{each.problem}: {each.remedy}" for each in found)


HUB_MODEL = ModelFacts(name="org/model", is_path=False, is_folder=False, has_config=False, weight_bytes=0)


def test_what_cannot_work_is_said_before_the_engine_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And in terms of our flags; the demo model on this machine gets no such words."""
    (hub,) = remedies.about_hub(HUB_MODEL, is_offline=True)
    assert "HF_HUB_OFFLINE" in hub.problem and "--model FOLDER" in hub.remedy
    assert not list(remedies.about_hub(HUB_MODEL, is_offline=False))
    (memory,) = remedies.about_memory("cpu", MACHINE, MODEL, 500 * GIB)
    assert "502.6 GiB" in memory.problem and memory.remedy == "--kv-cache-gib 10.7 at most"
    assert not list(remedies.about_memory("cuda", MACHINE, MODEL, 500 * GIB))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    problems, _ = at_start(Config(model="org/model", device="cpu", data_dir=tmp_path))
    assert [each.problem for each in problems] == [hub.problem]
    (tmp_path / "hub" / "models--org--model").mkdir(parents=True)
    assert at_start(Config(model="org/model", device="cpu", data_dir=tmp_path))[0] == []
    assert at_start(Config(device="cpu", data_dir=tmp_path))[0] == []


def test_an_error_of_the_start_is_followed_by_what_to_do() -> None:
    said = remedies.known_remedy
    assert "--kv-cache-gib" in said(
        "… on kv cache allocation is less than requested memory for kv (500.0 GiB)."
    )
    assert "--model FOLDER" in said("We couldn't connect to 'https://huggingface.co' to load the files")
    assert "/dev/shm" in said("[Errno 28] No space left on device")
    assert "--pids-limit" in said("can't start new thread")
    assert "quantised in another way" in said("Unknown quantization method: bitsandbytes. Must be one of …")
    too_long = "User-specified max_model_len (9) is greater than the derived max_model_len (8)"
    (refused,) = remedies.about_refusal(too_long, "")
    assert refused.remedy == said(too_long) and "--max-model-len" in refused.remedy


def test_only_an_error_that_nothing_is_known_about_is_logged_with_its_traceback(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for text, is_logged, remedy in (
        (
            "(0.02 GiB KV cache is needed, which is larger than the available KV cache memory",
            False,
            "lower --max",
        ),
        ("something that nobody has seen yet", True, "overture doctor"),
    ):
        say_failure(ValueError(text))
        assert bool(caplog.records) is is_logged
        assert text in (said := capsys.readouterr().out) and f"what to do: {remedy}" in said


def test_a_parser_that_vllm_does_not_have_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    """At the start, as vLLM's own server does; where a plugin may bring parsers nothing is known."""
    names = parser_names()
    assert {"hermes", "qwen3_xml"} <= {*names["tool"]} and "deepseek_r1" in names["reasoning"]
    config = Config(device="cpu", data_dir=tmp_path, tool_parser="hermess", reasoning_parser="nope")
    mistyped, other = at_start(config)[0]
    assert (mistyped.problem, mistyped.remedy) == (
        "--tool-parser hermess: vLLM has no such parser",
        "--tool-parser hermes",
    )
    assert "deepseek_r1" in other.remedy and "none" in other.remedy
    for usable in ("auto", "none", "hermes"):
        assert not list(remedies.about_parsers({"tool": usable}, names))
    assert not list(remedies.about_parsers({"tool": "of-a-plugin"}, {}))


def test_a_machine_in_order_gets_no_findings() -> None:
    assert not list(remedies.about_vllm("", [moved(is_vital=False)], "cpu", is_checkout=True))
    assert not list(remedies.about_folder("data folder", "/x", "", "--data-dir"))
    assert not list(remedies.about_device("cuda", WITH_GPU, packages.CUDA_BUILD, 1, is_checkout=True))
    assert not list(remedies.about_model(MODEL))
    assert not list(remedies.about_disk("/x", 9 * GIB, 8.0))
    assert not list(remedies.about_full_disk("/x", 1 * GIB))
    assert advice() == ""


def test_each_fault_is_found_with_a_remedy_that_fits_the_installation() -> None:
    missing, gone = remedies.about_vllm("No module", [moved(is_vital=True)], "cuda", is_checkout=True)
    assert "make venv DEVICE=cuda" in missing.remedy and "make venv DEVICE=cuda" in gone.remedy
    (missing,) = remedies.about_vllm("No module", [], "cpu", is_checkout=False)
    documented = (Path(remedies.__file__).parents[2] / "docs" / "install.md").read_text()
    assert all(step in missing.remedy and f"\n{step}\n" in documented for step in remedies.CPU_STEPS)
    no_gpu, cpu_build = remedies.about_device("cuda", MACHINE, packages.CPU_BUILD, 1, is_checkout=True)
    assert "--device cpu" in no_gpu.remedy and "DEVICE=cuda" in cpu_build.remedy
    assert not list(remedies.about_device("cpu", MACHINE, packages.CPU_BUILD, 1, is_checkout=True))
    (full,) = remedies.about_full_disk("/x", 3 << 20)
    assert "3 MiB free: messages are refused" in full.problem and "--data-dir" in full.remedy
    assert "--kv-host-gib and --kv-cache-gib" in advice(kv_host_gib=16.0)
    assert "--kv-cache-gib" not in advice("cuda", WITH_GPU, kv_host_gib=16.0)


SHAPE = BlockShape(2, 1024)
ABOUT = b'{"model": "a-model", "block_size_tokens": 32}'


def run(folder: Path, *arguments: str) -> str:
    """What `overture kv` says of the stores in a folder."""
    result = CliRunner().invoke(cli, ["kv", *arguments, "--kv-dir", str(folder)])
    assert result.exit_code == 0, result.output
    return result.output


def shown(folder: Path) -> Any:
    return json.loads(run(folder, "show", "--json"))


@contextmanager
def held_store(root: Path, num_blocks: int) -> Iterator[None]:
    """A store of so many blocks, open within the block."""
    with asyncio.Runner() as runner:
        sizes = {"segment_bytes": 3 * ALIGNMENT_BYTES, "describe": ABOUT}
        log = runner.run(DiskLog.open(root / "a-model-0123", "0123", SHAPE, 1 << 20, **sizes))
        for number in range(num_blocks):
            key = BlockKey(bytes([number]) * 32)
            assert runner.run(log.append([key], lambda block, layer: memoryview(bytes(1024))))
        yield
        runner.run(log.close())


def test_prune_deletes_the_oldest_down_to_a_size_but_nothing_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held_store(tmp_path, 6), pytest.raises(SystemExit) as ended:
        main(["kv", "prune", "--all", "--kv-dir", str(tmp_path)])
    assert ended.value.code == 2 and "stop the server" in capsys.readouterr().err
    assert shown(tmp_path)["num_segments"] == 3
    assert "2 files" in run(tmp_path, "prune", "--max-gib", str(4 * ALIGNMENT_BYTES / GIB))
    assert shown(tmp_path)["num_blocks"] == 2
    assert "1 files" in run(tmp_path, "prune", "--all")
    assert shown(tmp_path)["bytes"] == 0
