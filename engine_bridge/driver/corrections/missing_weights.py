"""Weights that a model's files lack.

vLLM ends with an error where its class has a weight that the files lack, except in linear layers, embeddings and output layers, some of whose weights
are made once all are loaded. Such a layer computes with whatever its memory held. Source: vLLM 0.32, `model_executor/model_loader/default_loader.py`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Set
from functools import wraps
from typing import Any

log = logging.getLogger(__name__)

_MOST_NAMES = 3
_OUTPUT_LAYER = "lm_head.weight"


def install() -> None:
    """Have vLLM's loader note at a model which of its weights were in no file."""
    from engine_bridge.driver.vllm_api import DefaultModelLoader

    stock = DefaultModelLoader.track_weights_loading
    if hasattr(stock, "__wrapped__"):
        return

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


def say(runner: Any) -> None:
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
