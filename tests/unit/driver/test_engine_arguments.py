import contextlib
import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_bridge.driver.engine import building
from engine_bridge.driver.engine.building import engine_args
from engine_bridge.driver.engine.engine_arguments import typed
from engine_bridge.driver.engine.model_facts import configuration_of, missing_operation, told
from engine_bridge.driver.engine.thinking import reasoning_config
from engine_bridge.driver.vllm_api.argument_names import engine_arguments
from engine_bridge.policy.limits.model_support import UnusableModel
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.settings.engine_arguments import parse, without_effect
from engine_bridge.settings.engine_config import EngineConfig
from gateway.settings.config import DEMO_MODEL_DIR, SETTINGS
from gateway.settings.vllm_flags import FURTHER, FlagRefusal, translate


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads what it could not read once more, two seconds later."""
    from vllm.transformers_utils import repo_utils

    monkeypatch.setattr(repo_utils, "time", SimpleNamespace(sleep=lambda _: None))


def demo(**settings: Any) -> EngineConfig:
    """The settings of an engine with the demo model."""
    return EngineConfig(
        **{"model": str(DEMO_MODEL_DIR), "served_model_name": "demo", "device": "cpu"} | settings
    )


def test_every_flag_of_vllm_serve_is_taken_or_refused_with_a_reason() -> None:
    """`--config` and the help are each program's own."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    own = {setting.flag for setting in SETTINGS} | {
        f"--no-{setting.name.replace('_', '-')}" for setting in SETTINGS
    }
    known, unknown = own | {"--engine-arg", "--config", "--help", "-h", *FURTHER.values()}, []
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        for flag in action.option_strings:
            line = [flag] if action.nargs == 0 else [flag, '{"image": 1}' if "limit-mm" in flag else "1"]
            with contextlib.suppress(FlagRefusal):
                unknown += [
                    word
                    for word in translate(line, own, engine_arguments)
                    if word.startswith("-") and word.partition("=")[0] not in known
                ]
    assert not unknown


def test_values_have_the_types_that_vllm_gives_them() -> None:
    given = ["cpu-offload-gb=4", 'hf_overrides={"a": 1}', "disable_cascade_attn=true", "enable-eplb=0"]
    found = {"cpu_offload_gb": 4.0, "hf_overrides": {"a": 1}}
    found |= {"disable_cascade_attn": True, "enable_eplb": False}
    assert typed(parse([*given, "load_format=dummy"], {})) == found | {"load_format": "dummy"}
    several = {"cudagraph_capture_sizes": "[1, 2]", "ignore_patterns": '["a", "b"]', "hf_token": "true"}
    assert typed(several) == {
        "cudagraph_capture_sizes": [1, 2],
        "ignore_patterns": ["a", "b"],
        "hf_token": True,
    }
    assert (
        typed({"device_ids": "2,3"}) == {"device_ids": [2, 3]} and engine_arguments()["device_ids"] == "value"
    )
    assert typed({"hf_token": "hf_abc", "ignore_patterns": "a"}) == {
        "hf_token": "hf_abc",
        "ignore_patterns": ["a"],
    }
    wrong = {"cpu_offload_gb": "much", "cpu_offload": "4", "enable_eplb": "perhaps"}
    for name, reason in zip(wrong, ("much", "did you mean cpu_offload_gb", "true or false"), strict=True):
        with pytest.raises(InvalidRequest, match=reason):
            typed({name: wrong[name]})
    assert typed({}) == {}


