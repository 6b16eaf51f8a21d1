"""An engine that cannot have a mechanism is built without it, and what fails for other reasons is said as it is."""

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_bridge.driver.engine.fallback import build_with_what_works
from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig
from engine_bridge.driver.ranks.failing import RankFailed
from engine_bridge.driver.ranks.starting import RankKilled
from engine_bridge.policy.limits.model_support import CannotHave, UnusableModel
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.settings.engine_config import EngineConfig

CONFIG = EngineConfig(model="m", served_model_name="m", enable_lora=True)
NO_LORA = CannotHave({"adapters": "vLLM has no LoRA for OddForCausalLM"})
ODD = ValueError("an odd kernel")
# What an engine is tried with: adapters, tiers, prefix caching.
Tried = tuple[bool, bool, bool]
ALL, BASE, UNTIERED, UNCACHED = (
    (True, True, True),
    (False, True, True),
    (True, False, True),
    (True, False, False),
)


def built(
    fails: Callable[[Tried], Exception | None], config: EngineConfig = CONFIG, *, needs_adapters: bool = False
) -> tuple[list[Tried], dict[str, str]]:
    """Return each engine that was tried, and what is left out."""
    tried: list[Tried] = []
    given = KvTiers(TiersConfig(host_bytes=1 << 20, disk_bytes=0, folder=Path("unused")))

    def build(config: EngineConfig, tiers: KvTiers | None) -> str:
        tried.append((config.enable_lora, tiers is not None, config.enable_prefix_caching))
        if (error := fails(tried[-1])) is not None:
            raise error
        return "an engine"

    driver, last, left_out = build_with_what_works(config, given, build, needs_adapters=needs_adapters)
    assert driver == "an engine" and last.enable_lora == tried[-1][0]
    assert given.is_off != tried[-1][1]
    return tried, {each.mechanism: each.why for each in left_out}


@pytest.mark.parametrize(
    "error",
    [
        OSError("Can't load image processor for 'm'"),
        ModuleNotFoundError("No module named 'odd'"),
        ValueError("Following weights were not initialized from checkpoint: {'visual.norm.weight'}"),
    ],
)
def test_without_what_it_reads_pictures_with_a_model_is_one_of_text(error: Exception) -> None:
    tried: list[int] = []

    def build(config: EngineConfig, tiers: KvTiers | None) -> str:
        tried.append(config.max_images)
        if config.max_images or is_of_text:
            raise error
        return "an engine"

    is_of_text = False
    _, last, left_out = build_with_what_works(CONFIG, None, build, needs_adapters=True)
    assert (tried, last.max_images) == ([CONFIG.max_images, 0], 0)
    assert [each.mechanism for each in left_out] == ["pictures"] and str(error) in left_out[0].why
    is_of_text = True
    with pytest.raises((OSError, UnusableModel), match=r"image processor|'odd'|visual\.norm"):
        build_with_what_works(CONFIG, None, build, needs_adapters=True)
    assert tried[2:] == [CONFIG.max_images, 0]


def test_pictures_and_adapters_may_both_be_at_fault() -> None:
    def build(config: EngineConfig, tiers: KvTiers | None) -> str:
        if config.max_images:
            raise ModuleNotFoundError("No module named 'odd'")
        if config.enable_lora:
            raise ODD
        return "an engine"

    _, last, left_out = build_with_what_works(CONFIG, None, build, needs_adapters=False)
    assert (last.max_images, last.enable_lora) == (0, False)
    why = {each.mechanism: each.why for each in left_out}
    assert why.keys() == {"pictures", "adapters"}
    assert "No module named 'odd'" in why["pictures"] and str(ODD) in why["adapters"]


def test_what_works_is_built_once() -> None:
    assert built(lambda _: None) == ([ALL], {})


def test_what_a_model_is_known_to_lack_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tried, left_out = built(lambda tried: NO_LORA if tried[0] else None)
    assert tried == [ALL, BASE]
    assert left_out == {"adapters": "vLLM has no LoRA for OddForCausalLM"}
    assert [record.getMessage() for record in caplog.records] == [
        "this server runs without adapters, so every request is answered by the base model: vLLM has no LoRA for OddForCausalLM"
    ]


def test_a_model_may_lack_several() -> None:
    both = CannotHave({"adapters": "none", "KV tiers": "none"})
    assert built(lambda tried: both if tried[0] else None) == (
        [ALL, (False, False, True)],
        {"adapters": "none", "KV tiers": "none"},
    )


def test_what_fails_for_unknown_reasons_is_built_with_the_smallest_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        tried, left_out = built(lambda tried: ODD if tried[2] else None)
    assert tried == [ALL, BASE, UNTIERED, (False, False, True), UNCACHED]
    assert left_out.keys() == {"prefix caching", "KV tiers"} and "an odd kernel" in left_out["prefix caching"]
    assert "is built again without adapters. The reason: ValueError: an odd kernel" in caplog.text
    tried, left_out = built(lambda tried: ODD if tried[1] else None)
    assert tried == [ALL, BASE, UNTIERED]
    assert left_out == {"KV tiers": "the engine cannot be built with it (ValueError: an odd kernel)"}
    tried, left_out = built(lambda tried: ODD if tried[0] or tried[2] else None)
    assert tried[-1] == (False, False, False) and left_out.keys() >= {"adapters", "prefix caching"}


