"""What vLLM knows of a model before it loads the weights."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from engine_bridge.driver.engine.building import configure_environment, engine_args
from engine_bridge.driver.engine.errors_text import said_by
from engine_bridge.driver.in_process import reuses_kv
from engine_bridge.policy.limits.model_support import (
    CannotHave,
    Mechanism,
    ModelFacts,
    UnusableModel,
    left_out,
)
from engine_bridge.policy.limits.refusals import DIVIDING_PARTS, OTHER_DRAFTS, refusal, refusal_of
from engine_bridge.settings.engine_config import EngineConfig

if TYPE_CHECKING:
    from engine_bridge.driver.kv.kv_tiers import KvTiers

log = logging.getLogger(__name__)

# How pydantic writes that vLLM refuses a model, or, of the whole configuration, to split it into so many parts. Other faults of the whole may end
# where a mechanism is left out.
_NO_EXPERTS = "Number of experts in the model must be greater than 0"
_WHOLE_EXPERTS = "--enable-expert-parallel gives each device whole experts, and this model has none"
_REFUSED, _UNDIVIDED, _WHY = "error for ModelConfig", "divisible by tensor parallel size", "Value error, "
_OF_DRAFTS = "error for SpeculativeConfig"
# Behind the reason stand where it was found, and names of some hundred other models.
_SAYS_LITTLE = r" \[type=|\. Please check the logs|\. Supported architectures:"
# By the class of a layer of vLLM's, what it calls on a CPU. Found by serving the models that have it: vLLM 0.32 builds the second for GPUs alone.
_OPERATIONS = {"MambaMixer": "selective_scan_fwd"}
# Kinds of RoPE for which vLLM multiplies the context by their factor, and makes a table of positions for the trained context alone. Behind its
# end a token is turned by what lies in memory there, so its answer is noise. Source: vLLM 0.32, `config/model.py`, `_get_and_verify_max_len`, and
# `model_executor/layers/rotary_embedding`.
_SHORT_TABLES = frozenset(("dynamic", "ntk"))
_NEEDS_TORCHVISION = (
    "Models of families that can read pictures need torchvision for text, too: install the build for your torch, such as "
    "`pip install torchvision==0.28.0 --index-url https://download.pytorch.org/whl/cpu`"
)


def configuration_of(args: Any) -> Any:
    """Return the whole configuration of an engine (`VllmConfig`) with these arguments (`EngineArgs`), which vLLM completes.

    Raises:
        UnusableModel: vLLM refuses the model, to split it so, or to draft its tokens so. Other errors of vLLM pass unchanged.
    """
    try:
        return args.create_engine_config()
    except NotImplementedError as error:
        if (refused := refusal_of(str(error))) is not None:
            raise refused from error
        raise
    except ValueError as error:
        head, _, text = str(error).partition(_WHY)
        why = re.split(_SAYS_LITTLE, text, maxsplit=1)[0]
        if _NO_EXPERTS in str(error):
            raise UnusableModel(_WHOLE_EXPERTS, "Take away --enable-expert-parallel") from error
        if _UNDIVIDED in why:
            raise UnusableModel(why, DIVIDING_PARTS) from error
        if _OF_DRAFTS in head:
            raise UnusableModel(" ".join(why.split()), OTHER_DRAFTS) from error
        if _REFUSED not in head:
            raise
        is_inspected = "failed to be inspected" not in why
        needs_torchvision = not is_inspected and not _has_torchvision()
        raise UnusableModel(why, _NEEDS_TORCHVISION if needs_torchvision else "") from error


def _has_torchvision() -> bool:
    """Return whether it can be imported: the build for CUDA beside a CPU build of torch cannot."""
    try:
        import torchvision  # noqa: F401
    except Exception:
        return False
    return True


def left_out_of(facts: ModelFacts, config: EngineConfig, *, has_tiers: bool) -> dict[Mechanism, str]:
    """Return which of the mechanisms that an engine's settings ask for its model cannot have, and why. has_tiers: KV is to be kept in tiers."""
    asked: dict[Mechanism, bool] = {
        "adapters": config.enable_lora,
        "KV tiers": has_tiers,
        "expert parallelism": config.enable_expert_parallel,
        "drafts": True,  # by one of several arguments, or by the facts there are none
    }
    return {name: why for name, why in left_out(facts).items() if asked.get(name)}