def test_a_kv_cache_has_the_size_that_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of the environment goes before what vLLM is told, on a CPU."""
    for device, settings, num_bytes in (
        ("cpu", {"kv_cache_gib": 0.125}, 2**27),
        ("cpu", {"kv_cache_gib": 1.5}, 3 * 2**29),
        ("cpu", {}, 2**30),
        ("cuda", {"kv_cache_gib": 2.5}, 5 * 2**29),
        ("cuda", {}, None),  # what its share of memory leaves
    ):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        config = demo(device=device, **settings)
        assert engine_args(config, None).kv_cache_memory_bytes == num_bytes
        assert ("VLLM_CPU_KVCACHE_SPACE" in os.environ) == (device == "cuda" or not settings)


def test_vllm_leaves_stop_strings_and_bad_words_to_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(building, "_set", {})
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setitem(sys.modules, "ray", None)  # as it does itself
    building.configure_environment(demo())
    monkeypatch.undo()
    for name in ("VLLM_MAX_STOP_STRINGS", "VLLM_MAX_NUM_BAD_WORDS"):
        assert int(environment[name]) > 1024


def test_what_the_environment_says_for_vllms_own_processes_is_not_for_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_MEDIA_CONNECTOR": "http", "VLLM_PORT": "1"}
    monkeypatch.setattr(building, "_set", {})
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setitem(sys.modules, "ray", None)
    building.configure_environment(demo())
    monkeypatch.undo()
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_MEDIA_CONNECTOR"] == "given" and environment["VLLM_PORT"] == "1"


@pytest.mark.parametrize(
    ("settings", "is_here"),
    [
        ({}, True),
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}, True),
        ({"speculative_config": f'{{"model": "{DEMO_MODEL_DIR}"}}'}, True),
        ({"speculative_config": '{"model": "someone/drafts"}'}, False),
        ({"engine_args": ("tokenizer=someone/tokenizer",)}, False),
        ({"model": "someone/model"}, False),
        ({"lora_modules": ("mine=someone/adapter",)}, False),
        ({"lora_modules": (f"mine={DEMO_MODEL_DIR.parent / 'adapters' / 'pirate'}",)}, True),
    ],
)
def test_a_hub_is_asked_where_not_all_of_a_model_is_a_folder(settings: Any, is_here: bool) -> None:
    """With a model of this machine and drafts of a hub's the start ended: the hub was never asked."""
    assert demo(**settings).is_all_here is is_here


def test_on_a_gpu_vllm_chooses_how_many_requests_a_batch_holds() -> None:
    for device, wished, batch, sure in (
        ("cpu", None, 64, 64),
        ("cpu", 5, 5, 5),
        ("cuda", None, None, 256),  # 256 to 1,024, by the GPU's memory
        ("cuda", 700, 700, 700),
    ):
        config = demo(device=device, max_num_seqs=wished)
        args = engine_args(config, None)
        assert args.max_num_seqs == batch
        assert config.grammar_bytes == max(1 << 30, sure * (16 << 20))
        assert args.max_loras == (max(8, sure) if device == "cpu" else 8)


@pytest.mark.parametrize(
    ("device", "of_user", "wanted"),
    [("cuda", None, "/data/kernels"), ("cuda", "/mine", "/mine"), ("cpu", None, None)],
)
def test_a_gpus_kernels_are_kept_in_the_data_folder_unless_the_user_says_where(
    monkeypatch: pytest.MonkeyPatch, device: Any, of_user: str | None, wanted: str | None
) -> None:
    environment = {} if of_user is None else {"TRITON_CACHE_DIR": of_user}
    monkeypatch.setattr(building.os, "environ", environment)
    config = EngineConfig(model="m", served_model_name="m", device=device, kernel_cache=Path("/data/kernels"))
    building.configure_environment(config)
    assert environment.get("TRITON_CACHE_DIR") == wanted


@pytest.mark.parametrize(
    ("has_nvcc", "has_ninja", "has_kernels", "of_user", "wanted"),
    [
        (False, True, False, None, "0"),
        (True, False, False, None, "0"),
        (True, True, False, None, None),
        (False, False, True, None, None),
        (False, False, False, "1", "1"),
    ],
)
def test_without_a_compiler_a_gpu_samples_by_kernels_that_need_none(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_nvcc: bool,
    has_ninja: bool,
    has_kernels: bool,
    of_user: str | None,
    wanted: str | None,
) -> None:
    """FlashInfer compiles its kernels when they are first asked for: without nvcc, or without ninja, the start failed."""
    ours = tmp_path / "venv" / "bin"
    for program, is_there in ((tmp_path / "cuda/bin/nvcc", has_nvcc), (ours / "ninja", has_ninja)):
        program.parent.mkdir(parents=True)
        if is_there:
            program.touch(0o755)
    environment = {"CUDA_HOME": str(tmp_path / "cuda"), "PATH": "/nowhere"}
    environment |= {} if of_user is None else {"VLLM_USE_FLASHINFER_SAMPLER": of_user}
    monkeypatch.setattr(building.os, "environ", environment)
    monkeypatch.setattr(building.sys, "executable", str(ours / "python"))
    monkeypatch.setattr(building, "find_spec", lambda name: object() if has_kernels else None)
    building.configure_environment(demo(device="cuda"))
    assert environment.get("VLLM_USE_FLASHINFER_SAMPLER") == wanted
    assert environment["PATH"] == f"/nowhere{os.pathsep}{ours}"


