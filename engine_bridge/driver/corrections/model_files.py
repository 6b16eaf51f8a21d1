"""What a model's files say in another way than vLLM reads it, or do not have."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Set
from functools import cache, wraps
from typing import Any

log = logging.getLogger(__name__)

_MOST_NAMES = 3
_OUTPUT_LAYER = "lm_head.weight"


@cache
def read_query_scales() -> None:
    """Have vLLM read by which scale queries grow with their position, in Mistral's models in Hugging Face's format (Ministral 3).

    vLLM's class knows the scale by the name that it has in Mistral's own format alone. Behind the context that such a model was first trained with,
    its queries are too small then. Source: vLLM 0.32, `model_executor/models/mistral.py`; transformers 5.19, `models/ministral3`.
    """
    from engine_bridge.driver.vllm_api import MistralAttention

    stock = MistralAttention.__init__

    @wraps(stock)
    def init(self: Any, config: Any, *rest: Any, **options: Any) -> None:
        """Make a layer, as vLLM has it, of a configuration that names the scale as vLLM does."""
        rope = getattr(config, "rope_parameters", None) or {}
        beta, first_context = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        # Without the first context nobody knows where the scale begins: the model is served as vLLM serves it.
        if beta and first_context and getattr(config, "llama_4_scaling", None) is None:
            config.llama_4_scaling = {"beta": beta, "original_max_position_embeddings": first_context}
        stock(self, config, *rest, **options)

    MistralAttention.__init__ = init


@cache
def note_missing_weights() -> None:
    """Have vLLM's loader note at a model which of its weights were in no file.

    vLLM ends with an error where its class has a weight that the files lack, except in linear layers, embeddings and output layers, some of whose
    weights are made once all are loaded. Such a layer computes with whatever its memory held. Source: vLLM 0.32,
    `model_executor/model_loader/default_loader.py`.
    """
    from engine_bridge.driver.vllm_api import DefaultModelLoader

    stock = DefaultModelLoader.track_weights_loading

    @wraps(stock)
    def track_weights_loading(
        self: Any, model: Any, loaded_weights: set[str] | None, *rest: Any, **options: Any
    ) -> None:
        """Check what was loaded, as vLLM does, and note what was not."""
        loaded = set(loaded_weights or ())  # which vLLM adds to
        stock(self, model, loaded_weights, *rest, **options)
        if loaded:
            model.overture_missing_weights = _not_in(loaded, model)

    DefaultModelLoader.track_weights_loading = track_weights_loading


def _not_in(loaded: Set[str], model: Any) -> list[str]:
    """Return the weights of which no name is in `loaded`: a layer may stand in a model twice."""
    names = defaultdict(list)
    for name, weight in model.named_parameters(remove_duplicate=False):
        names[id(weight)].append(name)
    return [each[0] for each in names.values() if loaded.isdisjoint(each)]


def say_missing_weights(runner: Any) -> None:
    """Say in the log what a model runner's model lacks. A draft model is left out: it may have the model's own output layer."""
    names: list[str] = getattr(runner.model, "overture_missing_weights", [])
    if not names:
        return
    shown = ", ".join(names[:_MOST_NAMES]) + (
        f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else ""
    )
    hint = ""
    if any(name.endswith(_OUTPUT_LAYER) for name in names):
        hint = ". If its output layer is its embedding: --hf-overrides.tie_word_embeddings true"
    log.warning(
        "the model's files lack %s, which vLLM leaves as it is in memory: answers make no sense. Fetch the model again%s",
        shown,
        hint,
    )