def check_model(config: EngineConfig, tiers: KvTiers | None) -> EngineConfig:
    """Find out before the weights are loaded what a model rules out.

    Returns:
        the settings, with no longer a context than the model has positions for.

    Raises:
        CannotHave: the model cannot have what these settings ask for.
        UnusableModel: vLLM refuses it, or lacks what computes it.
    """
    vllm_config = configuration_of(engine_args(config, tiers))
    facts = facts_of(vllm_config)
    if (refused := refusal(facts)) is not None:
        raise refused
    if reasons := left_out_of(facts, config, has_tiers=tiers is not None):
        raise CannotHave(reasons)
    model = vllm_config.model_config
    num_positions = num_positions_of(model.hf_text_config)
    if num_positions is None or model.max_model_len <= num_positions:
        return config
    log.warning("the context ends at %s tokens: vLLM has no more positions of this model", num_positions)
    return replace(config, max_model_len=num_positions)


def num_positions_of(text_config: Any) -> int | None:
    """Return how many positions vLLM's layers know where that may be less than the context that vLLM allows; else None.

    text_config: a model's configuration, as transformers reads it.
    """
    ropes: dict[str, Any] = getattr(text_config, "rope_parameters", None) or {}
    nested = [each for each in ropes.values() if isinstance(each, dict)]  # by kinds of layers
    kinds = {each.get("rope_type") for each in nested or [ropes]}
    return getattr(text_config, "max_position_embeddings", None) if kinds & _SHORT_TABLES else None


def prepare(settings: bytes) -> EngineConfig:
    """Read an engine's settings, which are JSON, and set its environment. Call it before vLLM is imported."""
    config = msgspec.json.decode(settings, type=EngineConfig, dec_hook=lambda kind, value: kind(value))
    configure_environment(config)
    return config


def told(config: EngineConfig) -> dict[str, Any]:
    """Return what the model of these settings cannot have, for `overture doctor`: {"left_out"}, or {"why", "remedy"} where it cannot be served."""
    try:
        facts = _facts_as_built(config)
    except UnusableModel as error:
        return {"why": error.why, "remedy": error.remedy}
    except Exception as error:
        refused = refusal_of(said_by(error))
        return (
            {"why": said_by(error), "remedy": ""}
            if refused is None
            else {"why": refused.why, "remedy": refused.remedy}
        )
    if (refused := refusal(facts)) is not None:
        return {"why": refused.why, "remedy": refused.remedy}
    return {"left_out": left_out_of(facts, config, has_tiers=config.kv_host_gib > 0)}


def _facts_as_built(config: EngineConfig) -> ModelFacts:
    """Return the facts of a model; where vLLM fails to set it up, those without adapters and prefix caching, as the engine would be built."""
    try:
        return facts_of(configuration_of(engine_args(config, None)))
    except UnusableModel:
        raise
    except Exception:
        less = replace(config, enable_lora=False, enable_prefix_caching=False)
        with contextlib.suppress(Exception):
            return facts_of(configuration_of(engine_args(less, None)))
        raise


def facts_of(vllm_config: Any) -> ModelFacts:
    """Return the facts that decide what a model can have. Imports vLLM's class of the model. vllm_config: see `configuration_of`."""
    from engine_bridge.driver.vllm_api import get_model_architecture, supports_lora

    model = vllm_config.model_config
    model_class, architecture = get_model_architecture(model)
    return ModelFacts(
        architecture=architecture,
        takes_adapters=bool(supports_lora(model_class)),
        is_recurrent=bool(model.is_hybrid or model.is_attention_free),
        is_speculative=vllm_config.speculative_config is not None,
        # Of vLLM 0.32: its kernels for CPUs know one state of a sequence, that behind all tokens of a step.
        undoes_drafts=vllm_config.device_config.device_type != "cpu",
        splits_by_expert=vllm_config.device_config.device_type != "cpu",
        reuses_kv=reuses_kv(vllm_config),
        generates=model.runner_type == "generate",
        has_encoder=bool(model.is_encoder_decoder),
        missing_operation=missing_operation(model_class)
        if vllm_config.device_config.device_type == "cpu"
        else "",
    )


def missing_operation(model_class: type) -> str:
    """Return the operation that a model's layers call on a CPU and vLLM's build lacks; "" for none. A class's layers stand in its module."""
    from engine_bridge.driver.vllm_api import _custom_ops

    layers = vars(sys.modules[model_class.__module__])
    needed = (operation for layer, operation in _OPERATIONS.items() if layer in layers)
    return next((each for each in needed if not hasattr(_custom_ops.torch.ops._C, each)), "")