def test_steps_are_scheduled_ahead_as_vllm_would_unless_the_device_rules_it_out() -> None:
    def given(device: str, *arguments: str) -> bool | None:
        config = demo(device=device, engine_args=arguments)
        asked: bool | None = engine_args(config, None).async_scheduling
        return asked

    assert given("cuda") is None  # vLLM's own choice
    assert given("cuda", "async-scheduling=true") is True
    assert given("cuda", "async_scheduling=false") is False
    assert given("cpu", "async-scheduling=true") is given("cpu", "async_scheduling=false") is None
    assert list(without_effect({"async_scheduling": "true", "seed": "1"}, "cpu")) == ["async_scheduling"]
    assert without_effect({"async_scheduling": "true"}, "cuda") == {}


def test_what_the_server_has_in_another_form_is_left_out_with_the_reason_or_without_one_where_it_is_so() -> (
    None
):
    given = {"data_parallel_size": "2", "kv_events_config": "{}", "use_tqdm_on_load": "false", "nnodes": "1"}
    found = without_effect(given, "cuda")
    assert found["data_parallel_size"].startswith("one engine") and found["kv_events_config"]
    assert found["use_tqdm_on_load"] == found["nnodes"] == ""
    assert without_effect({"enable_lora": "true"}, "cuda") == {"enable_lora": ""}
    assert "--adapters" in without_effect({"enable_lora": "false"}, "cuda")["enable_lora"]
    # vLLM's engine ended the start with it: the log is not its to set up.
    assert without_effect({"log_config_file": "log.json"}, "cpu")["log_config_file"]
    args = engine_args(demo(engine_args=tuple(f"{name}={value}" for name, value in given.items())), None)
    assert args.data_parallel_size == 1


def test_a_number_of_blocks_and_the_form_of_structured_outputs_are_vllms_to_take() -> None:
    config = '{"backend": "xgrammar", "disable_additional_properties": false}'
    given = ("num_gpu_blocks_override=64", f"structured_outputs_config={config}", "runner=generate")
    args = engine_args(demo(engine_args=given), None)
    assert args.num_gpu_blocks_override == 64 and args.runner == "generate"
    outputs = args.structured_outputs_config
    assert outputs.backend == "guidance" and not outputs.disable_any_whitespace
    assert engine_args(demo(), None).structured_outputs_config.disable_any_whitespace


