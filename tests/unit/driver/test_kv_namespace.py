import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_bridge.driver.engine.building import engine_args
from engine_bridge.driver.in_process import know_weights, revision_of
from engine_bridge.driver.kv import kv_namespace
from engine_bridge.driver.kv.kv_namespace import _computation, _hash_algorithm, arguments_that_count
from engine_bridge.driver.kv.kv_tiers import tell_of_other_stores
from engine_bridge.settings.engine_config import EngineConfig
from gateway.settings.config import DEMO_MODEL_DIR


def config_of(*arguments: str, **settings: Any) -> EngineConfig:
    return EngineConfig(
        **{"model": str(DEMO_MODEL_DIR), "served_model_name": "demo", "dtype": "float32"} | settings,
        engine_args=arguments,
    )


def counting(*arguments: str, environ: Mapping[str, str] | None = None, **settings: Any) -> dict[str, Any]:
    return arguments_that_count(engine_args(config_of(*arguments, **settings), None), environ or {})


SIZES = {"max_num_seqs": 3, "max_num_batched_tokens": 512, "kv_cache_gib": 0.05}
OTHERS = {"served_model_name": "other", "seed": 9, "enable_lora": False, "gpu_memory_utilization": 0.5}


def test_sizes_names_and_logging_change_no_key() -> None:
    environ = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_PORT": "9", "VLLM_IMAGE_TAG": "x", "HOME": "/root"}
    arguments = ("disable_log_stats=true", "max_logprobs=7", "generation_config=vllm")
    assert counting() == counting(*arguments, **SIZES, **OTHERS, environ=environ)


def test_a_context_that_is_fitted_to_the_memory_shares_no_kv_with_one_that_was_said() -> None:
    """Some layers choose their positions by the longest context, before it is fitted."""
    assert engine_args(config_of(max_model_len="auto"), None).max_model_len == -1
    assert counting(max_model_len="auto") != counting(max_model_len=256) == counting()


ROPE = 'hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}'
# Where a container service has put others, and what vLLM itself sets while it builds an engine: a node that is started from a process with an engine
# has these in its environment.
HARMLESS = """
    VLLM_SERVICE_HOST VLLM_SERVICE_PORT VLLM_WEB_SERVICE_PORT_HTTP VLLM_PORT VLLM_WEB_PORT VLLM_WEB_PORT_8000_TCP VLLM_PORT_8000_TCP_ADDR
    VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_SSM_CONV_STATE_LAYOUT
"""


COUNTING = (
    ROPE, "disable_sliding_window=true", "attention_backend=CPU_ATTN", "model_impl=transformers", "code_revision=abc",
    'mm_processor_kwargs={"size": 3}', 'compilation_config={"mode": 0}', 'additional_config={"anything": 1}',
)  # fmt: skip
VARIABLES = "VLLM_BATCH_INVARIANT VLLM_NEW_KERNEL ONEDNN_DEFAULT_FPMATH_MODE NVIDIA_TF32_OVERRIDE"


def test_any_other_argument_or_variable_makes_other_keys() -> None:
    usual = counting()
    assert usual not in [counting(argument) for argument in COUNTING]
    for name in VARIABLES.split():
        assert counting(environ={name: "1"}) not in (usual, counting(environ={name: "2"}))
    assert counting(environ=dict.fromkeys(HARMLESS.split(), "tcp://10.0.3.7:8000")) == usual


def test_an_argument_that_is_new_makes_other_keys_where_it_is_given() -> None:
    @dataclasses.dataclass
    class Newer:
        model: str = ""
        rotates_twice: bool = False
        modes: list[str] = dataclasses.field(default_factory=lambda: ["a"])

    for given in ({}, {"rotates_twice": True}, {"modes": ["a", "b"]}):
        assert arguments_that_count(Newer("m", **given), {}) == given


def test_a_file_counts_by_what_is_in_it(tmp_path: Path) -> None:
    one, same = tmp_path / "one.json", tmp_path / "same.json"
    one.write_text("[1]")
    same.write_text("[1]")
    argument = 'additional_config={"scales": "%s"}'
    before = counting(argument % one)
    assert before == counting(argument % same)
    one.write_text("[2]")
    assert before != counting(argument % one)


