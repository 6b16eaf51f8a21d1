"""What vLLM knows of a model before it loads the weights."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from engine_bridge.driver.in_process import reuses_kv
from engine_bridge.policy.limits.model_support import ModelFacts, UnusableModel

# How pydantic writes that vLLM refuses a model.
_REFUSED, _WHY = "error for ModelConfig", "Value error, "
_NEEDS_PICTURES = (
    "Models of families that can read pictures need torchvision for text, too, and it is not installed: install the build for your torch, such as "
    "`pip install torchvision==0.28.0 --index-url https://download.pytorch.org/whl/cpu`"
)


def configuration_of(args: Any) -> Any:
    """Return the whole configuration of an engine (`VllmConfig`) with these arguments (`EngineArgs`), which vLLM completes.

    Raises:
        UnusableModel: vLLM refuses the model. Other errors of vLLM pass unchanged.
    """
    try:
        return args.create_engine_config()
    except ValueError as error:
        head, _, text = str(error).partition(_WHY)
        if _REFUSED not in head:
            raise
        text = text.partition(" [type=")[0]
        if "failed to be inspected" in text and find_spec("torchvision") is None:
            text = f"{text.partition('. Please')[0]}. {_NEEDS_PICTURES}"
        raise UnusableModel(text) from error


def facts_of(vllm_config: Any) -> ModelFacts:
    """Return the facts that decide what a model can have. Imports vLLM's class of the model.

    Args:
        vllm_config: see `configuration_of`.
    """
    from engine_bridge.driver.vllm_api import get_model_architecture, supports_lora

    model = vllm_config.model_config
    model_class, architecture = get_model_architecture(model)
    # As transformers writes them: one name for each layer, such as "sliding_attention".
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    return ModelFacts(
        architecture=architecture,
        takes_adapters=bool(supports_lora(model_class)),
        is_recurrent=bool(model.is_hybrid or model.is_attention_free),
        has_several_kinds=len(kinds) > 1,
        reuses_kv=reuses_kv(vllm_config),
    )