def test_a_model_that_this_machine_has_not_seen_is_looked_at_without_another_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM writes down what it finds, as ever."""
    registry = importlib.import_module("vllm.model_executor.models.registry")
    monkeypatch.setattr(registry, "_run_in_subprocess", None)
    monkeypatch.setattr(registry.envs, "VLLM_CACHE_ROOT", str(tmp_path))
    engine_args(demo(), None)
    assert registry.ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls().is_text_generation_model
    assert len(list((tmp_path / "modelinfos").iterdir())) == 1


def test_a_model_that_cannot_be_split_so_is_refused_with_what_helps() -> None:
    config = demo(tensor_parallel_size=3)
    with pytest.raises(
        UnusableModel, match=r"attention heads .* Choose a --tensor-parallel-size that divides it"
    ):
        configuration_of(engine_args(config, None))


@pytest.mark.parametrize("drafts", [None, '{"method": "ngram", "num_speculative_tokens": 3}'])
def test_experts_that_a_model_lacks_are_refused_with_what_helps(drafts: str | None) -> None:
    config = demo(tensor_parallel_size=2, enable_expert_parallel=True, speculative_config=drafts)
    with pytest.raises(UnusableModel, match="this model has none") as refused:
        configuration_of(engine_args(config, None))
    assert refused.value.remedy == "Take away --enable-expert-parallel"


@pytest.mark.parametrize(
    ("drafts", "why"),
    [
        ({"method": "mtp", "num_speculative_tokens": 3}, "Unsupported speculative method: 'mtp'"),
        (
            {"method": "draft_model", "model": "/nowhere/at/all", "num_speculative_tokens": 3},
            "/nowhere/at/all",
        ),
    ],
)
def test_drafts_that_a_model_cannot_have_are_refused_with_what_helps(drafts: Any, why: str) -> None:
    config = demo(speculative_config=json.dumps(drafts))
    with pytest.raises(UnusableModel, match=why) as refused:
        configuration_of(engine_args(config, None))
    assert "--speculative-config" in refused.value.remedy
    assert told(config) == {"why": refused.value.why, "remedy": refused.value.remedy}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification generates no text",
        ),
        ({"num_hidden_layers": "four"}, "num_hidden_layers"),
        ({"model_type": "odd", "architectures": ["OddForCausalLM"]}, "odd"),
        ({"model_type": "xglm", "architectures": ["XGLMForCausalLM"]}, "XGLMForCausalLM"),
    ],
)
def test_the_doctor_is_told_why_a_model_cannot_be_served(
    tmp_path: Path, changed: dict[str, Any], why: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    assert "left_out" in told(demo(model=str(folder)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    found = told(demo(model=str(folder)))["why"]
    assert why in found and "Supported architectures" not in found


@pytest.mark.parametrize(
    ("module", "name", "needs"),
    [
        ("jamba", "JambaForCausalLM", "selective_scan_fwd"),
        ("mamba", "MambaForCausalLM", "selective_scan_fwd"),
        ("mamba2", "Mamba2ForCausalLM", ""),
        ("llama", "LlamaForCausalLM", ""),
    ],
)
def test_a_model_tells_by_its_layers_which_operation_the_build_lacks(
    module: str, name: str, needs: str
) -> None:
    from vllm import _custom_ops

    found = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    is_there = hasattr(_custom_ops.torch.ops._C, needs) if needs else True
    assert missing_operation(found) == ("" if is_there else needs)


def test_what_cannot_be_set_is_refused_with_the_reason() -> None:
    for pairs, reason in (
        (["seed"], "NAME=VALUE"),
        (["=4"], "NAME=VALUE"),
        (["seed=4"], "--seed"),
        (["runner=pooling"], "runner cannot be set here"),
    ):
        with pytest.raises(ValueError, match=reason):
            parse(pairs, {"seed": "--seed"})


def test_the_words_that_end_a_thought_may_be_the_operators_own() -> None:
    """They were replaced by the parser's."""
    words = {"reasoning_start_str": "Let me see.", "reasoning_end_str": "That is enough."}
    args = engine_args(demo(engine_args=(f"reasoning_config={json.dumps(words)}",)), None)
    for wished in ("none", "qwen3"):
        found = reasoning_config(args, wished, None)
        assert found is not None and found.reasoning_end_str == "That is enough."
    assert reasoning_config(engine_args(demo(), None), "none", None) is None


def test_a_batch_holds_no_more_requests_than_a_step_computes_tokens() -> None:
    """vLLM refuses that, where both are set."""
    assert demo(max_num_batched_tokens=32).batch_seqs == 32
    assert demo(max_num_batched_tokens=4096).batch_seqs == 64
    assert demo(max_num_batched_tokens=32, max_num_seqs=64).batch_seqs == 64


def test_of_an_argument_that_is_given_twice_the_last_one_counts() -> None:
    assert parse(["cpu_offload_gb=4", "cpu-offload-gb=5"], {}) == {"cpu_offload_gb": "5"}
