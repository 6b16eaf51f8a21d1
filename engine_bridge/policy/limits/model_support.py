"""What a model can have on a device: decided from facts that are known before its weights are loaded.

What is not decided here may still fail when the engine is built: `driver/engine/fallback.py` tries fewer mechanisms then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from engine_bridge.protocol.errors import NotSupported

Mechanism = Literal["adapters", "KV tiers", "prefix caching", "hybrid KV cache"]
"""`hybrid KV cache`: layers with a window keep KV of their window, and layers without one KV of all tokens."""
CONSEQUENCES: Mapping[Mechanism, str] = {
    "adapters": "every request is answered by the base model",
    "KV tiers": "KV that leaves the device is computed again, and nothing is brought nearer ahead of a request",
    "prefix caching": "every prompt is computed as a whole, and nothing can be computed or brought nearer ahead of a request",
    "hybrid KV cache": "layers with a window take as much KV memory as layers without one",
}


class CannotHave(NotSupported):
    """An engine cannot have mechanisms that it was to be built with.

    Attributes:
        reasons: by mechanism, why not, as a phrase.
    """

    def __init__(self, reasons: Mapping[Mechanism, str]) -> None:
        whys = " and ".join(f"{mechanism} ({why})" for mechanism, why in reasons.items())
        super().__init__(f"this model cannot have {whys}. Take away the settings that ask for it")
        self.reasons = reasons


class UnusableModel(NotSupported):
    """vLLM refuses a model before it loads the weights.

    Attributes:
        why: in vLLM's words.
        remedy: what helps; "" where that is not known.
    """

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(f"{why.rstrip('.')}. {remedy}".rstrip())
        self.why = why
        self.remedy = remedy


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What vLLM knows of a model before it loads the weights.

    Attributes:
        architecture: the name of vLLM's class.
        takes_adapters: whether vLLM has LoRA for that class.
        is_recurrent: whether layers keep a state in place of KV, such as Mamba's or a gated delta net's.
        has_several_kinds: whether some layers have a window, or see a chunk of the context, and others all of it.
        reuses_kv: whether vLLM reuses the KV of a prompt's beginning, after what it was told and what it decided itself.
    """

    architecture: str
    takes_adapters: bool = True
    is_recurrent: bool = False
    has_several_kinds: bool = False
    reuses_kv: bool = True


def left_out(facts: ModelFacts) -> dict[Mechanism, str]:
    """Return the mechanisms that a model cannot have, each with the reason, as a phrase."""
    found: dict[Mechanism, str] = {}
    if not facts.takes_adapters:
        found["adapters"] = f"vLLM has no LoRA for {facts.architecture}"
    if not facts.reuses_kv:
        found["KV tiers"] = "vLLM computes every prompt of this model anew here (its prefix caching is off)"
    elif facts.is_recurrent:
        found["KV tiers"] = "layers of this model keep a state in place of KV, which the tiers do not hold"
    elif facts.has_several_kinds:
        found["hybrid KV cache"] = "the KV tiers need layers that keep their KV alike"
    return found