def test_what_is_called_harmless_is_vllms_own() -> None:
    """A name that vLLM has dropped or renamed is none to rely on."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.envs import environment_variables

    assert {each.name for each in dataclasses.fields(EngineArgs)} >= kv_namespace.HARMLESS_ARGUMENTS
    # Set beside vLLM's list: where its own processes meet, and what its images say of their making.
    assert kv_namespace.HARMLESS_VARIABLES - environment_variables.keys() <= {"VLLM_DIST_IDENT"}


def test_the_model_counts_as_it_was_resolved() -> None:
    """Whether an override, the file or a longer context has made it what it is."""

    def computation(*arguments: str, **settings: Any) -> str:
        return _computation(engine_args(config_of(*arguments, **settings), None).create_engine_config(), {})

    usual = computation()
    assert usual == computation(max_num_seqs=3, served_model_name="other", max_num_batched_tokens=4096)
    norm = 'hf_overrides={"rms_norm_eps": 0.5}'
    others = computation(ROPE), computation(norm), computation(max_model_len=256)
    given = _computation(engine_args(config_of(), None).create_engine_config(), {"rotates_twice": True})
    assert len({usual, given, *others}) == 5


def test_code_that_is_not_vllms_own_counts_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM runs the code of transformers for families that it has no class for, and has it and others read pictures."""
    foreign = engine_args(config_of("model_impl=transformers"), None).create_engine_config()
    own = engine_args(config_of(), None).create_engine_config()
    before = _computation(foreign, {}), _computation(own, {})
    monkeypatch.setattr(kv_namespace, "version", lambda name: "99.0")
    assert _computation(foreign, {}) != before[0]
    assert _computation(own, {}) == before[1]
    sees = SimpleNamespace(is_multimodal_model=True, using_transformers_backend=lambda: False)
    assert kv_namespace._code(sees) == "transformers 99.0 torchvision 99.0 pillow 99.0"


def test_what_this_server_corrects_of_vllm_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version that computes a model or its adapters rightly finds nothing that an earlier one has computed wrongly."""
    built, correction = engine_args(config_of(), None).create_engine_config(), tmp_path / "rotary.py"
    shipped = _computation(built, {})
    monkeypatch.setattr(kv_namespace, "OWN_PARTS", (*kv_namespace.OWN_PARTS, str(tmp_path)))
    found = [shipped, _computation(built, {})]
    for code in ("turns = 1", "turns = 2"):
        correction.write_text(code)
        found.append(_computation(built, {}))
    assert len(set(found)) == 4 and _computation(built, {}) == found[-1]


@pytest.mark.parametrize("way", ["replaced", "written over"])
def test_weights_that_change_while_they_are_loaded_are_no_others(tmp_path: Path, way: str) -> None:
    """An engine that has loaded the old ones finds the new ones' files when it is asked which it has."""
    folder, other = tmp_path / "model", tmp_path / "other"
    for each, content in ((folder, b"old"), (other, b"new")):
        each.mkdir()
        (each / "model.safetensors").write_bytes(content)
    model = SimpleNamespace(model=str(folder), model_weights="", hf_config=None)
    know_weights(str(folder), None, lambda phrase: None)
    before = revision_of(model)
    if way == "replaced":
        folder.rename(tmp_path / "outgoing")
        other.rename(folder)
    else:
        (folder / "model.safetensors").write_bytes(b"new")
    found = revision_of(model)
    know_weights(str(folder), None, lambda phrase: None)  # as the next engine does before it loads them
    after = revision_of(model)
    assert len({before, found, after, revision_of(model)}) == 3


def test_a_hubs_model_is_named_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes its configuration of params.json, and notes no commit then."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--name"
    for commit in ("1" * 40, "2" * 40):
        (cached / "snapshots" / commit).mkdir(parents=True)
        (cached / "snapshots" / commit / "params.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("2" * 40)
    described = {"model_weights": "", "hf_config": SimpleNamespace(), "revision": None}
    assert revision_of(SimpleNamespace(model="org/name", **described)) == f"org/name@{'2' * 40}"
    pinned = described | {"revision": "1" * 40}
    assert revision_of(SimpleNamespace(model="org/name", **pinned)) == f"org/name@{'1' * 40}"
    nowhere = revision_of(SimpleNamespace(model="org/other:Q4_K_M", **described))
    assert nowhere.startswith("org/other:Q4_K_M@unknown-")


def test_keys_that_cover_tokens_behind_their_block_are_other_keys() -> None:
    cache = SimpleNamespace(prefix_caching_hash_algo="sha256")
    usual = SimpleNamespace(cache_config=cache)  # vLLM 0.32
    found = [
        _hash_algorithm(SimpleNamespace(cache_config=cache, num_hash_lookahead_tokens=ahead))
        for ahead in (0, 1, 3)
    ]
    assert found == [_hash_algorithm(usual), "sha256 and 1 tokens ahead", "sha256 and 3 tokens ahead"]


def test_kv_that_nothing_uses_after_an_upgrade_is_told_of_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for name in ("model-now", "model-before", "model-long-before"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
        (tmp_path / name / "segment-0000000000.kv").write_bytes(bytes(600))
    tell_of_other_stores(tmp_path / "model-now", 8 * 1200)
    assert not caplog.text
    tell_of_other_stores(tmp_path / "model-now", 8 * 1199)
    assert f"KV in {tmp_path} are of other models" in caplog.text and "overture kv prune" in caplog.text
    tell_of_other_stores(tmp_path / "gone" / "model-now", 1)
    assert "not known" in caplog.text