@pytest.mark.parametrize(
    ("error", "needs_adapters"),
    [
        (NO_LORA, True),
        (OSError("no such folder"), False),
        (MemoryError("no room"), False),
        (UnusableModel("an unknown architecture"), False),
        (RankKilled("rank 1 was killed"), False),
        (RankFailed("FileNotFoundError: no such folder", frozenset({"FileNotFoundError", "OSError"})), False),
        (ValueError("10 GiB KV cache memory is needed"), False),
        (InvalidRequest("an engine argument of vLLM's: invalid float value: 'abc'"), False),
    ],
)
def test_what_only_the_user_can_mend_is_an_error_at_once(error: Exception, needs_adapters: bool) -> None:
    num_tries = 0

    def fails(_: Tried) -> Exception:
        nonlocal num_tries
        num_tries += 1
        return error

    with pytest.raises(type(error), match=re.escape(str(error))):
        built(fails, needs_adapters=needs_adapters)
    assert num_tries == 1


def test_what_helps_nowhere_is_the_first_error() -> None:
    errors = iter([ValueError("the cause"), *(ValueError("another") for _ in range(9))])
    with pytest.raises(ValueError, match="the cause"):
        built(lambda _: next(errors))


@pytest.mark.parametrize(
    ("error", "says", "num_tries"),
    [
        (RuntimeError("Cannot find any model weights with `m`"), "Fetch the model again", 1),
        (
            ValueError("There is no module or parameter named 'lm_head' in OddModel. The available ones"),
            "not those of OddModel, which has no lm_head.* --speculative-config",
            1,
        ),
        (
            ValueError("No tokenizer registered for tokenizer_mode='slow'."),
            "Choose another --tokenizer-mode",
            1,
        ),
        (ValueError("This model requires `--tokenizer-mode mistral`"), "Choose another --tokenizer-mode", 1),
        (
            ValueError(
                "1 validation error for CacheConfig\ncache_dtype\n  Input should be 'auto' [type=literal"
            ),
            "cache_dtype is set wrong: Input should be 'auto'.*Change the setting",
            1,
        ),
        (ValueError("No common block size for 7 (CPU_ATTN: [MultipleOf(32)])."), "Change --block-size", 1),
        (ValueError("Load format `odd` is not supported"), "Change the setting", 1),
        (
            ValueError("Unknown attention backend: 'ODD'. Valid options are: A"),
            "'ODD'.*Change the setting",
            1,
        ),
        (
            ValueError(
                "2 validation errors for ModelConfig\nhf_overrides.dict[str,any]\n  Input is odd [type=d"
            ),
            "hf_overrides is set wrong: Input is odd",
            1,
        ),
        (
            ValueError(
                "validation error for VllmConfig\n  Value error, Cannot find the config file for awq [type=value"
            ),
            "not quantised so.*Take away --quantization",
            1,
        ),
        (
            ValueError("Invalid repository ID or local directory specified: '/odd'.\nPlease"),
            "there is no folder '/odd'",
            1,
        ),
        (ValueError("Head dimension 64 is not supported by MLA."), "have this model's sizes.*--device", 1),
        # Adapters or tiers may have called for what the device lacks.
        (AttributeError("'_OpNamespace' '_C' object has no attribute 'odd_scan'"), "odd_scan.*--device", 6),
    ],
)
def test_what_vllm_cannot_serve_is_said_with_what_to_do(error: Exception, says: str, num_tries: int) -> None:
    tries: list[Tried] = []
    with pytest.raises(UnusableModel, match=says) as raised:
        built(lambda tried: tries.append(tried) or error)
    assert raised.value.remedy and raised.value.__cause__ is error
    assert len(tries) == num_tries


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            RuntimeError("start (0) + length (256)"),
            r"weights into the model .*\(\w+Error: .*Fetch the model again",
        ),
        (AssertionError("(8, 8)"), r"weights into the model .*\(\w+Error: .*Fetch the model again"),
        (KeyError("blocks.0.w13_weight"), r"no place for .*blocks\.0\.w13_weight.*another release of vLLM"),
    ],
)
def test_weights_that_do_not_fit_are_loaded_once(error: Exception, says: str) -> None:
    tries: list[Tried] = []

    def load_weights(tried: Tried) -> Exception | None:
        tries.append(tried)
        raise error

    with pytest.raises(UnusableModel, match=says):
        built(load_weights)
    assert len(tries) == 1


def test_tokens_that_cannot_be_drafted_are_computed_one_by_one_however_it_was_asked_for() -> None:
    tried: list[tuple[str | None, tuple[str, ...]]] = []

    def build(config: EngineConfig, tiers: KvTiers | None) -> str:
        tried.append((config.speculative_config, config.engine_args))
        if len(tried) == 1:
            raise CannotHave({"drafts": "its answers would be wrong"})
        return "an engine"

    asked = EngineConfig(
        model="m",
        served_model_name="m",
        speculative_config='{"method": "ngram"}',
        engine_args=(
            "spec-method=ngram",
            "spec_tokens=3",
            "stream_interval=2",
            "per_request_spec_decode_metrics=summary",
        ),
    )
    built = build_with_what_works(asked, None, build, needs_adapters=False)
    assert tried[1] == (None, ("stream_interval=2",))
    assert [each.mechanism for each in built.left_out] == ["drafts"]


def test_a_wrong_setting_of_adapters_costs_them_alone() -> None:
    wrong = ValueError("1 validation error for LoRAConfig\nmax_lora_rank\n  Input should be 1 [type=literal")
    tried, left_out = built(lambda tried: wrong if tried[0] else None)
    assert tried == [ALL, BASE] and left_out.keys() == {"adapters"}


def test_an_error_without_a_text_is_said_by_the_line_that_raised_it(tmp_path: Path) -> None:
    router = tmp_path / "odd_router.py"
    router.write_text("\nassert not 'softmax'\n")
    code = compile(router.read_text(), str(router), "exec")
    with pytest.raises(UnusableModel, match=r"assert not 'softmax' \(odd_router.py:2\).*--device"):
        built(lambda _: exec(code))
