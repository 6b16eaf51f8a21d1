"""What a model can have on a device: decided from facts that are known before its weights are loaded.

What is not decided here may still fail when the engine is built: `driver/engine/fallback.py` tries fewer mechanisms then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from engine_bridge.protocol.errors import NotSupported

Mechanism = Literal["adapters", "KV tiers", "prefix caching", "expert parallelism", "pictures", "drafts"]
CONSEQUENCES: Mapping[Mechanism, str] = {
    "adapters": "every request is answered by the base model",
    "KV tiers": "KV that leaves the device is computed again, and nothing is brought nearer ahead of a request",
    "expert parallelism": "each device has a part of every expert",
    "pictures": "text alone is read",
    "drafts": "each step computes one token of an answer",
    "prefix caching": "every prompt is computed as a whole, and nothing can be computed or brought nearer ahead of a request",
}


class Unservable(NotSupported):
    """A model cannot be served with these settings.

    Attributes:
        why: the reason, as a phrase, in vLLM's words where it is vLLM that refuses.
        remedy: what helps, as a sentence; "" where that is not known.
    """

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(f"{why.rstrip('.')}. {remedy}".rstrip())
        self.why = why
        self.remedy = remedy


class CannotHave(Unservable):
    """An engine cannot have mechanisms that it was to be built with. reasons: by mechanism, why not, as a phrase."""

    def __init__(self, reasons: Mapping[Mechanism, str]) -> None:
        whys = " and ".join(f"{mechanism} ({why})" for mechanism, why in reasons.items())
        settings = ": --adapters on and --lora-module" if "adapters" in reasons else ""
        super().__init__(
            f"this model cannot have {whys}", f"Take away the settings that ask for it{settings}"
        )
        self.reasons = reasons


class UnusableModel(Unservable):
    """vLLM cannot serve a model: it refuses it before it loads the weights, or lacks what would compute it."""


class ModelFacts(Struct, frozen=True, kw_only=True):
    """Facts that vLLM knows of a model before it loads the weights.

    Attributes:
        architecture: the name of vLLM's class.
        takes_adapters: whether vLLM has LoRA for that class.
        is_recurrent: whether layers keep a state in place of KV, such as Mamba's or a gated delta net's.
        is_speculative: whether tokens are drafted.
        undoes_drafts: whether recurrent layers take the state back to before drafted tokens that were refused.
        splits_by_expert: whether devices can have whole experts each.
        reuses_kv: whether vLLM reuses the KV of a prompt's beginning, by the settings and by its own decision for this model.
        generates: whether vLLM has it generate text; else it makes embeddings or scores.
        has_encoder: whether it reads its input by an encoder of its own, as models that transcribe speech do.
        missing_operation: the name of an operation that the model's layers call and vLLM's build for the device lacks; "" where none is missing.
    """

    architecture: str
    takes_adapters: bool = True
    is_recurrent: bool = False
    is_speculative: bool = False
    undoes_drafts: bool = True
    splits_by_expert: bool = True
    reuses_kv: bool = True
    generates: bool = True
    has_encoder: bool = False
    missing_operation: str = ""


def left_out(facts: ModelFacts) -> dict[Mechanism, str]:
    """Return the mechanisms that a model cannot have, each with the reason, as a phrase."""
    found: dict[Mechanism, str] = {}
    if not facts.takes_adapters:
        found["adapters"] = f"vLLM has no LoRA for {facts.architecture}"
    if not facts.splits_by_expert:
        # Of vLLM 0.32: its kernel reads the weights of experts that the rank does not have, and the rank ends.
        found["expert parallelism"] = "vLLM's experts on a CPU are computed whole or in parts of each"
    has_lost_drafts = facts.is_recurrent and facts.is_speculative and not facts.undoes_drafts
    if has_lost_drafts:
        found["drafts"] = (
            f"on this device vLLM leaves drafted tokens that were refused in the state of {facts.architecture}, "
            "so that its answers would be wrong"
        )
    if not facts.reuses_kv:
        found["KV tiers"] = "vLLM computes every prompt of this model anew here (its prefix caching is off)"
    elif facts.is_recurrent and facts.is_speculative and not has_lost_drafts:
        found["KV tiers"] = (
            "with drafted tokens, recurrent layers have a step's state only after its KV was saved"
        )
    return found
